"""The target's signal: exact against the live model, whatever rows come along."""

import numpy as np
import pytest
import torch
from cache_helpers import FakeTarget, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import data.signals as signals
from data.signals import SignalSpec, length_groups, target_columns
from models.errors import UserError
from models.target import load_target

LENGTHS = [3, 17, 200, 1, 64, 64, 90, 2]


def packed(rows):
    return torch.from_numpy(rows.input_ids), torch.from_numpy(rows.row_offsets)


def live_logits(target, rows):  # (N, V) fp32: row by row, without padding
    with torch.no_grad():
        pieces = [
            target.model(input_ids=torch.from_numpy(rows.row(i)[0]).long()[None]).logits[0] for i in range(len(rows))
        ]
    return torch.cat(pieces)[:, : target.vocab_size].float()


@pytest.mark.parametrize("name", ["tiny_target", "tiny_gpt2_target"])
def test_topk_is_the_full_softmax_of_the_live_model(name, request):
    target = request.getfixturevalue(name)
    rows = make_rows(LENGTHS)
    columns = target_columns(target, *packed(rows), SignalSpec(top_k=16))
    logprobs = live_logits(target, rows).log_softmax(-1)  # (N, V)
    stored = columns["topk_logprobs"].float()
    assert columns["topk_ids"].dtype == torch.int32 and columns["topk_logprobs"].dtype == torch.float16
    assert (stored - logprobs.gather(1, columns["topk_ids"].long())).abs().max() < 4e-3  # fp16 near 8
    assert (stored - logprobs.topk(16).values).abs().max() < 4e-3
    head = torch.zeros_like(logprobs, dtype=torch.bool).scatter_(1, columns["topk_ids"].long(), True)
    tail = logprobs.masked_fill(head, -torch.inf).logsumexp(-1)
    assert (columns["tail_logprob"] - tail).abs().max() < 1e-4


def test_hidden_gives_the_exact_distribution(tiny_target):
    rows = make_rows(LENGTHS)
    columns = target_columns(tiny_target, *packed(rows), SignalSpec("hidden"))
    logits = tiny_target.logits(columns["final_hidden"])  # (N, V)
    theirs = live_logits(tiny_target, rows).double().log_softmax(-1)
    assert (logits - columns["logsumexp"][:, None] - theirs).abs().max() < 1e-4
    kl = (theirs.exp() * (theirs - logits.double().log_softmax(-1))).sum(-1)
    assert kl.abs().max() < 1e-6  # at every position: nothing is shifted


def test_a_row_does_not_depend_on_its_neighbours():
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")
    rows = make_rows(LENGTHS)
    for spec in (SignalSpec(top_k=8, tap_ids=target.tap_ids), SignalSpec("hidden", tap_ids=target.tap_ids)):
        together = target_columns(target, *packed(rows), spec)
        for i in range(len(rows)):
            ids = torch.from_numpy(rows.row(i)[0])
            alone = target_columns(target, ids, torch.tensor([0, len(ids)]), spec)
            part = slice(rows.row_offsets[i], rows.row_offsets[i + 1])
            for name, value in alone.items():
                if name in ("topk_logprobs", "taps"):
                    assert torch.allclose(value.float(), together[name][part].float(), atol=1e-2, rtol=1e-2)
                elif value.is_floating_point():
                    assert (value - together[name][part]).abs().max() < 1e-4, name


def test_taps_are_the_streams_entering_the_blocks():
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[0, 3, 7])
    rows = make_rows([20])
    columns = target_columns(target, *packed(rows), SignalSpec("topk", 4, (0, 3, 7)))
    with torch.no_grad():
        states = target.model(input_ids=torch.from_numpy(rows.input_ids).long()[None], output_hidden_states=True)
    for i, tap in enumerate((0, 3, 7)):
        assert torch.equal(columns["taps"][:, i], states.hidden_states[tap][0].bfloat16())


def test_no_padding_is_kept(tiny_target):
    rows = make_rows([3, 17, 512])
    columns = target_columns(tiny_target, *packed(rows), SignalSpec())
    assert {len(value) for value in columns.values()} == {532}


@pytest.mark.parametrize("vocab_size", [64 * 40, 5000, 50257, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_stage_top_k_is_exact(vocab_size, dtype):
    logits = (torch.randn(6, vocab_size) * 3).to(dtype)  # bf16 ties a lot: any of the tied ids will do
    values, ids = signals._top_k(logits, 17)
    assert torch.equal(values, logits.topk(17).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row.tolist())) == 17 for row in ids)
    logits[:, -3:] = 100.0  # ids behind the last whole block
    assert set(signals._top_k(logits, 3)[1][0].tolist()) == set(range(vocab_size - 3, vocab_size))


def test_ids_beyond_16_bits_survive():
    favourites = (151643, 65536, 50256)
    target = FakeTarget(vocab_size=151936, favourites=favourites)
    columns = target_columns(target, torch.tensor([50256, 65536, 151643]), torch.tensor([0, 3]), SignalSpec(top_k=3))
    assert columns["topk_ids"].tolist() == [list(favourites)] * 3


def test_a_tail_without_mass_is_finite():
    target = FakeTarget(vocab_size=4, favourites=(2,))
    columns = target_columns(target, torch.tensor([1, 2]), torch.tensor([0, 2]), SignalSpec(top_k=4))
    assert columns["tail_logprob"].tolist() == [signals.TAIL_FLOOR] * 2


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), st.sampled_from([None, 64, 1024]))
@settings(max_examples=60, deadline=None)
def test_groups_hold_every_row_once_with_little_padding(lengths, max_tokens):
    lengths = np.array(lengths)
    groups = length_groups(lengths, max_tokens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for rows in groups:
        assert lengths[rows].min() >= 0.75 * lengths[rows].max()
        assert max_tokens is None or len(rows) == 1 or len(rows) * lengths[rows].max() <= max_tokens


def test_bad_specs_are_refused_by_key(tiny_target):
    with pytest.raises(UserError, match=r"cache\.signal=logits"):
        SignalSpec("logits")
    with pytest.raises(UserError, match=r"cache\.top_k=0"):
        SignalSpec(top_k=0)
    with pytest.raises(UserError, match=r"cache\.top_k=300.*259"):
        SignalSpec(top_k=300).check(tiny_target)
    with pytest.raises(UserError, match=r"target\.tap_ids"):
        SignalSpec(tap_ids=(1, 2)).check(tiny_target)


@pytest.mark.slow
def test_real_target(smollm2):
    rows = make_rows([40, 7], vocab_size=49152)
    columns = target_columns(smollm2, *packed(rows), SignalSpec())
    logprobs = live_logits(smollm2, rows).log_softmax(-1)
    assert (columns["topk_logprobs"].float() - logprobs.topk(64).values).abs().max() < 2e-2  # fp16 near 20
    mass = columns["topk_logprobs"].float().exp().sum(1) + columns["tail_logprob"].exp()
    assert (mass - 1).abs().max() < 5e-3
