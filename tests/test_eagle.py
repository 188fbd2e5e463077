"""EAGLE heads: names that engines read, strict loading, taps, draft vocabulary, training, expected alpha."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import train.eagle_module
from data.datamodule import Item, PackedDataModule, PackedRows
from data.draft_vocab import coverage, frequent_ids
from data.rows import Rows
from data.signals import SignalSpec
from eval.alpha import evaluate_alpha, token_alpha
from eval.loop import speculative_decode
from models.eagle import EagleHead, build_eagle, is_eagle_folder, load_eagle
from models.errors import UserError
from models.target import Target, load_target
from train.eagle_module import Eagle1Distiller, Eagle3Distiller, packed_outputs
from train.losses import LossSpec
from train.module import OptimSpec, make_optimizer


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


@pytest.fixture(scope="module")
def gpt2_target() -> Target:
    return load_target("random:tiny_gpt2", dtype="fp32", device="cpu", tap_ids=[0, 1, 3])


def chat_rows(num_rows: int = 12, seed: int = 0) -> Rows:
    """Rows with an unsupervised start, of several lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 30, num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.concatenate([np.arange(n) >= n // 3 for n in lengths])
    return Rows(rng.integers(0, 250, offsets[-1]).astype(np.int32), mask, offsets, np.arange(num_rows))


def distiller(target: Target, head: EagleHead, **options) -> Eagle3Distiller | Eagle1Distiller:
    wiring = {
        "vocab_size": target.vocab_size,
        "loss": LossSpec(),
        "optim": OptimSpec(lr=3e-3),
        "signal": SignalSpec("hidden", tap_ids=target.tap_ids if head.config.version == 3 else None),
        "total_steps": 10,
        "target": target,
    }
    if head.config.version == 1:
        return Eagle1Distiller(head, **wiring)
    return Eagle3Distiller(head, **wiring, metrics_every=0, **options)


def test_shapes_and_names_are_the_engines(target: Target, tmp_path: Path) -> None:
    ids = torch.tensor([5, 9, 100])
    head = build_eagle(target=target, draft_vocab_size=3, draft_vocab=ids)
    head.set_tap_scale(torch.rand(20, 3, 64) * 9, keep_function=False)
    head.save_pretrained(tmp_path)
    state = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    layer = "midlayer."
    assert state == {
        "embed_tokens.weight": (259, 64), "fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (3, 64),
        "d2t": (3,), "t2d": (259,),
        f"{layer}input_layernorm.weight": (64,), f"{layer}hidden_norm.weight": (64,),
        f"{layer}post_attention_layernorm.weight": (64,),
        f"{layer}self_attn.q_proj.weight": (64, 128), f"{layer}self_attn.k_proj.weight": (32, 128),
        f"{layer}self_attn.v_proj.weight": (32, 128), f"{layer}self_attn.o_proj.weight": (64, 64),
        f"{layer}mlp.gate_proj.weight": (128, 64), f"{layer}mlp.up_proj.weight": (128, 64),
        f"{layer}mlp.down_proj.weight": (64, 128),
    }  # fmt: skip
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["d2t"].tolist() == [5, 8, 98] and saved["d2t"].dtype == torch.int64
    assert saved["t2d"].nonzero().flatten().tolist() == [5, 9, 100] and saved["t2d"].dtype == torch.bool
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["draft_vocab_size"] == 3
    assert is_eagle_folder(tmp_path) and not is_eagle_folder(tmp_path / "none")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_saved_head_is_the_same_head(target: Target, kind: str, tmp_path: Path) -> None:
    """The channel scales fold into fc: outputs and logits stay equal."""
    head = build_eagle(target=target, kind=kind, draft_vocab_size=100 if kind == "eagle3" else None).eval()
    if kind == "eagle3":
        head.set_tap_scale(torch.rand(20, 3, 64) * 9, keep_function=False)
    head.save_pretrained(tmp_path)
    again = load_eagle(tmp_path, target)
    ids = torch.randint(0, 250, (2, 9))
    states = target.states(ids)
    features = states.taps if kind == "eagle3" else states.final_hidden
    positions = torch.arange(9).expand(2, -1)
    outputs = [h(ids, h.project(features), positions) for h in (head, again)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(outputs[0]), again.logits(outputs[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.embed_tokens.weight, target.embedding)


def test_keep_function_keeps_it(target: Target) -> None:
    head = build_eagle(target=target, draft_vocab_size=10)
    taps = torch.randn(7, 3, 64) * torch.rand(64) * 30
    before = head.project(taps)
    head.set_tap_scale(taps, keep_function=True)
    torch.testing.assert_close(head.project(taps), before, rtol=1e-4, atol=1e-4)
    assert not torch.equal(head.tap_scale, torch.ones_like(head.tap_scale))


def test_a_strict_load_names_what_is_wrong(target: Target, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    head = build_eagle(target=target, draft_vocab_size=10)
    head.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if k != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="d2t is missing or unknown"):
        load_eagle(tmp_path, target)
    save_file({**state, "fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"fc\.weight"):
        load_eagle(tmp_path, target)
    save_file({**state, "d2t": torch.tensor([0] * 9 + [-1])}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"d2t gives 1 target ids twice"):
        load_eagle(tmp_path, target)
    save_file(state, tmp_path / "model.safetensors")
    other = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[1, 4, 5])
    with pytest.raises(UserError, match=r"reads the taps \[2, 4, 5\] and the target was loaded with \[1, 4, 5\]"):
        load_eagle(tmp_path, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 5000}, "draft.draft_vocab_size=5000: the target has 259 ids"),
        ({"kind": "eagle1", "draft_vocab_size": 10}, "EAGLE-1 drafts by the target's own head"),
        ({"kind": "eagle4"}, "draft.kind=eagle4: unknown"),
        ({"draft_vocab_size": 10, "num_key_value_heads": 3}, "draft.num_key_value_heads=3: must divide"),
        ({"draft_vocab_size": 10, "init": "nowhere"}, "draft.init=nowhere: no EAGLE head there"),
    ],
)
def test_mistakes_name_the_key(target: Target, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_eagle(target=target, **options)


def test_rotations_by_kind_of_layer_give_those_of_full_attention(target: Target, monkeypatch, tmp_path: Path) -> None:
    rope = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e6))
    }
    monkeypatch.setattr(target.model.config, "rope_parameters", rope)
    head = build_eagle(target=target, draft_vocab_size=10)
    head.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e6
    assert head.config.rope_parameters == rope["full_attention"]


def test_a_target_that_rotates_a_share_of_its_channels_does_not_tell_the_head_to(target: Target, monkeypatch) -> None:
    """vLLM would rotate that share of the head, which was trained with all of them."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    monkeypatch.setattr(target.model.config, "rope_parameters", rope)
    assert "partial_rotary_factor" not in build_eagle(target=target, draft_vocab_size=10).config.rope_parameters


def test_rotations_for_a_share_of_the_channels_only_are_left_out(target: Target, monkeypatch) -> None:
    """The factors of longrope fit the share that the target rotates, not the head's channels."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0],
        "long_factor": [2.0],
    }
    monkeypatch.setattr(target.model.config, "rope_parameters", rope)
    head = build_eagle(target=target, draft_vocab_size=10)
    assert head.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_a_target_whose_head_a_kind_cannot_learn_with_is_refused(target: Target, monkeypatch) -> None:
    """Before anything is cached, so in the building."""
    monkeypatch.setattr(target.model.config, "logits_scaling", 8.0, raising=False)
    with pytest.raises(UserError, match=r"draft\.kind=eagle1: .* a scale or a cap"):
        build_eagle(target=target, kind="eagle1", draft_vocab_size=None)
    biased = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")
    biased.model.get_output_embeddings().bias = nn.Parameter(torch.zeros(biased.vocab_size))
    with pytest.raises(UserError, match=r"draft\.kind=eagle1: .* has a bias"):
        build_eagle(target=biased, kind="eagle1", draft_vocab_size=None)
    with pytest.raises(UserError, match=r"draft\.train_lm_head=false: .* has a bias"):
        build_eagle(target=biased, draft_vocab_size=10, train_lm_head=False)


def test_the_first_rows_of_a_head_have_the_targets_factor_in_them(target: Target, monkeypatch) -> None:
    ids = torch.tensor([3, 50, 200])
    state = torch.randn(5, 64)
    for key, value in (("logits_scaling", 8.0), ("logit_scale", 0.0625)):
        with monkeypatch.context() as patched:
            patched.setattr(target.model.config, key, value, raising=False)
            head = build_eagle(target=target, draft_vocab_size=3, draft_vocab=ids)
            torch.testing.assert_close(state @ head.lm_head.weight.T, target.logits(state)[:, ids])


def test_an_exported_head_is_told_from_one_of_ours(target: Target, tmp_path: Path) -> None:
    build_eagle(target=target, draft_vocab_size=10).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]  # as engines read it, where the taps are their own
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"names no taps.*train\.import_head"):
        load_eagle(tmp_path, target)


def test_a_head_of_other_positions_is_trained_further_and_one_of_other_norms_refused(
    target: Target, tmp_path: Path
) -> None:
    before = build_eagle(target=target, draft_vocab_size=10, seed=3)
    before.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    head = build_eagle(target=target, draft_vocab_size=10, init=str(tmp_path))
    assert torch.equal(head.block.mlp.up_proj.weight, before.block.mlp.up_proj.weight)
    assert head.config.max_position_embeddings == before.config.max_position_embeddings
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match=r"draft\.init=.*rms_norm_eps is 0\.001.*no key sets it"):
        build_eagle(target=target, draft_vocab_size=10, init=str(tmp_path))


def test_taps_are_needed() -> None:
    plain = load_target("random:tiny_llama", dtype="fp32", device="cpu")
    with pytest.raises(UserError, match=r"target\.tap_ids=null"):
        build_eagle(target=plain, draft_vocab_size=10)


def test_markers_land_in_the_taps_that_the_config_names() -> None:
    """Block i adds i + 1 to channel i: the tap with id t is the stream *entering* block t."""
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[1, 4, 7])
    blocks = target.model.base_model.layers

    class Marker(nn.Module):
        def __init__(self, block: nn.Module, index: int):
            super().__init__()
            self.block, self.index = block, index

        def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            marked = torch.zeros_like(hidden_states)
            marked[..., self.index] = self.index + 1
            return hidden_states + marked

    target.model.base_model.embed_tokens.weight.data.zero_()
    for i, block in enumerate(blocks):
        blocks[i] = Marker(block, i)
    target._blocks = blocks
    taps = target.states(torch.zeros(1, 2, dtype=torch.int64)).taps[0, 0]  # (L, D)
    for tap, tap_id in zip(taps, (1, 4, 7)):
        assert tap[:8].tolist() == [i + 1 if i < tap_id else 0 for i in range(8)]
    head = build_eagle(target=target, draft_vocab_size=10)
    assert head.config.to_json()["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]


def test_the_draft_vocabulary_is_the_most_frequent_supervised_ids() -> None:
    rows = Rows(
        np.array([7, 7, 7, 7, 3, 3, 3, 9, 9, 5], dtype=np.int32),
        np.array([False, False, False, True, True, True, True, True, True, False]),
        np.array([0, 10]),
        np.array([0]),
    )
    assert frequent_ids(rows, 2, 20).tolist() == [3, 9]
    assert frequent_ids(rows, 4, 20).tolist() == [3, 5, 7, 9]  # then what is frequent without supervision
    assert frequent_ids(rows, 6, 20).tolist() == [0, 1, 3, 5, 7, 9]  # ties by smaller id
    assert coverage(rows, frequent_ids(rows, 2, 20)) == pytest.approx(5 / 6)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("optimiser", [{}, {"muon_lr": 0.01}])
def test_training_goes_down_and_online_equals_cached(
    target: Target, gpt2_target: Target, kind: str, optimiser: dict
) -> None:
    for each in (target, gpt2_target):
        head = build_eagle(target=each, kind=kind, draft_vocab_size=100 if kind == "eagle3" else None)
        module = distiller(each, head)
        optimizer = make_optimizer(head, OptimSpec(lr=3e-3, **optimiser))
        batch = PackedRows(chat_rows())[Item(np.arange(12))]
        spec = module.specs["train"]
        cached = module.with_columns(batch, spec)
        assert "final_hidden" not in batch and ("taps" in cached) == (kind == "eagle3")
        with torch.no_grad():
            online, again = (module.distill(b, spec).loss_sum for b in (batch, cached))
        torch.testing.assert_close(online, again)
        frozen = {name: p.clone() for name, p in head.named_parameters() if not p.requires_grad}
        losses = []
        for _ in range(25):
            optimizer.zero_grad()
            loss = module.distill(cached, spec).loss_sum
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0], (kind, losses[0], losses[-1])
        for name, before in frozen.items():
            assert torch.equal(before, head.get_parameter(name)), name
        assert "embed_tokens.weight" in frozen


def test_a_frozen_lm_head_stays(target: Target) -> None:
    head = build_eagle(target=target, draft_vocab_size=50, train_lm_head=False)
    module = distiller(target, head)
    module.distill(PackedRows(chat_rows())[Item(np.arange(4))], module.specs["train"]).loss_sum.backward()
    assert head.lm_head.weight.grad is None and head.fc.weight.grad.abs().sum() > 0
    assert torch.equal(head.lm_head.weight, target.model.get_output_embeddings().weight[:50])


def test_the_loss_is_a_mean_over_the_window_however_it_is_split(target: Target) -> None:
    """Two micro-batches with the window's counts give the gradients of one batch of all rows."""
    rows = chat_rows()
    data = PackedDataModule(rows, batch_tokens=120, accumulate=2, simulated_steps=3)
    grads = []
    items = list(data.train_dataloader())[:2]
    assert torch.equal(items[0]["window_counts"], items[1]["window_counts"])
    ids = torch.cat([b["row_ids"] for b in items]).numpy()
    whole = PackedRows(rows)[Item(ids)]
    counts = PackedRows(rows).slot_counts(3)[ids].sum(0)
    assert counts.tolist() == items[0]["window_counts"].tolist()
    for batches in (items, [whole]):
        head = build_eagle(target=target, draft_vocab_size=100)
        module = distiller(target, head, steps=3)
        for batch in batches:
            module.distill(batch, module.specs["train"]).loss_sum.backward()
        grads.append([p.grad for p in head.parameters() if p.grad is not None])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item() + 1e-7)


def test_a_batch_that_does_not_count_gives_zero(target: Target) -> None:
    head = build_eagle(target=target, draft_vocab_size=100)
    module = distiller(target, head)
    loss = module.distill(PackedRows(chat_rows())[Item(np.arange(3), counts=False)], module.specs["train"]).loss_sum
    loss.backward()
    assert loss.item() == 0 and all(p.grad.abs().sum() == 0 for p in head.parameters() if p.grad is not None)


def test_packed_outputs_equal_each_row_alone(target: Target) -> None:
    head = build_eagle(target=target, kind="eagle1", draft_vocab_size=None)
    batch = PackedRows(chat_rows())[Item(np.arange(6))]
    features = torch.randn(len(batch["input_ids"]), 64)
    out = packed_outputs(head, batch["input_ids"], features, batch["position_ids"], batch["row_offsets"])
    for a, b in zip(batch["row_offsets"][:-1].tolist(), batch["row_offsets"][1:].tolist()):
        alone = head(batch["input_ids"][None, a:b], features[None, a:b], torch.arange(b - a)[None])[0]
        torch.testing.assert_close(out[a:b], alone, rtol=1e-4, atol=1e-5)


def test_the_loss_of_eagle_1_is_the_stated_formula(target: Target, monkeypatch) -> None:
    """SmoothL1 to the next final state + 0.1 KL through the target's head, where x[p+1] and x[p+2] count; in training
    the states that are read have noise of at most 0.1 * 512 / (tokens of the row)."""
    module = distiller(target, build_eagle(target=target, kind="eagle1", draft_vocab_size=None))
    rows = chat_rows(3)
    batch = module.with_columns(PackedRows(rows)[Item(np.arange(3))], module.specs["train"])
    total, count = 0.0, 0
    for i in range(3):
        ids, mask = (torch.from_numpy(np.array(x)) for x in rows.row(i))
        states = target.states(ids[None].long()).final_hidden[0]
        out = module.draft(ids[None, 1:].long(), states[None, :-1], torch.arange(len(ids) - 1)[None])[0].detach()
        for p in range(len(ids) - 2):
            if mask[p + 1] and mask[p + 2]:
                log_p, log_q = (target.logits(x).log_softmax(-1) for x in (states[p + 1], out[p]))
                smooth = nn.functional.smooth_l1_loss(out[p], states[p + 1])
                total += float(smooth + 0.1 * (log_p.exp() * (log_p - log_q)).sum())
                count += 1
    with torch.no_grad():
        found = module.distill(batch, module.specs["train"])
    assert found.num_tokens == count and float(found.loss_sum) == pytest.approx(total, rel=1e-3)

    read = []
    outputs = train.eagle_module.packed_outputs
    monkeypatch.setattr(train.eagle_module, "packed_outputs", lambda *args: read.append(args[2]) or outputs(*args))
    module.distill(batch, module.specs["train"])
    lengths = batch["row_offsets"].diff()
    noise = (read[0] - batch["final_hidden"]).abs() / (0.1 * 512 / lengths.repeat_interleave(lengths))[:, None]
    assert 0.9 < noise.max() <= 1.001


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_expected_alpha_counts_what_the_loop_drafts(target: Target, kind: str) -> None:
    """By hand, slot by slot: x[p+1] and x[p+2] supervised, full target distribution at p+1."""
    rows = chat_rows(5)
    head = build_eagle(target=target, kind=kind, draft_vocab_size=100 if kind == "eagle3" else None).eval()
    metrics = evaluate_alpha(target, head, rows, temperatures=[0.0, 1.0], max_tokens=None, position_buckets=[])
    total, alphas = 0, {0.0: 0.0, 1.0: 0.0}
    for i in range(5):
        ids, mask = (torch.from_numpy(np.array(x)) for x in rows.row(i))
        states = target.states(ids[None].long())
        features = head.project(states.taps if kind == "eagle3" else states.final_hidden)
        out = head(ids[None, 1:].long(), features[:, :-1], torch.arange(len(ids) - 1)[None])[0]
        for p in range(len(ids) - 2):
            if mask[p + 1] and mask[p + 2]:
                full = target.logits(states.final_hidden[0, p + 1])[None]
                logits = torch.full_like(full, -torch.inf)
                logits[0, head.draft_vocab if kind == "eagle3" else slice(None)] = head.logits(out[p])
                total += 1
                for t in alphas:
                    alphas[t] += token_alpha(full, logits, temperature=t).item()
    assert metrics["alpha_tokens/held_out"].value == total
    for t, value in alphas.items():
        assert metrics[f"alpha_expected/held_out/T{t:g}"].value == pytest.approx(value / total, abs=1e-4)


@pytest.mark.parametrize("source", ["random:tiny_llama", "random:tiny_gpt2"])
def test_over_fitted_to_an_answer_every_draft_is_accepted(source: str) -> None:
    """Trained on the target's own greedy answer until it hits every token at every step, the loop rejects nothing: any
    difference between training and decoding would show."""
    target = load_target(source, dtype="fp32", device="cpu", tap_ids=[0, 1, 3])
    prompt = list(b"Tell me about whales.")
    plain = speculative_decode(target, None, prompt, temperature=0, max_new_tokens=40, eos_token_ids=())
    ids = np.array(prompt + plain.token_ids, dtype=np.int32)
    rows = Rows(ids, np.arange(len(ids)) >= len(prompt), np.array([0, len(ids)]), np.array([0]))
    head = build_eagle(target=target, draft_vocab_size=None)
    module = distiller(target, head, steps=4)
    batch = module.with_columns(PackedRows(rows)[Item(np.arange(1))], module.specs["train"])
    head.set_tap_scale(batch["taps"], keep_function=False)
    optimizer = make_optimizer(head, OptimSpec(lr=5e-3, weight_decay=0.0))
    for i in range(500):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - i / 500)
        optimizer.zero_grad()
        out = module.distill(batch, module.specs["train"])
        out.loss_sum.backward()
        optimizer.step()
    with torch.no_grad():
        sums = module.distill(batch, module.specs["train"]).sums
    assert torch.equal(sums.hits.long(), sums.counts), (sums.hits, sums.counts)
    for method, depth in (("chain_k4", 4), ("static_2x1x1x1", 4), ("dynamic_d4_k2_n14", 4)):
        result = speculative_decode(
            target, head.eval(), prompt, method=method, temperature=0, max_new_tokens=36, eos_token_ids=()
        )
        assert result.token_ids == plain.token_ids[:36]
        assert [r.accepted_uncut for r in result.rounds] == [depth] * len(result.rounds), (method, result.rounds)
        assert result.tau == 5.0
