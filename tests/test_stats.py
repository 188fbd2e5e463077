"""Bootstrap intervals: hand-computed values, coverage, degenerate input."""

import math

import numpy as np
import pytest

from eval.stats import bootstrap_ci, ratio_ci


def test_value_is_the_mean_and_weights_make_it_a_ratio_of_sums():
    assert bootstrap_ci([1.0, 2.0, 6.0])[0] == pytest.approx(3.0)
    # 4 accepted of 4 judged and 0 of 1: token-weighted 4/5, the mean over prompts 1/2.
    assert bootstrap_ci([1.0, 0.0], [4, 1])[0] == pytest.approx(0.8)
    assert ratio_ci([4, 0], [4, 1])[0] == pytest.approx(0.8)
    assert bootstrap_ci([1.0, 0.0])[0] == pytest.approx(0.5)


def test_same_seed_same_interval():
    values = np.random.default_rng(1).random(30)
    assert bootstrap_ci(values, seed=3) == bootstrap_ci(values, seed=3)
    assert bootstrap_ci(values, seed=3) != bootstrap_ci(values, seed=4)


def test_interval_has_no_width_on_equal_prompts():
    assert bootstrap_ci([0.5] * 10) == pytest.approx((0.5, 0.5, 0.5))
    assert ratio_ci([2, 4], [1, 2]) == pytest.approx((2.0, 2.0, 2.0))


def test_interval_covers_the_mean_as_often_as_it_says():
    """300 samples of 40 draws: a 95 % interval covers 0.5 in about 94 % of them (a bit narrow)."""
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        _, low, high = bootstrap_ci(rng.random(40), n=400, seed=trial)
        covered += low <= 0.5 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_interval_matches_the_normal_one_on_many_rows():
    values = np.random.default_rng(2).normal(3.0, 1.0, 2000)
    value, low, high = bootstrap_ci(values)
    half = 1.96 * values.std() / math.sqrt(2000)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    assert low < value < high


def test_nothing_measured_is_nan_and_zero_weight_is_ignored():
    assert all(math.isnan(x) for x in bootstrap_ci([]))
    assert all(math.isnan(x) for x in ratio_ci([0, 0], [0, 0]))
    assert bootstrap_ci([0.5, float("nan")], [2, 0])[0] == pytest.approx(0.5)
