"""Expected acceptance: identities, hand-computed values, padding, position buckets, any pair of models."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from data.rows import Rows
from eval.alpha import evaluate_alpha, evaluate_pair, expected_alpha, token_alpha, token_kl_and_entropy
from eval.run import Pair, check_vocabulary
from models.drafts import load_draft
from models.eagle import build_eagle
from models.errors import UserError
from models.medusa import build_medusa
from models.target import Target, load_target
from models.tiny import byte_tokenizer, random_model


def make_rows(lengths: list[int], *, vocab: int = 259, seed: int = 0, all_counted: bool = True) -> Rows:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    mask = np.ones(total, dtype=bool) if all_counted else rng.random(total) < 0.5
    return Rows(
        input_ids=rng.integers(0, vocab, total).astype(np.int32),
        loss_mask=mask,
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        row_ids=np.arange(len(lengths), dtype=np.int64),
    )


def tiny_draft(vocab: int = 259, seed: int = 1, positions: int = 256) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=2, n_positions=positions, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


# The definition

LOGITS = torch.tensor([[2.0, 0.0, -1.0, 0.5]])
COUNTS = torch.tensor([True])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_identical_is_one_and_disjoint_is_zero(temperature):
    assert expected_alpha(LOGITS, LOGITS, COUNTS, temperature=temperature).item() == pytest.approx(1.0, abs=1e-6)
    apart = torch.tensor([[-1e4, 0.0, -1e4, -1e4]])
    assert expected_alpha(LOGITS - 1e4 * (apart == 0), apart, COUNTS, temperature=temperature).item() == 0.0


def test_hand_computed():
    target, draft = torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.full((1, 3), 1 / 3).log()
    assert expected_alpha(target, draft, COUNTS).item() == pytest.approx(1 / 3 + 0.2 + 0.1)
    # T = 0.5 squares the probabilities: (.49, .04, .01) / .54 against 1/3 each.
    assert expected_alpha(target, draft, COUNTS, temperature=0.5).item() == pytest.approx(1 / 3 + 0.05 / 0.54)
    kl, entropy = token_kl_and_entropy(target, draft)
    assert kl.item() == pytest.approx(0.29679, abs=1e-5)
    assert entropy.item() == pytest.approx(-(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1)))


def test_temperature_zero_is_argmax_agreement():
    target = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 3.0], [0.0, 2.0, 1.0], [1.0, 0.0, 0.0]])
    draft = torch.tensor([[9.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 1.1, 1.0], [0.0, 0.0, 5.0]])
    assert expected_alpha(target, draft, torch.ones(4, dtype=torch.bool), temperature=0).item() == 0.5
    assert expected_alpha(target, draft, torch.tensor([True, False, True, False]), temperature=0).item() == 1.0


def test_masked_positions_do_not_move_it_by_a_bit():
    target, draft = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    mask = torch.tensor([[True, True, False, False, True], [False, True, True, False, False]])
    before = expected_alpha(target, draft, mask)
    target[~mask], draft[~mask] = torch.randn(5, 11) * 100, float("inf")
    assert torch.equal(before, expected_alpha(target, draft, mask))


def test_bf16_logits_are_compared_in_fp32():
    target, draft = torch.randn(8, 5000).bfloat16() * 3, torch.randn(8, 5000).bfloat16() * 3
    exact = torch.minimum(torch.softmax(target.double(), -1), torch.softmax(draft.double(), -1)).sum(-1)
    assert token_alpha(target, draft).sub(exact).abs().max() < 1e-6


def test_padding_of_a_head_carries_no_mass_and_missing_ids_are_rejected():
    target, draft = torch.randn(4, 50), torch.randn(4, 50)
    padded = torch.cat([draft, torch.full((4, 14), 20.0)], -1)  # (4, 64)
    assert torch.equal(token_alpha(target, padded), token_alpha(target, draft))
    narrow = token_alpha(target, draft[:, :10])
    probs = torch.softmax(target, -1)
    assert torch.allclose(narrow, torch.minimum(probs[:, :10], torch.softmax(draft[:, :10], -1)).sum(-1))
    assert (narrow <= probs[:, :10].sum(-1) + 1e-6).all()


# On models


def brute_force(target: Target, draft, rows: Rows, temperature: float, positions: slice = slice(None)) -> float:
    """One row at a time, the models' own logits, float64."""
    values = []
    for i in range(len(rows)):
        ids, mask = rows.row(i)
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            p = target.model(input_ids).logits[0, :-1].double()
            q = draft(input_ids).logits[0, :-1, : p.shape[-1]].double()
        if temperature == 0:
            alphas = (p.argmax(-1) == q.argmax(-1)).double()
        else:
            alphas = torch.minimum(torch.softmax(p / temperature, -1), torch.softmax(q / temperature, -1)).sum(-1)
        counted = torch.from_numpy(mask[1:].copy())
        values.append(alphas[positions][counted[positions]])
    return torch.cat(values).mean().item()


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_padded_batches_equal_single_rows(tiny_target, batch_tokens):
    rows, draft = make_rows([3, 17, 40, 2, 29], all_counted=False), tiny_draft()
    metrics = evaluate_alpha(
        tiny_target, draft, rows, position_buckets=[8, 16], batch_tokens=batch_tokens, temperatures=[0, 0.7, 1, 1.5]
    )
    for name, temperature in {"T0": 0, "T0.7": 0.7, "T1": 1, "T1.5": 1.5}.items():
        expected = brute_force(tiny_target, draft, rows, temperature)
        assert metrics[f"alpha_expected/held_out/{name}"].value == pytest.approx(expected, abs=1e-5)
    for bucket, positions in {"0_8": slice(0, 8), "8_16": slice(8, 16), "16_up": slice(16, None)}.items():
        expected = brute_force(tiny_target, draft, rows, 1.0, positions)
        assert metrics[f"alpha_expected/held_out/T1/pos_{bucket}"].value == pytest.approx(expected, abs=1e-5)
    tokens = sum(int(rows.row(i)[1][1:].sum()) for i in range(len(rows)))
    assert metrics["alpha_tokens/held_out"].value == tokens
    low, high = metrics["alpha_expected/held_out/T1"].ci95
    assert low <= metrics["alpha_expected/held_out/T1"].value <= high
    assert metrics["top1_agreement/held_out"].value == metrics["alpha_expected/held_out/T0"].value


def test_draft_equal_to_target_is_accepted_always(tiny_target):
    metrics = evaluate_alpha(tiny_target, random_model("tiny_llama"), make_rows([20, 9]))
    for key, metric in metrics.items():
        if key.startswith("alpha_expected"):
            assert metric.value == pytest.approx(1.0, abs=1e-5), key
    assert metrics["kl/held_out"].value == pytest.approx(0.0, abs=1e-5)


def test_two_off_the_shelf_models_whose_widths_differ_by_padding(tiny_gpt2_target):
    rows, wide = make_rows([12, 30]), tiny_draft(vocab=264)
    narrow = tiny_draft(vocab=259)
    narrow.transformer.load_state_dict(
        {k: v[:259] if k == "wte.weight" else v for k, v in wide.transformer.state_dict().items()}
    )
    ours, theirs = (evaluate_alpha(tiny_gpt2_target, draft, rows) for draft in (wide, narrow))
    assert ours["alpha_expected/held_out/T1"].value == pytest.approx(
        theirs["alpha_expected/held_out/T1"].value, abs=1e-6
    )


def test_rows_longer_than_the_drafts_positions_are_cut_and_said(tiny_target, capsys):
    rows = make_rows([50, 10])
    metrics = evaluate_alpha(tiny_target, tiny_draft(positions=32), rows)
    assert "1 of 2 rows cut to 32 tokens" in capsys.readouterr().out
    assert metrics["alpha_tokens/held_out"].value == 31 + 9


def test_max_tokens_takes_a_seeded_subset(tiny_target):
    rows, draft = make_rows([20] * 10), tiny_draft()
    first, second = (evaluate_alpha(tiny_target, draft, rows, max_tokens=40, seed=s) for s in (0, 0))
    assert first == second and first["alpha_tokens/held_out"].value == 19 * 3


def test_nothing_supervised_is_the_users_mistake(tiny_target):
    rows = make_rows([5])
    empty = Rows(rows.input_ids, np.zeros(5, dtype=bool), rows.row_offsets, rows.row_ids)
    with pytest.raises(UserError, match=r"data\.sources.*supervised"):
        evaluate_alpha(tiny_target, tiny_draft(), empty)


def test_rows_too_short_for_a_head_count_nothing(tiny_target):
    """A last window of two tokens is a batch of its own: judged after training, it must not stop the run."""
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")
    head = build_eagle(target=target, draft_vocab_size=None)
    long, short = make_rows([20, 20]), make_rows([2])
    both = make_rows([20, 20, 2])
    found = evaluate_alpha(target, head, both, batch_tokens=40)
    assert (
        found["alpha_tokens/held_out"].value == evaluate_alpha(target, head, long)["alpha_tokens/held_out"].value == 36
    )
    for draft in (head, build_medusa(target=target, num_heads=1, draft_vocab_size=None)):
        with pytest.raises(UserError, match=r"data\.sources: no held-out row has two supervised tokens"):
            evaluate_alpha(target, draft, short)


def test_another_vocabulary_is_refused(tiny_target, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "same")
    check_vocabulary(tiny_target, tiny_draft(), tmp_path / "same")
    state = (tmp_path / "same" / "tokenizer.json").read_text()
    swapped = state.replace('"a":', '"@@":', 1).replace('"b":', '"a":', 1).replace('"@@":', '"b":', 1)
    (tmp_path / "same" / "tokenizer.json").write_text(swapped)
    with pytest.raises(UserError, match="2 ids are other tokens"):
        check_vocabulary(tiny_target, tiny_draft(), tmp_path / "same")
    with pytest.raises(UserError, match="no tokenizer"):
        check_vocabulary(tiny_target, tiny_draft(vocab=100), tmp_path)
    check_vocabulary(tiny_target, tiny_draft(vocab=300), tmp_path)  # no tokenizer, but wide enough
    (tmp_path / "same" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        check_vocabulary(tiny_target, tiny_draft(), tmp_path / "same")
    tiny_draft(vocab=300).save_pretrained(tmp_path / "bare")  # transformers makes an empty tokenizer for such a folder
    check_vocabulary(tiny_target, tiny_draft(vocab=300), tmp_path / "bare")
    with pytest.raises(UserError, match="no tokenizer there"):
        load_target(str(tmp_path / "bare"), dtype="fp32", device="cpu")
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"draft\.id=.*not a model folder"):
        load_draft(tmp_path / "bare")


def test_former_buckets_go_when_a_temperature_is_measured_anew(tiny_target, tmp_path):
    pair, rows = Pair(tiny_target, tiny_draft(), "pair", "tiny", None, None), make_rows([20, 9])
    for temperatures, buckets in (([0.0, 1.0], [8]), ([1.0], [4])):
        alpha = {"temperatures": temperatures, "max_tokens": None, "position_buckets": buckets}
        evaluate_pair(pair, alpha, rows=rows, seed=0, output_root=tmp_path)
    keys = json.loads((tmp_path / "pair" / "results.json").read_text())["metrics"].keys()
    found = {key.removeprefix("alpha_expected/held_out/") for key in keys if key.startswith("alpha_expected/")}
    assert found == {"T0", "T0/pos_0_8", "T0/pos_8_up", "T1", "T1/pos_0_4", "T1/pos_4_up"}
