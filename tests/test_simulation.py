"""Test-time simulation: the training graph is the decode loop, slots that count, packed = unpacked, exact gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.eagle import EagleHead, build_eagle
from models.kv_cache import RollbackCache
from models.simulation import Simulation, simulation_layout, steps_of_slots, trained_weights
from models.target import Target, load_target
from train.losses import LOSSES, LossSpec
from train.simulated_loss import simulated_loss

STEPS = 7
LENGTHS = [9, 14, 3, 30, 2, 21]


@pytest.fixture(scope="module", params=["random:tiny_llama", "random:tiny_gpt2"])
def target(request) -> Target:
    return load_target(request.param, dtype="fp32", device="cpu", tap_ids=[0, 1, 3])


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    head = build_eagle(target=target, draft_vocab_size=100, draft_vocab=torch.arange(100) * 2 + 5)
    head.set_tap_scale(torch.rand(50, 3, target.hidden_size) * 3, keep_function=False)
    return head


def without_cache(head: EagleHead, ids: Tensor, taps: Tensor, slot: int, steps: int) -> list[Tensor]:  # each (D,)
    """The same with all of the sequence read anew at each step: no writes in place, so autograd goes through."""
    hidden, outputs = head.project(taps[None, : slot + 1]), []
    for step in range(steps):
        end = slot + 1 + step
        out = head(ids[None, 1 : end + 1], hidden, torch.arange(end)[None])  # (1, end, D)
        outputs.append(out[0, -1])
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return outputs


class Rows:
    """Packed rows with the target's taps, and a mask of supervised tokens."""

    def __init__(self, target: Target, lengths: list[int] = LENGTHS, seed: int = 0, chance: float = 0.9):
        generator = torch.Generator().manual_seed(seed)
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self.ids = torch.randint(0, 250, (int(self.offsets[-1]),), generator=generator)
        self.mask = torch.rand(len(self.ids), generator=generator) < chance
        states = [target.states(self.row(i)[None]) for i in range(len(lengths))]
        self.taps = torch.cat([s.taps[0] for s in states])  # (N, L, D)
        self.final_hidden = torch.cat([s.final_hidden[0] for s in states])  # (N, D)

    def row(self, i: int) -> Tensor:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    def place(self, slot: int) -> tuple[int, int]:
        """Row of a packed slot, and its position there."""
        i = int((self.offsets <= slot).sum()) - 1
        return i, slot - int(self.offsets[i])


def decode_loop(head: EagleHead, ids: Tensor, taps: Tensor, slot: int, steps: int) -> list[Tensor]:  # each (D,)
    """What the drafter computes at a slot, fed the true tokens: prefill up to it, then one token after another."""
    cache = RollbackCache(1, 64, static=False)
    positions = torch.arange(slot + 1)[None]
    out = head(ids[None, 1 : slot + 2], head.project(taps[None, : slot + 1]), positions, cache)  # (1, slot + 1, D)
    outputs, fed_back = [out[0, -1]], out[:, -1:]
    for step in range(1, steps):
        sees_all = torch.ones(1, 1, 1, slot + 1 + step, dtype=torch.bool)
        token = ids[None, slot + 1 + step : slot + 2 + step]
        fed_back = head(token, fed_back, torch.tensor([[slot + step]]), cache, sees_all)
        outputs.append(fed_back[0, -1])
    return outputs


def test_the_training_graph_is_the_decode_loop(target: Target, head: EagleHead) -> None:
    """Steps 0 .. 6 at every slot that counts, packed rows: mask, positions, shifts and fed-back features at once."""
    rows = Rows(target)
    layout = simulation_layout(rows.mask, rows.offsets, STEPS)
    with torch.no_grad():
        outputs = Simulation(head, layout, dtype=torch.float32).forward(rows.ids, rows.taps, keep=False)
        compared = torch.zeros(STEPS, dtype=torch.int64)
        for n, slot in enumerate(layout.slots.tolist()):
            i, at = rows.place(slot)
            num_steps = int(layout.num_steps[n])
            taps = rows.taps[rows.offsets[i] : rows.offsets[i + 1]]
            for step, expected in enumerate(decode_loop(head, rows.row(i), taps, at, num_steps)):
                torch.testing.assert_close(
                    head.lm_head(outputs[step, n]), head.logits(expected), rtol=1e-4, atol=1e-4,
                    msg=lambda m, slot=slot, step=step: f"slot {slot}, step {step}: {m}",
                )  # fmt: skip
                compared[step] += 1
    assert compared.tolist() == layout.counts().tolist() and compared.min() >= 5


def test_rotations_that_depend_on_length_are_those_of_the_row() -> None:
    """longrope takes other factors beyond its original positions: a pack is longer than its rows."""
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[0, 1, 3])
    width = target.hidden_size // target.config.num_attention_heads // 2
    target.config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40,
        "short_factor": [1.0] * width, "long_factor": [7.0] * width, "factor": 4.0,
    }  # fmt: skip
    head = build_eagle(target=target, draft_vocab_size=100)
    rows = Rows(target, [30, 30], chance=1.0)
    layout = simulation_layout(rows.mask, rows.offsets, 2)
    with torch.no_grad():
        outputs = Simulation(head, layout, dtype=torch.float32).forward(rows.ids, rows.taps, keep=False)
        expected = torch.stack(decode_loop(head, rows.row(0), rows.taps[:30], 10, 2))
    n = layout.slots.tolist().index(10)
    torch.testing.assert_close(outputs[:, n], head.norm(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", ["position", "token", "taps"])
def test_the_comparison_sees_small_errors(target: Target, head: EagleHead, error: str) -> None:
    """A slot that is off by one in one respect differs far more than the tolerance."""
    rows = Rows(target, [20], chance=1.0)
    layout = simulation_layout(rows.mask, rows.offsets, 2)
    ids, taps = rows.ids.clone(), rows.taps.clone()
    if error == "position":
        object.__setattr__(layout, "positions", layout.positions + 1)
    elif error == "token":
        ids = ids.roll(1)
    else:
        taps = taps.roll(1, dims=1)
    with torch.no_grad():
        outputs = Simulation(head, layout, dtype=torch.float32).forward(ids, taps, keep=False)
        expected = torch.stack(decode_loop(head, rows.ids, rows.taps, 10, 2))
    n = layout.slots.tolist().index(10)
    assert (outputs[:, n] - head.norm(expected)).abs().max() > 1e-2


def test_packed_equals_each_row_alone(target: Target, head: EagleHead) -> None:
    rows = Rows(target)
    layout = simulation_layout(rows.mask, rows.offsets, STEPS)
    with torch.no_grad():
        packed = Simulation(head, layout, dtype=torch.float32).forward(rows.ids, rows.taps, keep=False)
        for i in range(len(LENGTHS)):
            part = slice(int(rows.offsets[i]), int(rows.offsets[i + 1]))
            alone = simulation_layout(rows.mask[part], torch.tensor([0, part.stop - part.start]), STEPS)
            if len(alone.slots):
                own = (layout.slots >= part.start) & (layout.slots < part.stop)
                outputs = Simulation(head, alone, dtype=torch.float32).forward(
                    rows.ids[part], rows.taps[part], keep=False
                )
                counted = alone.num_steps > torch.arange(STEPS)[:, None]
                torch.testing.assert_close(packed[:, own][counted], outputs[counted], rtol=1e-4, atol=1e-4)


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(1, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_which_slots_count(mask: list[bool], steps: int, data: st.DataObject) -> None:
    """Slot p counts at step s if x[p+1] .. x[p+2+s] are all supervised and in p's row: by brute force."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(mask) - 1), max_size=3)))
    offsets = [0, *cuts, len(mask)]
    found = steps_of_slots(torch.tensor(mask), torch.tensor(offsets), steps).tolist()
    for p in range(len(mask)):
        end = next(o for o in offsets if o > p)
        counts = [s for s in range(steps) if p + 2 + s < end and all(mask[p + 1 : p + 3 + s])]
        assert found[p] == len(counts), (p, counts)


def test_a_turns_first_token_is_never_drafted(target: Target, head: EagleHead) -> None:
    """Prompt of 3, answer of 4: the first slot that counts ends the prompt and reads the answer's first token."""
    mask = torch.tensor([False] * 3 + [True] * 4)
    assert steps_of_slots(mask, torch.tensor([0, 7]), 3).tolist() == [0, 0, 3, 2, 1, 0, 0]


def test_gradients_are_those_of_the_decode_loop(target: Target, head: EagleHead) -> None:
    """Every weight, against autograd through the head's own forward."""
    rows = Rows(target, [9, 6, 13])
    layout = simulation_layout(rows.mask, rows.offsets, 4)
    weight = torch.randn(4, len(layout.slots), target.hidden_size)
    weight[layout.num_steps <= torch.arange(4)[:, None]] = 0
    total = torch.zeros(())
    for n, slot in enumerate(layout.slots.tolist()):
        i, at = rows.place(slot)
        taps = rows.taps[rows.offsets[i] : rows.offsets[i + 1]]
        outputs = without_cache(head, rows.row(i), taps, at, int(layout.num_steps[n]))
        total = total + sum((head.norm(out) * weight[s, n]).sum() for s, out in enumerate(outputs))
    head.zero_grad()
    total.backward()
    with torch.no_grad():
        simulation = Simulation(head, layout, dtype=torch.float32)
        simulation.forward(rows.ids, rows.taps, keep=True)
        grads = simulation.backward(weight)
    for name, parameter in trained_weights(head).items():
        expected = parameter.grad
        torch.testing.assert_close(grads[name], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item(), msg=name)
    assert grads.keys() == trained_weights(head).keys()
    head.zero_grad()


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_stated_formula(target: Target, head: EagleHead, name: str) -> None:
    """Sum over steps of weight * sum over counted slots, value and gradients, from plain logits and autograd."""
    rows = Rows(target, [9, 6, 13])
    steps, loss = 3, LossSpec(name)
    layout = simulation_layout(rows.mask, rows.offsets, steps)
    outputs = torch.randn(steps, len(layout.slots), target.hidden_size)
    weights = 0.8 ** torch.arange(steps) / layout.counts()
    full = target.logits(rows.final_hidden)  # (N, V)
    sums, grad_outputs, grad_head = simulated_loss(
        outputs, head.lm_head.weight.detach(), layout, rows.ids, rows.final_hidden, full.logsumexp(-1),
        target.head_rows(head.draft_vocab), head.draft_vocab,
        loss=loss, step_weights=weights, with_grad=True, train_head=True, metrics=True,
    )  # fmt: skip
    x, w = outputs.clone().requires_grad_(), head.lm_head.weight.detach().clone().requires_grad_()
    expected, alphas, hits = torch.zeros(()), torch.zeros(steps), torch.zeros(steps)
    for n, slot in enumerate(layout.slots.tolist()):
        for step in range(int(layout.num_steps[n])):
            position = slot + 1 + step
            q = (w @ x[step, n]).softmax(-1)
            p = full[position].softmax(-1)[head.draft_vocab]
            shared = full[position][head.draft_vocab].softmax(-1)
            value, alpha = reference_divergence(name, p, shared, q)
            expected = expected + weights[step] * value
            alphas[step] += alpha.detach()
            hits[step] += head.draft_vocab[q.argmax()] == rows.ids[position + 1]
    expected.backward()
    torch.testing.assert_close((sums.loss * weights).sum(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.alpha, alphas, rtol=1e-4, atol=1e-5)
    assert sums.hits.tolist() == hits.tolist()
    torch.testing.assert_close(grad_outputs, x.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(grad_head, w.grad, rtol=1e-3, atol=1e-6)


def reference_divergence(name: str, full: Tensor, shared: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and alpha of one position; full: the target's probabilities of the draft's ids, shared: renormalised."""
    alpha = torch.minimum(full, q).sum()
    kl = (shared * (shared / q).log()).sum()
    mid = (shared + q) / 2
    values = {
        "forward_kl": kl,
        "reverse_kl": (q * (q / shared).log()).sum(),
        "jsd": ((shared * (shared / mid).log()).sum() + (q * (q / mid).log()).sum()) / 2,
        "tv": 1 - alpha,
        "lk_log": -alpha.log(),
        "lk_hybrid": (share := torch.exp(-3 * alpha.detach())) * kl + (1 - share) * (1 - alpha),
    }
    return values[name], alpha


def test_mass_outside_the_draft_vocabulary_is_rejected(target: Target) -> None:
    """A head that equals the target on its ids still cannot accept what it lacks."""
    ids = torch.arange(40) * 3
    head = build_eagle(target=target, draft_vocab_size=40, draft_vocab=ids)
    rows = Rows(target, [30], chance=1.0)
    layout = simulation_layout(rows.mask, rows.offsets, 1)
    outputs = rows.final_hidden[layout.slots + 1][None]  # the target's own states: lm_head starts as its rows
    sums, _, _ = simulated_loss(
        outputs, head.lm_head.weight.detach(), layout, rows.ids, rows.final_hidden,
        target.logits(rows.final_hidden).logsumexp(-1), target.head_rows(ids), ids,
        loss=LossSpec(), step_weights=torch.ones(1), with_grad=False, train_head=False, metrics=True,
    )  # fmt: skip
    covered = target.logits(rows.final_hidden[layout.slots + 1]).softmax(-1)[:, ids].sum(-1)
    assert covered.mean() < 0.9
    torch.testing.assert_close(sums.alpha[0], covered.sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.kl[0], torch.zeros(()), rtol=0, atol=1e-3)


def test_chunks_change_nothing(target: Target, head: EagleHead) -> None:
    rows = Rows(target)
    layout = simulation_layout(rows.mask, rows.offsets, 3)
    outputs = torch.randn(3, len(layout.slots), target.hidden_size)
    results = []
    for chunk_mb, block in ((1, 2**21), (96, 600)):
        import train.simulated_loss as module

        before, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, block
        try:
            results.append(
                simulated_loss(
                    outputs,
                    head.lm_head.weight.detach(),
                    layout,
                    rows.ids,
                    rows.final_hidden,
                    target.logits(rows.final_hidden).logsumexp(-1),
                    target.head_rows(head.draft_vocab),
                    head.draft_vocab,
                    loss=LossSpec(chunk_mb=chunk_mb),
                    step_weights=torch.ones(3),
                    with_grad=True,
                    train_head=True,
                    metrics=True,
                )
            )
        finally:
            module.BLOCK_ELEMENTS = before
    for a, b in zip(results[0][1:], results[1][1:]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0][0].loss, results[1][0].loss)


def test_the_head_bound_to_the_target_rows(target: Target) -> None:
    ids = torch.tensor([3, 50, 201])
    hidden = torch.randn(5, target.hidden_size)
    torch.testing.assert_close(target.head_rows(ids)(hidden), target.logits(hidden)[:, ids])
