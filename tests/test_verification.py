"""The acceptance rule: against the reference, by enumeration, and by chi-square against exact joint probabilities.

A correct sampler of C outcomes needs about 6,400 * (C - 1) draws for a total variation below 0.01. Every chi-square
test runs at level 0.01 / number of tests, with fixed seeds.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from eval.reference import joint_probs, reference_probs, reference_verify, tree_joint_probs
from eval.verification import verify_chain, verify_greedy
from models.sampling import SamplingParams, filtered_probs, sample

VOCAB = 5
FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "min_p": 0.05},
]
CASES = list(itertools.product(FILTERS, ["probabilistic", "greedy"]))
LEVEL = 0.01 / len(CASES)


def chi_square_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """p value of a goodness-of-fit test; cells that expect fewer than 5 are pooled. 0 if an impossible cell was hit."""
    expected = probs * counts.sum()
    if counts[probs == 0].sum():
        return 0.0
    counts, expected = counts[probs > 0], expected[probs > 0]
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


def _tables(seed):
    """Logits of target and draft after every prefix of length 0, 1, 2: unlike, but overlapping."""
    generator = torch.Generator().manual_seed(seed)
    target = [torch.randn(VOCAB**n, VOCAB, generator=generator) * 1.5 for n in range(3)]
    draft = [0.6 * t + torch.randn(t.shape, generator=generator) for t in target]
    return target, draft


def _row(prefix):  # (R, n) -> (R,) row of the table of prefixes of length n
    return sum(token * VOCAB ** (prefix.shape[1] - 1 - i) for i, token in enumerate(prefix.T)) + torch.zeros(
        len(prefix), dtype=torch.long
    )


def _draw_two_tokens(target, draft, params, draft_sampling, num_draws, seed):
    """The first two tokens that the rule emits, K = 2, and a second round where the first emitted one."""
    generator = torch.Generator().manual_seed(seed)
    target = [filtered_probs(t, params) for t in target]
    one_hot = draft_sampling == "greedy"
    draft = [
        torch.nn.functional.one_hot(d.argmax(-1), VOCAB).float() if one_hot else filtered_probs(d, params)
        for d in draft
    ]

    def propose(prefix):  # (R, n) -> tokens (R,), probs (R, V)
        probs = draft[prefix.shape[1]][_row(prefix)]
        return sample(probs, generator), probs

    empty = torch.zeros(num_draws, 0, dtype=torch.long)
    x1, q1 = propose(empty)
    x2, q2 = propose(x1[:, None])
    tokens = torch.stack((x1, x2), 1)  # (R, 2)
    target_probs = torch.stack([target[n][_row(tokens[:, :n])] for n in range(3)], 1)  # (R, 3, V)
    verdict = verify_chain(target_probs, tokens, None if one_hot else torch.stack((q1, q2), 1), generator=generator)
    first = torch.where(verdict.num_accepted >= 1, x1, verdict.next_token)
    second = torch.where(verdict.num_accepted >= 2, x2, verdict.next_token)

    again = verdict.num_accepted == 0  # a second round, K = 1, behind the correction
    prefix = first[again][:, None]
    x, q = propose(prefix)
    target_probs = torch.stack((target[1][_row(prefix)], target[2][_row(torch.cat((prefix, x[:, None]), 1))]), 1)
    retry = verify_chain(target_probs, x[:, None], None if one_hot else q[:, None], generator=generator)
    second[again] = torch.where(retry.num_accepted >= 1, x, retry.next_token)
    return first, second


@pytest.mark.parametrize(("filters", "draft_sampling"), CASES)
def test_output_has_the_exact_joint_distribution(filters, draft_sampling):
    target, draft = _tables(seed=3)
    num_draws = 6400 * (VOCAB**2 - 1)
    first, second = _draw_two_tokens(target, draft, SamplingParams(**filters), draft_sampling, num_draws, seed=5)
    counts = torch.bincount(first * VOCAB + second, minlength=VOCAB**2).double().numpy()
    exact = joint_probs(_reference(target, filters), 2, VOCAB).reshape(-1)
    measured = counts / num_draws
    seen = measured > 0
    assert 0.5 * np.abs(measured - exact).sum() < 0.01
    assert (measured[seen] * np.log(measured[seen] / exact[seen])).sum() < 0.01
    assert chi_square_p_value(counts, exact) > LEVEL


def _reference(tables, filters):
    def probs(prefix):
        return reference_probs(tables[len(prefix)][int(_row(torch.tensor([prefix]).long()))].numpy(), **filters)

    return probs


def test_a_wrong_declared_proposal_fails_the_same_test():
    """Negative control: the draft takes its argmax and declares its softmax. Target (.5, .3, .2) then comes out as
    (.6, 0, .4)."""
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    num_draws = 20_000
    tokens = torch.full((num_draws, 1), 2)
    target_probs = target.expand(num_draws, 2, -1)
    wrong = verify_chain(target_probs, tokens, draft.expand(num_draws, 1, -1), generator=_generator())
    right = verify_chain(target_probs, tokens, None, generator=_generator())
    for verdict, expected, is_exact in ((wrong, [0.6, 0.0, 0.4], False), (right, [0.5, 0.3, 0.2], True)):
        emitted = torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)
        counts = torch.bincount(emitted, minlength=3).double().numpy()
        np.testing.assert_allclose(counts / num_draws, expected, atol=0.015)
        assert (chi_square_p_value(counts, target.double().numpy()) > LEVEL) == is_exact


def test_the_rule_is_exact_by_enumeration():
    target, draft = _tables(seed=7)
    filters = {"temperature": 0.7, "top_k": 4}
    p, q = _reference([t[:, :3] for t in target], filters), _reference([d[:, :3] for d in draft], filters)

    def one_hot(prefix):
        return np.eye(3)[np.argmax(q(prefix))]

    expected = joint_probs(p, 2, 3)
    for drawn, declared, is_exact in ((q, q, True), (one_hot, one_hot, True), (one_hot, q, False)):

        def children(prefix, depth, drawn=drawn, declared=declared):
            return [(drawn(prefix), declared(prefix))] if depth < 2 else []

        joint = tree_joint_probs(p, children, horizon=2, vocab_size=3)
        np.testing.assert_allclose(joint.sum(), 1, atol=1e-12)
        assert (np.abs(joint - expected).max() < 1e-12) == is_exact


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_judgement_equals_the_reference():
    """Same uniform numbers, same accepted counts, row by row; and the correction is one the residual allows."""
    generator = _generator(1)
    rows, num_drafted = 500, 4
    target_probs = torch.randn(rows, num_drafted + 1, VOCAB, generator=generator).softmax(-1)
    draft_probs = torch.randn(rows, num_drafted, VOCAB, generator=generator).softmax(-1)
    tokens = sample(draft_probs, generator)
    uniforms = torch.rand(rows, num_drafted, generator=generator, dtype=torch.float64)
    verdict = verify_chain(target_probs, tokens, draft_probs, generator=generator, uniforms=uniforms)
    for row in range(rows):
        accepted, _ = reference_verify(
            target_probs[row].double().numpy(),
            tokens[row].tolist(),
            draft_probs[row].double().numpy(),
            [*uniforms[row].tolist(), 0.5],
        )
        assert verdict.num_accepted[row] == accepted
        if accepted < num_drafted:
            token = verdict.next_token[row]
            assert target_probs[row, accepted, token] > draft_probs[row, accepted, token]


def test_nothing_left_of_the_residual_gives_a_token_of_the_target():
    one = torch.tensor([[0.25, 0.25, 0.5, 0.0]])
    sure = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    reject = torch.ones(1, 1, dtype=torch.float64)  # forced by hand; rand never gives 1
    for probs, token in ((one, 2), (sure, 1)):
        verdict = verify_chain(
            probs.expand(1, 2, -1), torch.tensor([[token]]), probs[None], uniforms=reject, generator=_generator()
        )
        assert verdict.num_accepted == 0 and probs[0, verdict.next_token] > 0
    one_hot = verify_chain(sure.expand(1, 2, -1), torch.tensor([[1]]), None, uniforms=reject)
    assert one_hot.next_token == 1
    impossible = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])  # q(x) = 0 for the drafted token
    for token in (2, 3):
        verdict = verify_chain(one.expand(1, 2, -1), torch.tensor([[token]]), impossible, generator=_generator())
        emitted = token if verdict.num_accepted else int(verdict.next_token)
        assert one[0, emitted] > 0


def test_nothing_behind_a_rejection_counts():
    """Match patterns (1, 0, 1) and (1, 1, 1): accepted 4, not 5."""
    target_tokens = torch.tensor([[4, 2, 3, 0], [4, 2, 3, 1]])
    verdict = verify_greedy(target_tokens, torch.tensor([[4, 1, 3], [4, 2, 3]]))
    assert verdict.num_accepted.tolist() == [1, 3] and verdict.num_accepted.sum() == 4
    assert verdict.next_token.tolist() == [2, 1]
    plain = verify_greedy(target_tokens[:, :1], torch.zeros(2, 0, dtype=torch.long))
    assert plain.num_accepted.tolist() == [0, 0] and plain.next_token.tolist() == [4, 4]
