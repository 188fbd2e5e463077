"""What `eval.compare` compares: the drafts of several runs on one target, and a row for each way of decoding.

plain                             this engine without a draft
eagle3/chain_k3                   a draft by its kind (by its run, where two are of one kind), and a method
ngram_n3_k5, lookahead_w5_n3_g5   no draft
generate                          Hugging Face's, without and with its own ways of drafting, K as in ours
generate/ngram_n3_k5
generate/assisted_k3/gpt2_30m
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import PreTrainedModel

from eval.drafters import check_shape
from eval.generate_baseline import assistant_for, generate_text, plain_model
from eval.loop import DecodeResult, speculative_decode
from eval.run import Run, check_vocabulary, find_run, load_for, load_run, run_config
from eval.tree import TreeShape
from models.errors import UserError
from models.sampling import SamplingParams
from models.servable import kind_of
from models.target import Target, check_tap_ids

# prompt ids, params, max_new_tokens, seed
DecodeText = Callable[[Sequence[int], SamplingParams, int, int], DecodeResult]


@dataclass(frozen=True)
class Entrant:
    """A draft, and the target as this draft reads it."""

    name: str  # of the run, or what an off-the-shelf draft was loaded from
    slug: str  # in keys: eagle3, eagle1, medusa, gpt2_30m
    label: str  # for people
    source: str
    tap_ids: Any  # of target.tap_ids
    target: Target
    draft: nn.Module


@dataclass(frozen=True)
class Row:
    key: str
    label: str  # of the draft, for people
    decode: DecodeText | None  # None: in batches only
    entrant: Entrant | None = None
    shape: TreeShape | None = None
    first_round_reads_prompt: bool = False  # assisted `generate` drafts before it has read the prompt

    @property
    def drafts_chains(self) -> bool:
        """Whether each depth has one token, so that accepted / judged is an alpha."""
        return self.shape is not None and self.shape.kind in ("chain", "ngram")


def is_generate(key: str) -> bool:
    """A row of transformers' generate; a draft may be called generate_1."""
    return re.fullmatch(r"generate(/(ngram|assisted)_.+)?", key) is not None


def is_batch(key: str) -> bool:
    """A row of batches: batch4/plain, batch4/eagle3/chain_k3; a draft may be called batch4."""
    return re.fullmatch(r"batch\d+/(plain|[^/]+/[^/]+)", key) is not None


def load_entrants(cfg: DictConfig, overrides: Sequence[str]) -> tuple[DictConfig, Target, list[Entrant]]:
    """The config and model of the target, and every draft: `compare.runs`, `run` (the newest without either), and
    `draft=hf draft.id=...` of the command line; with draft=none no draft at all.

    Raises UserError for a run that is not there, one given twice, and runs of different targets.
    """
    chosen = {override.split("=", 1)[0].lstrip("+") for override in overrides}
    has_draft = bool({"draft", "draft.id"} & chosen)
    runs = find_runs(cfg, default_to_newest=not has_draft)
    config = run_config(cfg, runs[0].folder, overrides) if runs else cfg
    check_same_target([(run, run_config(cfg, run.folder, overrides)) for run in runs])
    sources = [(run.name, str(run.folder), run_config(cfg, run.folder, overrides)) for run in runs]
    if has_draft and cfg.draft.get("id"):
        sources.append((str(cfg.draft.id), str(cfg.draft.id), config))
    elif has_draft and cfg.draft.kind != "none":
        raise UserError(
            "draft.id: not given; write draft=hf draft.id=NAME_OR_FOLDER, or draft=none for the target alone"
        )
    target: Target = instantiate(config.target)
    entrants = [
        load_entrant(target, name, source, OmegaConf.to_container(of_run.target, resolve=True).get("tap_ids"))
        for name, source, of_run in sources
    ]
    return config, target, unique_slugs(entrants)


def find_runs(cfg: DictConfig, *, default_to_newest: bool) -> list[Run]:
    names = list(cfg.compare.runs or [])
    folders = [find_run(name, cfg.checkpoint_root) for name in names]
    places = [folder.resolve() for folder in folders]
    if repeated := [name for name, place in zip(names, places) if places.count(place) > 1]:
        raise UserError(f"compare.runs={names}: {repeated[-1]} is there twice; leave one out")
    if cfg.run or (not names and default_to_newest):
        folder = find_run(cfg.run, cfg.checkpoint_root)
        if folder.resolve() not in places:
            folders.insert(0, folder)
    return [load_run(folder) for folder in folders]


def check_same_target(runs: Sequence[tuple[Run, DictConfig]]) -> None:
    """By what the targets were loaded from, or by the hashes of their weights in run.json."""
    for run, config in runs[1:]:
        first, first_config = runs[0]
        if all(config.target.get(key) == first_config.target.get(key) for key in ("source", "revision")):
            continue
        hashes = [
            {k: r.info.get("target", {}).get(k) for k in ("target_config", "target_weights")} for r in (first, run)
        ]
        if hashes[0] != hashes[1] or None in hashes[0].values():
            raise UserError(
                f"compare.runs: {first.name} is for target {first_config.target.source} and {run.name} for "
                f"{config.target.source}; give runs of one target"
            )


def load_entrant(target: Target, name: str, source: str, tap_ids: Any) -> Entrant:
    view = tapped(target, tap_ids)
    draft = load_for(view, source)
    if isinstance(draft, PreTrainedModel):
        check_vocabulary(target, draft, source)
    return Entrant(name, slug_of(draft), label_of(draft), source, tap_ids, view, draft)


def tapped(target: Target, tap_ids: Any) -> Target:
    """The same model with the taps of another run."""
    view = copy.copy(target)
    view.tap_ids = check_tap_ids(tap_ids, target.num_blocks)
    return view


def label_of(draft: nn.Module) -> str:
    """EAGLE-3, Medusa (4 heads), 30M GPT-2 draft."""
    kind = kind_of(draft)
    if kind == "medusa":
        return f"Medusa ({draft.config.num_heads} heads)"
    if kind != "draft_model":
        return kind.replace("eagle", "EAGLE-")
    return f"{millions(draft)}M {'GPT-2' if draft.config.model_type == 'gpt2' else draft.config.model_type} draft"


def slug_of(draft: nn.Module) -> str:
    kind = kind_of(draft)
    return kind if kind != "draft_model" else f"{draft.config.model_type}_{millions(draft)}m"


def millions(model: nn.Module) -> str:
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return f"{count:.0f}" if count >= 1 else f"{count:.1g}"


def unique_slugs(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Drafts of one kind are told apart by their names. Raises UserError where these are the same."""
    counts = Counter(entrant.slug for entrant in entrants)
    named = [
        replace(e, slug=Path(e.name).name, label=f"{e.label}, {Path(e.name).name}") if counts[e.slug] > 1 else e
        for e in entrants
    ]
    slugs = [entrant.slug for entrant in named]
    if repeated := [slug for slug in slugs if slugs.count(slug) > 1]:
        raise UserError(f"compare.runs: two drafts are called {repeated[0]}; rename the folder of one")
    return named


def make_rows(target: Target, entrants: Sequence[Entrant], shapes: Sequence[TreeShape], *, generate: bool) -> list[Row]:
    """All rows, plain first. Raises UserError for a method that one of the drafts cannot do."""
    rows = [Row("plain", "none", partial(_ours, target, None, None))]
    for entrant in entrants:
        for shape in shapes:
            if shape.needs_draft:
                check_can_draft(entrant, shape)
                decode = partial(_ours, entrant.target, entrant.draft, shape)
                rows.append(Row(f"{entrant.slug}/{shape}", entrant.label, decode, entrant, shape))
    without_draft = [shape for shape in shapes if not shape.needs_draft]
    rows += [Row(str(shape), "none", partial(_ours, target, None, shape), None, shape) for shape in without_draft]
    if not generate:
        return rows
    model, ends = plain_model(target), target.eos_token_ids
    rows.append(Row("generate", "none", partial(_theirs, model, ends, None, None)))
    for shape in without_draft:
        if shape.kind == "ngram":
            decode = partial(_theirs, model, ends, None, shape)
            rows.append(Row(f"generate/{shape}", "none", decode, None, shape, True))
    for entrant in entrants:
        for shape in shapes:
            if shape.kind == "chain" and isinstance(entrant.draft, PreTrainedModel):
                decode = partial(_theirs, model, ends, assistant_for(entrant.draft, target, shape.depth), None)
                key = f"generate/assisted_k{shape.depth}/{entrant.slug}"
                rows.append(Row(key, entrant.label, decode, entrant, shape, True))
    return rows


def _ours(
    target: Target,
    draft: nn.Module | None,
    shape: TreeShape | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    seed: int,
) -> DecodeResult:
    options = {"temperature": params.temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    return speculative_decode(target, draft, prompt_ids, method=shape, **options)


def _theirs(
    model: PreTrainedModel,
    eos_token_ids: Sequence[int],
    assistant: PreTrainedModel | None,
    lookup: TreeShape | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    seed: int,
) -> DecodeResult:
    options = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids, "seed": seed}
    return generate_text(model, prompt_ids, params=params, assistant=assistant, lookup=lookup, **options)


def check_can_draft(entrant: Entrant, shape: TreeShape) -> None:
    """Raises UserError, naming the draft, where it cannot grow such trees."""
    try:
        check_shape(entrant.draft, shape, vocab_size=entrant.target.vocab_size, key="compare.methods")
    except UserError as error:
        raise UserError(f"{error} ({entrant.name})") from None


def fingerprints(entrants: Sequence[Entrant], of: Callable[[nn.Module], Mapping[str, str]]) -> dict[str, str]:
    """For the header of the results: slug -> name and hash of the weights."""
    return {e.slug: f"{e.name} {of(e.draft)['draft_weights']}" for e in entrants}
