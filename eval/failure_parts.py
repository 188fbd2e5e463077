"""What is measured of failure modes: a function for each part, whose figures are keyed "speedup/chain_k3/0.25": figure,
method and place. Every part decodes its prompts plainly and by its methods, in turn; costs are in plain target steps.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import nn

from data.progress import ProgressBar
from eval.batched import BatchResult, speculative_decode_batch
from eval.decode import decode_trials, prompt_seed
from eval.failure_view import FIGURES
from eval.measures import Method, bootstrap_figure, decode_metrics
from eval.prompts import Prompt, load_prompts, load_prose
from eval.results import Metric
from eval.tree import TreeShape
from models.errors import UserError
from models.medusa import MedusaHeads
from models.target import Target

KINDS = {"code": "humaneval", "maths": "gsm8k", "chat": "mt_bench"}  # and prose

Settings = Mapping[str, Any]  # conf/failure
Figures = dict[str, Metric]


def by_temperature(target: Target, draft: nn.Module, settings: Settings) -> Figures:
    return _decoded(
        target,
        draft,
        load_prompts(settings["sets"], target.tokenizer, num_prompts=settings["num_prompts"]),
        settings,
        methods=fitting_methods(settings["methods"], draft),
        temperatures=settings["temperatures"],
        where=lambda method, kind: f"{method.shape}/{method.temperature:g}",
    )


def by_draft_len(target: Target, draft: nn.Module, settings: Settings) -> Figures:
    lengths = fitting_lengths(settings["draft_lens"], draft)
    prompts = load_prompts(settings["sets"], target.tokenizer, num_prompts=settings["num_prompts"])
    return _decoded(
        target,
        draft,
        prompts,
        settings,
        methods=[f"chain_k{length}" for length in lengths],
        where=lambda method, kind: f"chain/{method.shape.depth}",
    )


def by_kind(target: Target, draft: nn.Module, settings: Settings) -> Figures:
    return _decoded(
        target,
        draft,
        kind_prompts(target, settings),
        settings,
        methods=fitting_methods(settings["methods"], draft),
        where=lambda method, kind: f"{method.shape}/{kind}",
    )


def by_batch(target: Target, draft: nn.Module, settings: Settings) -> Figures:
    """The first chain against plain decoding, on the same prompts at every batch size; intervals over batches."""
    shapes = [TreeShape.parse(name) for name in fitting_methods(settings["methods"], draft)]
    shape = next(shape for shape in shapes if shape.kind == "chain")
    sizes, num_batches, length = settings["batch_sizes"], settings["num_batches"], settings["max_new_tokens"]
    count = max(sizes) * num_batches
    wanted = -(-count // len(settings["sets"]))
    prompts = mixed(_fitting(target, load_prompts(settings["sets"], target.tokenizer, num_prompts=wanted), length))
    count = min(count, len(prompts))
    # first prompt of each batch: all prompts once, or some again where they are too few for `num_batches`
    starts = {size: range(0, max(count, size * num_batches), size) for size in sizes}

    def run(batch: Sequence[Prompt], of: TreeShape | None, length: int) -> BatchResult:
        return speculative_decode_batch(
            target,
            None if of is None else draft,
            [prompt.token_ids for prompt in batch],
            method=of,
            max_new_tokens=length,
            seeds=[prompt_seed(prompt, settings["seed"]) for prompt in batch],
        )

    figures: Figures = {}
    with ProgressBar("batches", sum(map(len, starts.values())), "batches") as bar:
        for size in sizes:
            rows = []
            for of in (None, shape):
                run((prompts * size)[:size], of, min(8, length))
            for number, start in enumerate(starts[size]):
                batch = [prompts[(start + i) % count] for i in range(size)]
                found = {of: run(batch, of, length) for of in ((None, shape) if number % 2 == 0 else (shape, None))}
                rows.append(_batch_row(found[None], found[shape]))
                bar.advance(1)
            columns = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}
            for name, figure in _batch_figures().items():
                if (metric := bootstrap_figure(columns, figure, len(rows))) is not None:
                    figures[f"{name}/{shape}/{size}"] = metric
    return figures


def _batch_row(plain: BatchResult, ours: BatchResult) -> dict[str, float]:
    rounds = [r for result in ours.results for r in result.rounds]
    return {
        "tokens": ours.num_tokens,
        "in_rounds": ours.num_tokens - len(ours.results),
        "rounds": len(rounds),
        "accepted": sum(r.accepted for r in rounds),
        "judged": sum(r.judged for r in rounds),
        "seconds": ours.wall_s,
        "loop_seconds": ours.wall_s - ours.prefill_s,
        "overhead": ours.wall_s - ours.prefill_s - ours.target_s - ours.draft_forward_s,
        "forwards": ours.num_rounds,
        "target": ours.target_s,
        "draft": ours.draft_s,
        "plain_tokens": plain.num_tokens,
        "plain_seconds": plain.wall_s,
        "plain_forwards": plain.num_rounds,
        "plain_target": plain.target_s,
    }


def _batch_figures() -> dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]]:
    """As in eval.measures, with a round and a plain step of the whole batch."""

    def step(s: dict[str, np.ndarray]) -> np.ndarray:
        return s["plain_target"] / s["plain_forwards"]

    return {
        "speedup": lambda s: s["plain_seconds"] / s["plain_tokens"] / (s["seconds"] / s["tokens"]),
        "tau": lambda s: s["in_rounds"] / s["rounds"],
        "alpha": lambda s: s["accepted"] / s["judged"],
        "verify_cost": lambda s: s["target"] / s["forwards"] / step(s),
        "draft_cost": lambda s: s["draft"] / s["forwards"] / step(s),
        "plain_tokens_per_s": lambda s: s["plain_tokens"] / s["plain_seconds"],
        "spec_tokens_per_s": lambda s: s["tokens"] / s["seconds"],
        "loop_overhead": lambda s: s["overhead"] / s["loop_seconds"],
    }


def _decoded(
    target: Target,
    draft: nn.Module,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    methods: Sequence[str],
    where: Callable[[Method, str], str],
    temperatures: Sequence[float] = (0.0,),
) -> Figures:
    """Figures of every method at every place; where: (method, set of the prompt) -> "chain_k3/prose"."""
    length = settings["max_new_tokens"]
    trials = decode_trials(
        target,
        draft,
        _fitting(target, prompts, length),
        methods=methods,
        temperatures=temperatures,
        max_new_tokens=length,
        seed=settings["seed"],
    )
    figures: Figures = {}
    for method, of_method in trials.items():
        for name in dict.fromkeys(where(method, trial.set_name) for trial in of_method):
            chosen = [trial for trial in of_method if where(method, trial.set_name) == name]
            found = decode_metrics(chosen, shape=method.shape, suffix=name)
            figures |= {key: metric for key, metric in found.items() if key.split("/")[0] in FIGURES}
    return figures


def _fitting(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Prompt]:
    """Prompts that leave room for the answer. Raises UserError where none does."""
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) + max_new_tokens <= target.max_positions]
    if not fitting:
        raise UserError(
            f"failure.max_new_tokens={max_new_tokens}: no prompt leaves room for so many tokens in the target's "
            f"{target.max_positions} positions; use fewer"
        )
    return fitting


def fitting_methods(methods: Sequence[str], draft: nn.Module) -> list[str]:
    """The methods, no deeper than there are Medusa heads."""
    shapes = list(map(TreeShape.parse, methods))
    if isinstance(draft, MedusaHeads):
        shapes = [shape.cut(draft.config.num_heads) if shape.needs_draft else shape for shape in shapes]
    return list(dict.fromkeys(map(str, shapes)))


def fitting_lengths(lengths: Sequence[int], draft: nn.Module) -> list[int]:
    """Draft lengths, no longer than there are Medusa heads. Raises UserError where all are."""
    longest = draft.config.num_heads if isinstance(draft, MedusaHeads) else max(lengths)
    if fitting := [length for length in lengths if length <= longest]:
        return fitting
    raise UserError(f"failure.draft_lens={list(lengths)}: the draft has {longest} Medusa heads; add such a length")


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One prompt of each set in turn, so that every batch has of all."""
    by_set: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_set.setdefault(prompt.set_name, []).append(prompt)
    return [prompt for turn in zip_longest(*by_set.values()) for prompt in turn if prompt is not None]


def kind_prompts(target: Target, settings: Settings) -> list[Prompt]:
    """Prompts named by their kind."""
    count = settings["kind_prompts"]
    found = []
    for kind, set_name in KINDS.items():
        for prompt in load_prompts([set_name], target.tokenizer, num_prompts=count):
            found.append(Prompt(kind, prompt.prompt_id, prompt.text, prompt.token_ids))
    return found + load_prose(target.tokenizer, num_tokens=settings["prose_tokens"], num_prompts=count)


PARTS: dict[str, Callable[[Target, nn.Module, Settings], Figures]] = {
    "temperature": by_temperature,
    "draft_len": by_draft_len,
    "batch": by_batch,
    "kinds": by_kind,
}
