"""Losses: known numbers, closed-form gradients against autograd on plain formulas, masks, widths, memory."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor

from models.errors import UserError
from train.losses import (
    KL_FAMILY,
    LOSSES,
    HiddenSignal,
    LogitsSignal,
    LossSpec,
    Terms,
    TopKSignal,
    dense_terms,
    distill_loss,
    topk_terms,
)

SPECS = [LossSpec(name) for name in LOSSES] + [LossSpec("jsd", beta=b) for b in (0.0, 0.1, 1.0)]


def plain_loss(target_logits: Tensor, draft_logits: Tensor, spec: LossSpec) -> Tensor:  # (N, V) x2 -> (N)
    """The formulas as written in the papers, for autograd."""
    log_p = (target_logits / spec.temperature).log_softmax(-1)
    log_q = (draft_logits / spec.temperature).log_softmax(-1)
    p, q, t2 = log_p.exp(), log_q.exp(), spec.temperature**2
    forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    weight = torch.exp(-3 * alpha.detach())
    mix = spec.beta * p + (1 - spec.beta) * q
    jsd = spec.beta * (p * (p / mix).log()).sum(-1) + (1 - spec.beta) * (q * (q / mix).log()).sum(-1)
    return {
        "forward_kl": t2 * forward,
        "reverse_kl": t2 * reverse,
        "jsd": t2 * {0.0: forward, 1.0: reverse}.get(spec.beta, jsd),
        "tv": (p - q).abs().sum(-1) / 2,
        "lk_hybrid": weight * t2 * forward + (1 - weight) * (1 - alpha),
        "lk_log": -alpha.log(),
    }[spec.name]


def topk_signal(logits: Tensor, k: int) -> TopKSignal:
    log_probs = logits.log_softmax(-1)
    values, ids = log_probs.topk(k, dim=-1)
    rest = log_probs.scatter(-1, ids, float("-inf"))
    return TopKSignal(ids.int(), values, rest.logsumexp(-1))


def dense(target: list[float], draft: list[float], spec: LossSpec | None = None) -> Terms:
    """Terms of one token, given by probabilities."""
    as_logits = [torch.tensor([x], dtype=torch.float64).log() for x in (draft, target)]
    return dense_terms(*as_logits, spec or LossSpec())


@pytest.fixture
def case() -> dict[str, Tensor]:
    """Hidden (N, Dd), head (V, Dd), target logits (N, V), mask (N); a chunk of 3 tokens is wholly masked."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(11, generator=generator) < 0.7
    mask[3:6] = False
    return {
        "hidden": make(11, 6).requires_grad_(),
        "head": make(13, 6).requires_grad_(),
        "target": 2 * make(11, 13),
        "mask": mask,
    }


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name}-{s.beta}")
def test_dense_loss_and_gradients_equal_autograd(case: dict[str, Tensor], spec: LossSpec, temperature: float) -> None:
    spec = LossSpec(spec.name, temperature, spec.beta)
    hidden, head, target, mask = case.values()
    want = plain_loss(target, hidden @ head.T, spec)[mask].sum()
    want_grads = torch.autograd.grad(want, (hidden, head))
    identity = torch.eye(13, dtype=torch.float64)
    for signal in (LogitsSignal(target), HiddenSignal(target, lambda x: x @ identity)):
        for chunk_bytes in (1, 3 * 13 * 8, 2**20):  # one token, three (not a divisor of 11), all
            got = distill_loss(hidden, head, signal, mask, loss=spec, chunk_bytes=chunk_bytes)
            grads = torch.autograd.grad(2 * got.loss_sum, (hidden, head))  # 2: the incoming gradient counts
            torch.testing.assert_close(got.loss_sum, want, rtol=1e-9, atol=1e-9)
            for grad, want_grad in zip(grads, want_grads):
                torch.testing.assert_close(grad, 2 * want_grad, rtol=1e-8, atol=1e-9)
            at_one = plain_loss(target, hidden @ head.T, LossSpec("forward_kl"))[mask].sum()
            torch.testing.assert_close(got.kl_sum, at_one, rtol=1e-9, atol=1e-9)  # T = 1 whatever the loss
            overlap = 1 - plain_loss(target, hidden @ head.T, LossSpec("tv"))
            torch.testing.assert_close(got.alpha_sum, overlap[mask].sum(), rtol=1e-9, atol=1e-9)
            assert got.num_tokens == int(mask.sum())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name}-{s.beta}")
@pytest.mark.parametrize("k", [1, 4, 13])
def test_topk_loss_and_gradients_equal_autograd_over_buckets(case: dict[str, Tensor], spec: LossSpec, k: int) -> None:
    hidden, head, target, mask = case.values()
    signal = topk_signal(target, k)
    got = distill_loss(hidden, head, signal, mask, loss=spec, chunk_bytes=200)
    grads = torch.autograd.grad(got.loss_sum, (hidden, head))

    def buckets(log_probs: Tensor) -> Tensor:  # (N, V) -> (N, k + 1), or (N, V) where the tail is empty
        if k == 13:
            return log_probs
        rest = log_probs.scatter(1, signal.ids.long(), float("-inf")).logsumexp(-1, keepdim=True)
        return torch.cat((log_probs.gather(1, signal.ids.long()), rest), 1)

    draft = (hidden @ head.T).log_softmax(-1)
    want = plain_loss(buckets(target.log_softmax(-1)), buckets(draft), spec)[mask].sum()
    torch.testing.assert_close(got.loss_sum, want, rtol=1e-9, atol=1e-9)
    for grad, want_grad in zip(grads, torch.autograd.grad(want, (hidden, head))):
        torch.testing.assert_close(grad, want_grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name}-{s.beta}")
def test_every_loss_is_zero_when_the_models_agree(spec: LossSpec) -> None:
    logits = 3 * torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    signal = topk_signal(logits, 6)
    for terms in (
        dense_terms(logits.clone(), logits.clone(), spec),
        topk_terms(logits.clone(), signal.ids.long(), signal.logprobs, signal.tail_logprob, spec),
    ):
        assert terms.loss.abs().max() < 1e-12
        assert terms.grad is not None and terms.grad.isfinite().all()
        if spec.name in KL_FAMILY:  # TV has a kink there: any subgradient will do
            assert terms.grad.abs().max() < 1e-12
        torch.testing.assert_close(terms.alpha, torch.ones(5, dtype=torch.float64))


def test_known_numbers() -> None:
    uniform = [1 / 3] * 3
    assert dense([0.7, 0.2, 0.1], uniform).loss.item() == pytest.approx(0.29679, abs=1e-5)
    assert dense([0.7, 0.2, 0.1], uniform, LossSpec("reverse_kl")).loss.item() == pytest.approx(0.32429, abs=1e-5)
    assert dense([0.9, 0.1], [0.1, 0.9], LossSpec("jsd", beta=0.5)).loss.item() == pytest.approx(0.36806, abs=1e-5)
    assert dense([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]).alpha.item() == pytest.approx(0.7)
    disjoint = dense([1, 0], [0, 1], LossSpec("tv"))
    assert disjoint.loss.item() == 1 and disjoint.alpha.item() == 0
    for beta, reference in ((0.001, "forward_kl"), (0.999, "reverse_kl")):  # scaled towards 0 at the ends
        near_end = dense([0.9, 0.1], [0.1, 0.9], LossSpec("jsd", beta=beta)).loss.item()
        assert near_end == pytest.approx(
            0.001 * dense([0.9, 0.1], [0.1, 0.9], LossSpec(reference)).loss.item(), rel=0.01
        )


def test_tail_bucket_keeps_the_truncated_mass() -> None:
    target = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log()
    signal = topk_signal(target, 2)
    parts = (signal.ids.long(), signal.logprobs, signal.tail_logprob, LossSpec())
    assert topk_terms(target.clone(), *parts).loss.item() == pytest.approx(0, abs=1e-12)  # mixed formula: 0.2231
    assert topk_terms(torch.zeros_like(target), *parts).loss.item() == pytest.approx(0.2180, abs=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_impossible_tokens_leave_loss_and_gradient_finite(name: str) -> None:
    inf = float("inf")
    spec = LossSpec(name)
    for draft in ([0.0, 0.0, 0.0], [0.0, 0.0, -inf]):
        target = torch.tensor([[0.0, 0.0, -inf]])
        signal = topk_signal(target, 3)
        for terms in (
            dense_terms(torch.tensor([draft]), target.clone(), spec),
            topk_terms(torch.tensor([draft]), signal.ids.long(), signal.logprobs, signal.tail_logprob, spec),
        ):
            assert terms.loss.isfinite().all() and terms.grad is not None and terms.grad.isfinite().all()
            if name == "forward_kl" and draft[2] == 0:
                assert terms.loss.item() == pytest.approx(0.405465, abs=1e-6)
                torch.testing.assert_close(terms.grad, torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]))
            if draft[2] == -inf:
                assert terms.loss.item() == pytest.approx(0, abs=1e-6)


def mean_loss(target: Tensor, draft: Tensor, mask: Tensor, spec: LossSpec | None = None) -> Tensor:
    """Loss per token of logits given directly: hidden = logits, head = identity."""
    out = distill_loss(draft, torch.eye(draft.shape[1]), LogitsSignal(target), mask, loss=spec or LossSpec())
    return out.loss_sum / out.num_tokens


def test_mean_is_over_tokens_whatever_the_padding_or_repetition() -> None:
    target = torch.log(torch.tensor([[0.7, 0.2, 0.1]])).repeat(10, 1)
    draft, mask = torch.zeros(10, 3), torch.zeros(10, dtype=torch.bool)
    mask[4] = True
    assert mean_loss(target, draft, mask).item() == pytest.approx(0.29679, abs=1e-5)
    noise = torch.randn(2, 10, 11)
    full = torch.ones(10, dtype=torch.bool)
    once = mean_loss(noise[0], noise[1], full)
    twice = mean_loss(noise[0].repeat(2, 1), noise[1].repeat(2, 1), full.repeat(2))
    torch.testing.assert_close(once, twice)
    plain = plain_loss(noise[0], noise[1], LossSpec()).mean()
    torch.testing.assert_close(once, plain)


def test_masked_positions_do_not_move_the_loss_by_one_bit() -> None:
    target, draft = torch.randn(8, 20), torch.randn(8, 20)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    before = mean_loss(target, draft, mask)
    target[~mask], draft[~mask] = 1e4 * torch.randn(3, 20), float("nan")
    assert torch.equal(mean_loss(target, draft, mask), before)
    nothing = distill_loss(
        draft.requires_grad_(), torch.eye(20), LogitsSignal(target), torch.zeros(8, dtype=torch.bool), loss=LossSpec()
    )
    nothing.loss_sum.backward()
    assert nothing.num_tokens == 0 and nothing.loss_sum == 0 and torch.equal(draft.grad, torch.zeros(8, 20))


def test_temperature_keeps_the_size_of_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = (2 * torch.randn(4, 50, generator=generator) for _ in range(2))
    norms = {t: dense_terms(draft.clone(), target.clone(), LossSpec(temperature=t)).grad.norm() for t in (1, 2, 4, 8)}
    assert all(0.3 < norm / norms[1] < 3 for norm in norms.values())


def test_topk_with_a_temperature_is_refused() -> None:
    signal = topk_signal(torch.randn(2, 5), 2)
    with pytest.raises(UserError, match=r"loss\.temperature=2\.0.*signal=hidden"):
        distill_loss(
            torch.randn(2, 3),
            torch.randn(5, 3),
            signal,
            torch.ones(2, dtype=torch.bool),
            loss=LossSpec(temperature=2.0),
        )
    for bad in ({"name": "kl"}, {"temperature": 0.0}, {"beta": 1.5}):
        with pytest.raises(UserError, match=r"loss\."):
            LossSpec(**bad)


def test_padded_ids_carry_no_mass_and_get_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, generator=generator).requires_grad_()
    head = torch.randn(64, 4, generator=generator).requires_grad_()
    target = torch.randn(6, 50, generator=generator)
    mask = torch.ones(6, dtype=torch.bool)
    for signal in (LogitsSignal(target), topk_signal(target, 5)):
        out = distill_loss(hidden, head, signal, mask, loss=LossSpec(), vocab_size=50)
        narrow = distill_loss(hidden, head[:50], signal, mask, loss=LossSpec())
        torch.testing.assert_close(out.loss_sum, narrow.loss_sum)
        grad = torch.autograd.grad(out.loss_sum, head)[0]
        assert torch.equal(grad[50:], torch.zeros(14, 4)) and grad[:50].abs().sum() > 0
    wide_target = torch.cat((target, torch.full((6, 14), 9.0)), 1)  # a padded target over a narrow draft
    padded = distill_loss(hidden, head[:50], LogitsSignal(wide_target), mask, loss=LossSpec())
    exact = distill_loss(hidden, head[:50], LogitsSignal(target), mask, loss=LossSpec())
    torch.testing.assert_close(padded.loss_sum, exact.loss_sum)


def test_bf16_autocast_keeps_the_softmax_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    draft = (3 * torch.randn(4, 50257, generator=generator)).bfloat16().float()  # exact in bf16
    target = 3 * torch.randn(4, 50257, generator=generator)
    signal = topk_signal(target, 64)
    exact = topk_terms(draft.clone(), signal.ids.long(), signal.logprobs, signal.tail_logprob, LossSpec()).loss.sum()

    hidden, head = torch.eye(4), draft.T.contiguous()  # logits = the given ones, exactly
    with torch.autocast("cpu", torch.bfloat16):
        got = distill_loss(hidden, head, signal, torch.ones(4, dtype=torch.bool), loss=LossSpec())
    assert got.loss_sum.item() / 4 == pytest.approx(exact.item() / 4, abs=1e-3)


def test_no_grad_gives_the_same_numbers(case: dict[str, Tensor]) -> None:
    hidden, head, target, mask = case.values()
    for signal in (LogitsSignal(target), topk_signal(target, 4)):
        train = distill_loss(hidden, head, signal, mask, loss=LossSpec())
        with torch.no_grad():
            evaluated = distill_loss(hidden, head, signal, mask, loss=LossSpec())
        for name in ("loss_sum", "alpha_sum", "kl_sum"):
            torch.testing.assert_close(getattr(evaluated, name), getattr(train, name).detach())


def test_large_vocabulary_stays_under_half_a_gigabyte() -> None:
    """N = 2048, V = 151936, D = 256 in fp32: full logits are 1.24 GB each. Peak resident memory of a fresh process."""
    code = """
        import json, resource, torch
        from train.losses import LossSpec, TopKSignal, distill_loss
        torch.manual_seed(0)
        n, v, d, k = 2048, 151936, 256, 64
        hidden, head = torch.randn(n, d).requires_grad_(), (0.1 * torch.randn(v, d)).requires_grad_()
        ids = (torch.arange(k) * 2311 + torch.randint(2311, (n, k))).int()  # ascending, no id twice
        signal = TopKSignal(ids, torch.full((n, k), -6.0), torch.full((n,), -0.17))
        warm = torch.randn(64, 64); (warm @ warm).log_softmax(-1)
        rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = rss()
        distill_loss(hidden, head, signal, torch.ones(n, dtype=torch.bool), loss=LossSpec()).loss_sum.backward()
        peak = rss() - before
        hidden.grad = head.grad = None
        rows = torch.arange(0, n, 16)
        mask = torch.zeros(n, dtype=torch.bool).index_fill_(0, rows, True)
        out = distill_loss(hidden, head, signal, mask, loss=LossSpec(), chunk_bytes=5 * 4 * v)
        out.loss_sum.backward()
        grad_hidden, grad_head = hidden.grad, head.grad
        hidden.grad = head.grad = None
        log_q, ids = (hidden[rows] @ head.T).log_softmax(-1), ids[rows].long()  # the plain formula
        log_p = torch.cat((signal.logprobs[rows], signal.tail_logprob[rows, None]), 1).log_softmax(-1)
        rest = log_q.scatter(1, ids, float("-inf")).logsumexp(-1, keepdim=True)
        plain = (log_p.exp() * (log_p - torch.cat((log_q.gather(1, ids), rest), 1))).sum()
        plain.backward()
        error = lambda got, want: ((got - want).abs().max() / want.abs().max()).item()
        print(json.dumps({
            "peak_gb": peak / 1e9,
            "errors": [error(out.loss_sum, plain), error(grad_hidden, hidden.grad), error(grad_head, head.grad)],
        }))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["peak_gb"] < 0.5 and max(result["errors"]) < 1e-5, result
