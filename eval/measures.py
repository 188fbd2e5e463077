"""From decoded prompts to figures. Every figure is a function of per-prompt sums, so that one bootstrap over prompts
gives all intervals.

    alpha           accepted / judged drafted tokens
    alpha_at_depth  accepted at depth d / rounds whose token at depth d was judged
    tau             (emitted - 1) / rounds; tau_prompt_mean: mean over prompts; tau_uncut: 1 + accepted_uncut / rounds
    tau_formula     (1 - alpha^(K+1)) / (1 - alpha); tau_from_depths: 1 + sum of cumulative products of alpha_at_depth
    speedup         plain seconds a token / speculative seconds a token, prefill included
    draft_cost      draft seconds a round / plain target step; verify_cost: target seconds a round / plain target step
    predicted_speedup  tau_formula / (1 + draft_cost) (Leviathan et al. 2023, theorem 3.8)
    loop_overhead   share of the speculative time outside the prefill that is outside the forwards of target and draft
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.loop import DecodeResult
from eval.results import Metric
from eval.stats import bootstrap_ci

Sums = dict[str, np.ndarray]  # column -> sum over prompts, of shape () or (n,) for n resamples


@dataclass(frozen=True)
class Trial:
    """One prompt decoded twice by the same engine."""

    set_name: str
    prompt_id: str
    plain: DecodeResult
    ours: DecodeResult


def decode_metrics(trials: Sequence[Trial], *, draft_len: int, suffix: str) -> dict[str, Metric]:
    """All figures of one set, temperature and method; keys end in `suffix`: `mt_bench/T0/chain_k4`.

    Figures without a value (no drafted token was judged, ...) are left out.
    """
    columns = _columns(trials, draft_len)
    metrics = {}
    for name, figure in _figures(draft_len).items():
        metric = _bootstrap(columns, figure, len(trials))
        if metric is not None:
            metrics[f"{name}/{suffix}"] = metric
    tau = [t.ours.tau for t in trials if t.ours.rounds]
    if tau:
        metrics[f"tau_prompt_mean/{suffix}"] = Metric.of(bootstrap_ci(tau), len(tau))
    repeats = [repeated_4gram_share(t.ours.token_ids) for t in trials]
    metrics[f"repeated_4gram_share/{suffix}"] = Metric.of(bootstrap_ci(repeats), len(repeats))
    metrics[f"fallback_steps/{suffix}"] = Metric(sum(t.ours.fallback_steps for t in trials), None, len(trials))
    return metrics


def accepted_histogram(trials: Sequence[Trial], *, draft_len: int) -> list[int]:
    """Rounds by accepted drafted tokens 0 .. K, before any cut; sums to rounds."""
    counts = np.bincount([r.accepted_uncut for t in trials for r in t.ours.rounds], minlength=draft_len + 1)
    return counts.tolist()


def repeated_4gram_share(token_ids: Sequence[int]) -> float:
    """Share of a text's 4-grams that stood in it before: how much it loops. 0 for a text of fewer than 4 tokens."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _columns(trials: Sequence[Trial], draft_len: int) -> dict[str, np.ndarray]:  # column -> (P,)
    rows = []
    for trial in trials:
        plain, ours = trial.plain, trial.ours
        row = {
            "tokens": len(ours.token_ids),
            "rounds": len(ours.rounds),
            "accepted": sum(r.accepted for r in ours.rounds),
            "judged": sum(r.judged for r in ours.rounds),
            "accepted_uncut": sum(r.accepted_uncut for r in ours.rounds),
            "after_prefill": len(ours.token_ids) - 1,
            "seconds": ours.wall_s,
            "loop_seconds": ours.wall_s - ours.prefill_s,
            "overhead": ours.overhead_s,
            "draft": ours.draft_s,
            "target": ours.target_s,
            "plain_tokens": len(plain.token_ids),
            "plain_seconds": plain.wall_s,
            "plain_steps": len(plain.rounds),
            "plain_target": plain.target_s,
        }
        for depth in range(1, draft_len + 1):
            row[f"judged_{depth}"] = sum(r.judged >= depth for r in ours.rounds)
            row[f"accepted_{depth}"] = sum(r.accepted >= depth for r in ours.rounds)
        rows.append(row)
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


def _figures(draft_len: int) -> dict[str, Callable[[Sums], np.ndarray]]:
    depths = range(1, draft_len + 1)

    def alpha(s: Sums) -> np.ndarray:
        return s["accepted"] / s["judged"]

    def at_depth(s: Sums, depth: int) -> np.ndarray:
        return s[f"accepted_{depth}"] / s[f"judged_{depth}"]

    def from_depths(s: Sums) -> np.ndarray:
        # a depth that was never reached adds nothing: the product before it is 0
        chances = [np.nan_to_num(at_depth(s, depth)) for depth in depths]
        return 1 + np.cumprod(np.stack(chances), axis=0).sum(0)

    def formula(s: Sums) -> np.ndarray:
        return sum(alpha(s) ** k for k in range(draft_len + 1))  # the geometric sum: K + 1 at alpha = 1

    def draft_cost(s: Sums) -> np.ndarray:
        return s["draft"] / s["rounds"] / (s["plain_target"] / s["plain_steps"])

    return {
        "alpha": alpha,
        **{f"alpha_at_depth/d{depth}": lambda s, depth=depth: at_depth(s, depth) for depth in depths},
        "tau": lambda s: s["after_prefill"] / s["rounds"],
        "tau_uncut": lambda s: 1 + s["accepted_uncut"] / s["rounds"],
        "tau_formula": formula,
        "tau_from_depths": from_depths,
        "speedup": lambda s: s["plain_seconds"] / s["plain_tokens"] / (s["seconds"] / s["tokens"]),
        "predicted_speedup": lambda s: formula(s) / (1 + draft_cost(s)),
        "draft_cost": draft_cost,
        "verify_cost": lambda s: s["target"] / s["rounds"] / (s["plain_target"] / s["plain_steps"]),
        "plain_tokens_per_s": lambda s: s["plain_tokens"] / s["plain_seconds"],
        "spec_tokens_per_s": lambda s: s["tokens"] / s["seconds"],
        "loop_overhead": lambda s: s["overhead"] / s["loop_seconds"],
    }


def _bootstrap(
    columns: dict[str, np.ndarray],  # (P,) each
    figure: Callable[[Sums], np.ndarray],
    num_prompts: int,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Metric | None:
    """A figure and its 95 % interval over prompts drawn with replacement. None where it has no value."""
    counts = np.random.default_rng(seed).multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples
    )  # (n, P)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure({name: column.sum() for name, column in columns.items()}))
        resampled = figure({name: counts @ column for name, column in columns.items()})  # (n,)
    resampled = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or len(resampled) == 0:
        return None
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Metric(value, (float(low), float(high)), num_prompts)
