"""The formulas: hand-computed values, limits, the best K by brute force, and a simulation of the loop's own rule."""

import json
import sys
from fractions import Fraction

import numpy as np
import pytest

import eval.theory
from eval.theory import (
    ALPHAS,
    BEST_ALPHAS,
    DRAFT_COSTS,
    DRAFT_LENS,
    best_draft_len,
    expected_speedup,
    expected_tokens,
    main,
    simulate_tokens,
    theory,
)


def exact_tokens(alpha: float, draft_len: int) -> Fraction:
    """1 + alpha + .. + alpha^K of the very number that the float is."""
    return sum(Fraction(alpha) ** k for k in range(draft_len + 1))


@pytest.mark.parametrize(
    "alpha", [0.0, 1e-300, 1e-9, 0.3, 0.5, 0.7, 0.95, 1 - 1e-6, 1 - 1e-12, np.nextafter(1, 0), 1.0]
)
@pytest.mark.parametrize("draft_len", [0, 1, 4, 16, 200])
def test_tokens_are_the_geometric_sum_up_to_the_limits(alpha, draft_len):
    assert expected_tokens(alpha, draft_len) == pytest.approx(float(exact_tokens(alpha, draft_len)), rel=1e-13)


def test_tokens_by_hand():
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0, 7) == 1 and expected_tokens(1, 7) == 8
    assert np.allclose(expected_tokens([0.7, 0.9], 4), [2.7731, 4.0951])


def test_arguments_broadcast():
    tokens = expected_tokens(ALPHAS[:, None], DRAFT_LENS)
    assert tokens.shape == (14, 16) and ALPHAS[0] == 0.3 and ALPHAS[-1] == 0.95
    assert (np.diff(tokens, axis=0) > 0).all() and (np.diff(tokens, axis=1) > 0).all()
    draft_len, speedup = best_draft_len(np.array([[0.5], [0.9]]), np.array([0.0, 0.1, 0.5]))
    assert draft_len.shape == speedup.shape == (2, 3)


@pytest.mark.parametrize(
    ("alpha", "draft_len", "cost", "speedup"), [(0.7, 4, 0.05, 2.31), (0.7, 4, 0.5, 0.92), (0.3, 4, 0.2, 0.79)]
)
def test_speedups_by_hand(alpha, draft_len, cost, speedup):
    assert round(float(expected_speedup(alpha, draft_len, cost)), 2) == speedup


def test_a_slower_verification_counts():
    assert expected_speedup(0.5, 2, 0.25, 1.25) == pytest.approx(1.75 / 1.75)


def test_the_best_draft_len_beats_all_others():
    for alpha in BEST_ALPHAS:
        for cost in DRAFT_COSTS:
            speedups = [float(exact_tokens(alpha, k)) / (1 + k * cost) for k in range(1, 17)]
            draft_len, speedup = best_draft_len(alpha, cost)
            assert draft_len == 1 + max(range(16), key=speedups.__getitem__)
            assert speedup == pytest.approx(max(speedups))
    assert best_draft_len(0.5, 0.0)[0] == 16  # free tokens: as many as there may be
    assert best_draft_len(0.5, 0.0, max_draft_len=5)[0] == 5
    assert best_draft_len(0.7, 0.1)[0] == 4 and best_draft_len(0.9, 0.05)[0] == 13


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5, 0.9])
def test_some_length_gains_exactly_where_alpha_exceeds_the_cost(cost):
    """Corollary 3.9, and at K = 1 the gain is (1 + alpha) / (1 + c)."""
    assert best_draft_len(cost + 0.01, cost)[1] > 1
    assert best_draft_len(cost - 0.01, cost)[1] < 1
    assert best_draft_len(cost - 0.01, cost)[0] == 1
    assert expected_speedup(0.6, 1, cost) == pytest.approx(1.6 / (1 + cost))


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), [0.5, 2.0]])
def test_impossible_arguments_are_refused(bad):
    with pytest.raises(ValueError, match="alpha="):
        expected_tokens(bad, 4)
    with pytest.raises(ValueError, match="draft_len="):
        expected_tokens(0.5, -1)


@pytest.mark.parametrize(("alpha", "draft_len"), [(0.3, 1), (0.5, 3), (0.7, 8), (0.95, 16)])
def test_the_rule_itself_emits_as_many(alpha, draft_len):
    mean, error = simulate_tokens(alpha, draft_len, num_rounds=40_000, seed=1)
    assert 0 < error < 0.05
    assert abs(mean - expected_tokens(alpha, draft_len)) < 3.5 * error
    assert abs(mean - expected_tokens(alpha - 0.03, draft_len)) > 3.5 * error  # fine enough to tell 0.03 apart


def test_certain_and_impossible_drafts():
    assert simulate_tokens(1.0, 5, num_rounds=100, seed=0) == (6.0, 0.0)
    assert simulate_tokens(0.0, 5, num_rounds=100, seed=0) == (1.0, 0.0)


def test_a_wrong_formula_is_noticed(monkeypatch):
    results = theory(num_rounds=2000)
    assert results["simulated"]["agrees"] and results["simulated"]["inside_ci95"] > 0.88
    monkeypatch.setattr(eval.theory, "expected_tokens", lambda a, k: expected_tokens(np.asarray(a) * 0.98, k))
    assert not theory(num_rounds=2000)["simulated"]["agrees"]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(eval.theory, "NUM_ROUNDS", 2000)
    monkeypatch.setattr(sys, "argv", ["theory", f"output_root={tmp_path}", "seed=3"])
    main()
    out = capsys.readouterr().out
    assert "agrees" in out and "K=4 1.98x" in out and "0.95" in out
    results = json.loads((tmp_path / "theory" / "theory.json").read_text())
    assert np.shape(results["expected_tokens"]) == np.shape(results["simulated"]["mean"]) == (14, 16)
    assert [(b["alpha"], b["draft_cost"]) for b in results["best"]] == [
        (a, c) for a in BEST_ALPHAS for c in DRAFT_COSTS
    ]
    assert results["simulated"]["seed"] == 3 and results["command"] and results["git_sha"]
    data = (tmp_path / "theory" / "theory.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") >= 1000
