"""The measuring of `eval.compare`: rows in turn on the same prompts, one by one and in batches, and their figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from data.progress import ProgressBar
from eval.batched import speculative_decode_batch
from eval.compare_rows import Entrant, Row
from eval.decode import first_difference, prompt_seed
from eval.drafters import Clock
from eval.loop import DecodeResult
from eval.measures import bootstrap_figure
from eval.prompts import Prompt
from eval.results import Metric
from eval.tree import TreeShape
from models.sampling import SamplingParams
from models.target import Target

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Timed:
    """What was decoded in one call: a text, or the texts of a batch."""

    results: list[DecodeResult]
    seconds: float


Call = Callable[[Sequence[Prompt], int], list[DecodeResult]]  # prompts, max_new_tokens


def in_turn(
    calls: Mapping[str, Call],
    groups: Sequence[Sequence[Prompt]],
    *,
    max_new_tokens: int,
    device: torch.device,
    bar: ProgressBar,
) -> dict[str, list[Timed]]:
    """Every group of prompts by all calls, whose order alternates, after a warm-up of each."""
    clock = Clock(device)
    for call in calls.values():
        call(groups[0], min(WARM_UP_TOKENS, max_new_tokens))
    timed: dict[str, list[Timed]] = {name: [] for name in calls}
    for number, group in enumerate(groups):
        for name in calls if number % 2 == 0 else reversed(calls):
            begin = clock.now()
            results = calls[name](group, max_new_tokens)
            timed[name].append(Timed(results, clock.now() - begin))
            bar.advance(1)
    return timed


def row_metrics(row: Row, trials: Sequence[Timed], plain: Sequence[Timed], *, suffix: str) -> dict[str, Metric]:
    """Figures of a row with intervals over prompts (or batches). Those without a value are left out."""

    def column(trials: Sequence[Timed], of: Callable[[DecodeResult], float]) -> np.ndarray:
        return np.array([sum(of(result) for result in trial.results) for trial in trials], dtype=np.float64)

    columns = {
        "tokens": column(trials, lambda r: len(r.token_ids)),
        "in_rounds": column(trials, lambda r: len(r.token_ids) - (not row.first_round_reads_prompt)),
        "rounds": column(trials, lambda r: len(r.rounds)),
        "accepted": column(trials, lambda r: sum(each.accepted for each in r.rounds)),
        "judged": column(trials, lambda r: sum(each.judged for each in r.rounds)),
        "seconds": np.array([trial.seconds for trial in trials]),
        "plain_tokens": column(plain, lambda r: len(r.token_ids)),
        "plain_seconds": np.array([trial.seconds for trial in plain]),
    }
    figures = {
        "tau": lambda s: s["in_rounds"] / s["rounds"],
        "tokens_per_s": lambda s: s["tokens"] / s["seconds"],
        "speedup": lambda s: s["plain_seconds"] / s["plain_tokens"] / (s["seconds"] / s["tokens"]),
        **({"alpha": lambda s: s["accepted"] / s["judged"]} if row.drafts_chains else {}),
    }
    found = {f"{name}/{suffix}": bootstrap_figure(columns, figure, len(trials)) for name, figure in figures.items()}
    return {key: metric for key, metric in found.items() if metric is not None}


def greedy_metrics(
    target: Target,
    groups: Sequence[Sequence[Prompt]],
    trials: Sequence[Timed],
    plain: Sequence[Timed],
    *,
    suffix: str,
) -> dict[str, Metric]:
    """How many texts part from the plain ones at a near tie, and how many elsewhere."""
    compared = [
        first_difference(target, prompt, base.token_ids, ours.token_ids)
        for group, base_trial, trial in zip(groups, plain, trials)
        for prompt, base, ours in zip(group, base_trial.results, trial.results)
    ]
    failures = sum(d is not None and d.is_failure for d in compared)
    near_ties = sum(d is not None and not d.is_failure for d in compared)
    return {
        f"greedy_failures/{suffix}": Metric(failures, None, len(compared)),
        f"greedy_near_ties/{suffix}": Metric(near_ties, None, len(compared)),
    }


def compare_prompts(
    target: Target,
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    bar: ProgressBar,
) -> dict[str, Metric]:
    """Batch 1: all figures but the memory."""

    def call(row: Row) -> Call:
        params = SamplingParams(temperature=temperature)
        return lambda group, length: [row.decode(p.token_ids, params, length, prompt_seed(p, seed)) for p in group]

    groups = [[prompt] for prompt in prompts]
    calls = {row.key: call(row) for row in rows}
    timed = in_turn(calls, groups, max_new_tokens=max_new_tokens, device=target.device, bar=bar)
    plain = timed["plain"]
    metrics: dict[str, Metric] = {}
    for row in rows:
        suffix = f"T{temperature:g}/{row.key}"
        trials = timed[row.key]
        metrics |= row_metrics(row, trials, plain, suffix=suffix)
        if temperature == 0 and row.key != "plain":
            metrics |= greedy_metrics(target, groups, trials, plain, suffix=suffix)
    if "generate" in timed:
        ratio = row_metrics(rows[0], plain, timed["generate"], suffix="")["speedup/"]
        metrics[f"plain_vs_generate/T{temperature:g}"] = ratio
    return metrics


def batched_rows(entrants: Sequence[Entrant], shapes: Sequence[TreeShape]) -> list[Row]:
    """Plain decoding, and the first chain of each draft."""
    chains = [shape for shape in shapes if shape.kind == "chain"][:1]
    return [
        Row("plain", "none", None),
        *(Row(f"{e.slug}/{shape}", e.label, None, e, shape) for shape in chains for e in entrants),
    ]


def compare_batches(
    target: Target,
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    bar: ProgressBar,
) -> dict[str, Metric]:
    """The same figures for batches of prompts; intervals over batches."""

    def call(row: Row) -> Call:
        decode = partial(
            speculative_decode_batch,
            row.entrant.target if row.entrant else target,
            row.entrant.draft if row.entrant else None,
            temperature=temperature,
            **({"method": row.shape} if row.shape else {}),
        )
        return lambda group, length: (
            decode(
                [p.token_ids for p in group], max_new_tokens=length, seeds=[prompt_seed(p, seed) for p in group]
            ).results
        )

    groups = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    calls = {row.key: call(row) for row in rows}
    timed = in_turn(calls, groups, max_new_tokens=max_new_tokens, device=target.device, bar=bar)
    metrics: dict[str, Metric] = {}
    for row in rows:
        suffix = f"T{temperature:g}/batch{batch_size}/{row.key}"
        metrics |= row_metrics(row, timed[row.key], timed["plain"], suffix=suffix)
        if temperature == 0 and row.key != "plain":
            metrics |= greedy_metrics(target, groups, timed[row.key], timed["plain"], suffix=suffix)
    return metrics
