"""When vLLM's texts and counters agree with those of our own loop.

judge     prompt by prompt, for drafts whose counts must be equal
compare   over many prompts, where near ties move single counts: mean lengths and their ratio
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eval.decode import NEAR_TIE, NEAR_TIE_FP32, Difference, first_difference
from eval.loop import DecodeResult, speculative_decode
from eval.measures import Method
from eval.prompts import Prompt
from eval.results import Metric
from models.eagle import EagleHead
from models.medusa import MedusaHeads
from models.target import Target
from train.serving import Counts, Served

TOLERANCE = 0.02  # of 1 + accepted / drafts, greedily


@dataclass(frozen=True)
class Judged:
    """What came of a comparison: lines to print, and those of them that are failures."""

    ours: Counts
    served: Counts
    notes: list[str]
    failures: list[str]

    @property
    def verdict(self) -> str:
        return "UNEQUAL" if self.failures else "near tie" if self.notes else "equal"


def judge(
    name: str,
    target: Target,
    prompts: Sequence[Prompt],
    ours: Sequence[DecodeResult],
    served: Sequence[Served],
    *,
    draft_len: int,
    draft_gap: Callable[[Prompt], float],
) -> Judged:
    """Texts and counts must be equal, prompt by prompt.

    A text may part where the target's two best logits are nearly tied (eval.decode), the counts of an equal text where
    the draft's are: `draft_gap` gives its narrowest gap. Either is named. A text that parts is another text: its counts
    say nothing, and at least half of the texts must be equal. A tie of the draft explains one draft more or fewer.
    """
    limit = NEAR_TIE_FP32 if target.dtype == torch.float32 else NEAR_TIE
    notes, failures, compared = [], [], []
    counts = [Counts.of(result, draft_len) for result in ours]
    for prompt, result, count, theirs in zip(prompts, ours, counts, served, strict=True):
        where = f"{name}, {prompt.set_name}/{prompt.prompt_id}"
        difference = text_difference(target, prompt, result.token_ids, theirs.token_ids)
        if difference is not None:
            line = f"{where}: the text parts at token {difference.index}, top-2 gap of the target {difference.gap:.3f}"
            (failures if difference.is_failure else notes).append(line)
            continue
        compared.append((count, theirs.counts))
        if count != theirs.counts:
            gap = draft_gap(prompt)
            line = f"{where}: ours {count}, vLLM {theirs.counts}; narrowest top-2 gap of the draft {gap:.3f}"
            (notes if gap <= limit else failures).append(line)
    nothing = Counts(0, 0, (0,) * draft_len)
    total, served_total = (
        (reduce(add, side, nothing) for side in zip(*compared, strict=True)) if compared else (nothing,) * 2
    )
    if 2 * len(compared) < len(prompts):
        failures.append(
            f"{name}: only {len(compared)} of {len(prompts)} texts can be compared, the others part from ours"
        )
    if abs(total.drafts - served_total.drafts) > 1:
        failures.append(f"{name}: ours {total}, vLLM {served_total}: more than one draft apart")
    elif abs(total.accepted - served_total.accepted) > draft_len:
        failures.append(f"{name}: ours {total}, vLLM {served_total}: more than one round's tokens apart")
    return Judged(total, served_total, notes, failures)


def text_difference(target: Target, prompt: Prompt, ours: list[int], theirs: list[int]) -> Difference | None:
    """Where greedy texts part; one that only ends earlier is a failure too."""
    shared = min(len(ours), len(theirs))
    if ours[:shared] == theirs[:shared]:
        where = f"{prompt.set_name}/{prompt.prompt_id}"
        return None if len(ours) == len(theirs) else Difference(where, shared, float("inf"), True)
    return first_difference(target, prompt, ours[:shared], theirs[:shared])


@contextmanager
def recorded_gaps(draft: nn.Module) -> Iterator[list[float]]:
    """Gaps between the draft's two best logits, wherever it scores tokens while this is open."""
    gaps: list[float] = []

    def record(logits: Tensor) -> None:  # (..., V)
        best = logits.reshape(-1, logits.shape[-1])[-1].float().topk(2).values
        gaps.append(float(best[0] - best[1]))

    if isinstance(draft, EagleHead | MedusaHeads):
        method = draft.logits

        def recorded(hidden: Tensor) -> Tensor:
            logits = method(hidden)
            for each in logits if isinstance(draft, MedusaHeads) else [logits]:
                record(each)
            return logits

        draft.logits = recorded  # on this head alone
        try:
            yield gaps
        finally:
            del draft.logits
    else:
        head = draft.get_output_embeddings()
        handle = head.register_forward_hook(lambda module, args, output: record(output))
        try:
            yield gaps
        finally:
            handle.remove()


def narrowest_draft_gap(target: Target, draft: nn.Module, prompt: Prompt, **options: Any) -> float:
    with recorded_gaps(draft) as gaps:
        speculative_decode(target, draft, prompt.token_ids, **options)
    return min(gaps, default=float("inf"))


def compare(
    method: Method, target: Target, prompts: Sequence[Prompt], ours: Sequence[DecodeResult], served: Sequence[Served]
) -> tuple[dict[str, Metric], list[str], list[str]]:
    """Figures of one method, what was noticed, and what failed."""
    draft_len = method.shape.depth
    own, theirs = [Counts.of(r, draft_len) for r in ours], [each.counts for each in served]
    where = f"all/{method.key}"
    metrics = {
        f"served/tau_ours/{where}": mean_length(own),
        f"served/tau_vllm/{where}": mean_length(theirs),
        f"served/ratio/{where}": ratio_of_means(theirs, own, level=0.95),
    }
    ratio = metrics[f"served/ratio/{where}"]
    notes, failures = [], []
    if method.temperature == 0:
        parted = [
            d
            for prompt, result, each in zip(prompts, ours, served)
            if (d := text_difference(target, prompt, result.token_ids, each.token_ids)) is not None
        ]
        if near := [d for d in parted if not d.is_failure]:
            widest = max(near, key=lambda d: d.gap)
            notes.append(
                f"{method.key}: {len(near)} of {len(prompts)} texts part from ours at a near tie, the widest gap "
                f"{widest.gap:.3f} ({widest.prompt}, token {widest.index})"
            )
        failures += [
            f"{method.key}: {d.prompt} parts from ours at token {d.index}, top-2 gap of the target {d.gap:.3f}"
            for d in parted
            if d.is_failure
        ]
        if not abs(ratio.value - 1) <= TOLERANCE:
            failures.append(f"{method.key}: vLLM / ours is {ratio.value:.4f}, more than {TOLERANCE:.0%} apart")
        metrics[f"served/texts_apart/{where}"] = Metric(len(parted), n=len(prompts))
    else:
        wide = ratio_of_means(theirs, own, level=0.999)  # four methods and 1 in 1,000 each: no false alarm
        if not wide.ci95[0] <= 1 <= wide.ci95[1]:
            failures.append(f"{method.key}: vLLM / ours is {ratio}, and 1 is outside of its 99.9 % interval")
    return metrics, notes, failures


def mean_length(counts: Sequence[Counts]) -> Metric:
    value, low, high = _bootstrap(counts, lambda sums: 1 + sums[:, 1] / sums[:, 0], level=0.95)
    return Metric(value, (low, high), len(counts))


def ratio_of_means(theirs: Sequence[Counts], ours: Sequence[Counts], *, level: float) -> Metric:
    """Mean length of one side over that of the other, prompts resampled in pairs."""
    both = [Counts(a.drafts, a.accepted, (b.drafts, b.accepted)) for a, b in zip(theirs, ours, strict=True)]
    value, low, high = _bootstrap(
        both, lambda sums: (1 + sums[:, 1] / sums[:, 0]) / (1 + sums[:, 3] / sums[:, 2]), level=level
    )
    return Metric(value, (low, high), len(both))


def _bootstrap(
    counts: Sequence[Counts], figure: Callable[[np.ndarray], np.ndarray], *, level: float, num_resamples: int = 10_000
) -> tuple[float, float, float]:
    """A figure of sums (n, columns) of drafts, accepted and what else stands in per_position, with its interval."""
    columns = np.array([[c.drafts, c.accepted, *c.per_position] for c in counts], dtype=np.float64)  # (P, columns)
    num = len(columns)
    weights = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), size=num_resamples)  # (n, P)
    low, high = np.quantile(figure(weights @ columns), [(1 - level) / 2, (1 + level) / 2])
    return float(figure(columns.sum(0, keepdims=True))[0]), float(low), float(high)
