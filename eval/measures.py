"""From decoded prompts to figures. Every figure is a function of per-prompt sums, so that one bootstrap over prompts
gives all intervals.

    alpha           accepted / judged drafted tokens; chains only, those of prompt lookup too
    acceptance_rate accepted before any cut / drafted tokens, those behind a rejection too: what vLLM calls the draft
                    acceptance rate
    alpha_at_depth  accepted at depth d / rounds that reached depth d: all before it were accepted, and the draft
                    offered something there
    survival_at_depth  rounds that accepted d tokens or more, before any cut / rounds; tau_uncut is 1 + their sum
    tau             (emitted - 1) / rounds; tau_prompt_mean: mean over prompts; tau_uncut: 1 + accepted_uncut / rounds
    tau_formula     (1 - alpha^(K+1)) / (1 - alpha); chains of K tokens in every round only
    tau_from_depths 1 + sum of cumulative products of alpha_at_depth: above tau_uncut for a tree with branches that
                    end early, as rounds accepted to such an end never reached the next depth
    tree_nodes      drafted tokens a round
    draft_vocab_share  tokens of the plain texts that a head's draft vocabulary holds: no more than that is accepted
    fallback_steps  plain steps where positions ran out; paused_steps: those of fallback=auto. Both are rounds of tau
    speedup         plain seconds a token / speculative seconds a token, prefill included
    draft_cost      draft seconds a round / plain target step; verify_cost: target seconds a round / plain target step
    predicted_speedup  tau / (verify_cost + draft_cost): that of the rounds, without prefill and loop
    loop_overhead   share of the speculative time outside the prefill that is outside the forwards of target and draft

Without plain runs, what is relative to them (speedup, both costs, predicted_speedup) is left out.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from eval.loop import DecodeResult
from eval.results import Metric
from eval.stats import bootstrap_ci
from eval.tree import TreeShape

Sums = dict[str, np.ndarray]  # column -> sum over prompts, of shape () or (n,) for n resamples


@dataclass(frozen=True)
class Method:
    """One way of decoding. `name` tells all of it but the temperature: chain_k4_greedy_draft, dynamic_d5_k10_n16."""

    temperature: float
    name: str
    shape: TreeShape
    draft_sampling: str

    @property
    def key(self) -> str:
        return f"T{self.temperature:g}/{self.name}"


@dataclass(frozen=True)
class Trial:
    """One prompt decoded by a method, and plainly by the same engine (None: no plain run was asked for)."""

    set_name: str
    prompt_id: str
    plain: DecodeResult | None
    ours: DecodeResult
    plain_draftable: int | None = None  # tokens of the plain text in the draft vocabulary, where a head has one


def decode_metrics(trials: Sequence[Trial], *, shape: TreeShape, suffix: str) -> dict[str, Metric]:
    """All figures of one set, temperature and method; keys end in `suffix`: `mt_bench/T0/chain_k4`.

    Figures without a value (no drafted token was judged, ...) are left out.
    """
    columns = _columns(trials, shape.depth)
    metrics = {}
    in_every_round = not any(t.ours.fallback_steps + t.ours.paused_steps for t in trials)
    for name, figure in _figures(shape, columns, in_every_round=in_every_round).items():
        metric = bootstrap_figure(columns, figure, len(trials))
        if metric is not None:
            metrics[f"{name}/{suffix}"] = metric
    tau = [t.ours.tau for t in trials if t.ours.rounds]
    if tau:
        metrics[f"tau_prompt_mean/{suffix}"] = Metric.of(bootstrap_ci(tau), len(tau))
    repeats = [repeated_4gram_share(t.ours.token_ids) for t in trials]
    metrics[f"repeated_4gram_share/{suffix}"] = Metric.of(bootstrap_ci(repeats), len(repeats))
    metrics[f"fallback_steps/{suffix}"] = Metric(sum(t.ours.fallback_steps for t in trials), None, len(trials))
    if paused := sum(t.ours.paused_steps for t in trials):
        metrics[f"paused_steps/{suffix}"] = Metric(paused, None, len(trials))
    return metrics


def accepted_histogram(trials: Sequence[Trial], *, depth: int) -> list[int]:
    """Rounds by accepted drafted tokens 0 .. depth, before any cut; sums to rounds."""
    counts = np.bincount([r.accepted_uncut for t in trials for r in t.ours.rounds], minlength=depth + 1)
    return counts.tolist()


def repeated_4gram_share(token_ids: Sequence[int]) -> float:
    """Share of a text's 4-grams that stood in it before: how much it loops. 0 for a text of fewer than 4 tokens."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _columns(trials: Sequence[Trial], max_depth: int) -> dict[str, np.ndarray]:  # column -> (P,)
    rows = []
    has_plain = all(trial.plain is not None for trial in trials)
    for trial in trials:
        ours = trial.ours
        row = {
            "tokens": len(ours.token_ids),
            "rounds": len(ours.rounds),
            "drafted": sum(r.drafted for r in ours.rounds),
            "accepted": sum(r.accepted for r in ours.rounds),
            "judged": sum(r.judged for r in ours.rounds),
            "accepted_uncut": sum(r.accepted_uncut for r in ours.rounds),
            "after_prefill": len(ours.token_ids) - 1,
            "seconds": ours.wall_s,
            "loop_seconds": ours.wall_s - ours.prefill_s,
            "overhead": ours.overhead_s,
            "draft": ours.draft_s,
            "target": ours.target_s,
        }
        if has_plain:
            plain = trial.plain
            row["plain_tokens"] = len(plain.token_ids)
            row["plain_seconds"] = plain.wall_s
            row["plain_steps"] = len(plain.rounds)
            row["plain_target"] = plain.target_s
            if trial.plain_draftable is not None:
                row["plain_draftable"] = trial.plain_draftable
        for depth in range(1, max_depth + 1):
            row[f"judged_{depth}"] = sum(r.judged >= depth for r in ours.rounds)
            row[f"accepted_{depth}"] = sum(r.accepted >= depth for r in ours.rounds)
            row[f"survived_{depth}"] = sum(r.accepted_uncut >= depth for r in ours.rounds)
        rows.append(row)
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


def _figures(
    shape: TreeShape, columns: Container[str], *, in_every_round: bool
) -> dict[str, Callable[[Sums], np.ndarray]]:
    """in_every_round: no plain step among the rounds, so that the formula of tau holds."""
    depths = range(1, shape.depth + 1)

    def alpha(s: Sums) -> np.ndarray:
        return s["accepted"] / s["judged"]

    def at_depth(s: Sums, depth: int) -> np.ndarray:
        return s[f"accepted_{depth}"] / s[f"judged_{depth}"]

    def from_depths(s: Sums) -> np.ndarray:
        # a depth that was never reached adds nothing: the product before it is 0
        chances = [np.nan_to_num(at_depth(s, depth)) for depth in depths]
        return 1 + np.cumprod(np.stack(chances), axis=0).sum(0)

    def formula(s: Sums) -> np.ndarray:
        return sum(alpha(s) ** k for k in range(shape.depth + 1))  # the geometric sum: K + 1 at alpha = 1

    def tau(s: Sums) -> np.ndarray:
        return s["after_prefill"] / s["rounds"]

    def draft_cost(s: Sums) -> np.ndarray:
        return s["draft"] / s["rounds"] / (s["plain_target"] / s["plain_steps"])

    def verify_cost(s: Sums) -> np.ndarray:
        return s["target"] / s["rounds"] / (s["plain_target"] / s["plain_steps"])

    def vocab_share(s: Sums) -> np.ndarray:
        return s["plain_draftable"] / s["plain_tokens"]

    relative_to_plain = {
        "speedup": lambda s: s["plain_seconds"] / s["plain_tokens"] / (s["seconds"] / s["tokens"]),
        "predicted_speedup": lambda s: tau(s) / (verify_cost(s) + draft_cost(s)),
        "draft_cost": draft_cost,
        "verify_cost": verify_cost,
        "plain_tokens_per_s": lambda s: s["plain_tokens"] / s["plain_seconds"],
    }
    return {
        **({"alpha": alpha} if shape.kind in ("chain", "ngram") else {}),
        **({"tau_formula": formula} if shape.kind == "chain" and in_every_round else {}),
        **{f"alpha_at_depth/d{depth}": lambda s, depth=depth: at_depth(s, depth) for depth in depths},
        **{
            f"survival_at_depth/d{depth}": lambda s, depth=depth: s[f"survived_{depth}"] / s["rounds"]
            for depth in depths
        },
        "acceptance_rate": lambda s: s["accepted_uncut"] / s["drafted"],
        "tau": tau,
        "tau_uncut": lambda s: 1 + s["accepted_uncut"] / s["rounds"],
        "tau_from_depths": from_depths,
        "tree_nodes": lambda s: s["drafted"] / s["rounds"],
        **(relative_to_plain if "plain_steps" in columns else {}),
        **({"draft_vocab_share": vocab_share} if "plain_draftable" in columns else {}),
        "spec_tokens_per_s": lambda s: s["tokens"] / s["seconds"],
        "loop_overhead": lambda s: s["overhead"] / s["loop_seconds"],
    }


def bootstrap_figure(
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
