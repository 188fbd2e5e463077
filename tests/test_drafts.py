"""Drafts: packed equals unpacked, shape of the 30M model, warm starts, saved folders, mistakes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.drafts import build_draft, gpt2_draft, init_from_target_pca, load_draft, packed_hidden, padded_layout
from models.errors import UserError
from models.target import Target
from models.tiny import random_model


@pytest.mark.parametrize("shape", ["tiny_gpt2", "tiny_llama"])
@pytest.mark.parametrize("lengths", [[5], [8, 8, 8], [3, 17, 64, 1, 60, 2, 33]])
def test_packed_equals_each_row_alone(shape: str, lengths: list[int]) -> None:
    """Hidden states and gradients, with grouped queries (Llama) and without."""
    model = random_model(shape).train()
    implementation = model.config._attn_implementation
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    input_ids = torch.randint(259, (int(offsets[-1]),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    weight = torch.randn(int(offsets[-1]), model.config.hidden_size)
    packed = packed_hidden(model, input_ids, positions, offsets.int())
    (packed * weight).sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    alone = torch.cat(
        [
            model.base_model(input_ids=input_ids[None, a:b], use_cache=False).last_hidden_state[0]
            for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())
        ]
    )
    (alone * weight).sum().backward()
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    for grad, parameter in zip(grads, [p for p in model.parameters() if p.grad is not None]):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-4 * parameter.grad.abs().max().item())
    assert model.config._attn_implementation == implementation


def test_layout_wastes_at_most_a_quarter() -> None:
    lengths = torch.randint(1, 513, (200,))
    layout = padded_layout(torch.cat((torch.zeros(1).long(), lengths.cumsum(0))), torch.device("cpu"))
    assert layout.packed is not None and layout.padded is not None
    assert torch.equal(layout.packed.sort().values, torch.arange(int(lengths.sum())))
    assert len(layout.padded.unique()) == len(layout.padded)
    assert int(lengths.sum()) / layout.num_padded > 0.75


def test_saved_folder_is_plain_transformers(tmp_path: Path) -> None:
    draft = gpt2_draft(259, n_layer=1, n_head=2, n_embd=16, n_positions=64, eos_token_ids=(256, 258))
    ids = torch.arange(10)
    packed_hidden(draft, ids, ids, torch.tensor([0, 10]))
    draft.save_pretrained(tmp_path)
    assert "draftsmith" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids[None]).logits, draft(ids[None]).logits)
    assert loaded.generation_config.eos_token_id == [256, 258]
    assert not load_draft(tmp_path).training


def test_the_30m_draft_has_30m_parameters() -> None:
    with torch.device("meta"):
        draft = gpt2_draft(50257)
    assert sum(p.numel() for p in draft.parameters()) == pytest.approx(30.3e6, rel=0.005)
    config = draft.config
    assert (config.n_layer, config.n_head, config.n_embd, config.n_positions) == (6, 6, 384, 1024)
    assert draft.lm_head.weight is draft.transformer.wte.weight


def test_same_seed_same_draft_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (gpt2_draft(50, n_layer=1, n_head=1, n_embd=8, n_positions=8, seed=s) for s in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_target_pca_keeps_the_geometry_of_the_target(tiny_target: Target) -> None:
    """With as many axes as the target has, distances are kept up to one scale; with fewer, most of the variance."""
    draft = gpt2_draft(259, n_layer=1, n_head=4, n_embd=64, n_positions=32)
    std = draft.lm_head.weight.std()
    init_from_target_pca(draft, tiny_target)
    ours, theirs = draft.lm_head.weight.detach(), tiny_target.embedding[:259]
    ratio = torch.pdist(ours) / torch.pdist(theirs)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)
    torch.testing.assert_close(ours.std(), std)
    wide = gpt2_draft(259, n_layer=1, n_head=4, n_embd=80, n_positions=32)
    before = wide.lm_head.weight[:, 64:].clone()
    init_from_target_pca(wide, tiny_target)
    assert torch.equal(wide.lm_head.weight[:, 64:], before)


SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}


def test_init_from_a_folder_is_strict(tiny_target: Target, tmp_path: Path) -> None:
    draft: PreTrainedModel = build_draft(target=tiny_target, **SMALL, init="target_pca", seed=7)
    draft.save_pretrained(tmp_path)
    again = build_draft(target=tiny_target, **SMALL, init=str(tmp_path))
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert again.training
    with pytest.raises(UserError, match=r"draft\.init=.*h\.1\..* no such weight there"):
        build_draft(target=tiny_target, **{**SMALL, "n_layer": 2}, init=str(tmp_path))
    with pytest.raises(UserError, match=r"wpe\.weight is \(32, 16\) there and \(16, 16\)"):
        build_draft(target=tiny_target, **{**SMALL, "n_positions": 16}, init=str(tmp_path))
    ready_made = build_draft(target=tiny_target, kind="hf", id=str(tmp_path))
    assert torch.equal(ready_made.lm_head.weight, draft.lm_head.weight) and ready_made.training


def test_mistakes_name_key_value_and_fix(tiny_target: Target, tmp_path: Path) -> None:
    narrow = gpt2_draft(100, **SMALL)
    narrow.save_pretrained(tmp_path)
    for arguments, message in (
        ({"kind": "rnn"}, r"draft\.kind=rnn"),
        ({"kind": "hf"}, r"draft\.id: not given"),
        ({"kind": "hf", "id": str(tmp_path)}, "its head has 100 ids and the target 259"),
        ({"n_head": 5}, r"draft\.n_embd=384.*draft\.n_head=5"),
        ({"init": "no/such/folder"}, r"draft\.init=no/such/folder: no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            build_draft(target=tiny_target, **arguments)
