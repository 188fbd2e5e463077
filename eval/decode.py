"""The speculative loop against plain decoding: python -m eval.decode [run=NAME | draft=hf draft.id=... | draft=none]

1. first turns of the benchmark sets, in the target's chat template
2. per prompt and temperature: plain decoding and every method in turn (the order alternates), after a warm-up
3. at temperature 0 texts are compared with the plain one; in bf16 near ties may differ, all else is a failure, and said
4. figures with intervals -> results.json, acceptance_by_depth.png; counts per prompt -> decode.json; marked texts ->
   generations.txt and generations.html; all of it on one page -> report.html
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import PreTrainedModel

from data.progress import ProgressBar
from eval.drafters import check_attention, masked_models
from eval.entry import entry
from eval.fallback import make_fallback
from eval.html_report import write_report
from eval.html_view import ROUNDS_DRAWN, html_view, shown_prompts
from eval.loop import DecodeResult, check_vocabulary, speculative_decode
from eval.measures import Method, Trial, accepted_histogram, decode_metrics
from eval.prompts import Prompt, load_prompts, prompts_fingerprint
from eval.report import DECODE_COLUMNS, decode_row, print_table, vocabulary_lines
from eval.results import Metric, check_place, merge_results, write_atomic
from eval.run import Pair, is_without_draft, load_pair
from eval.text_view import text_view
from eval.tree import TreeShape
from eval.wandb_media import log_to_wandb
from models.eagle import EagleHead
from models.errors import UserError
from models.medusa import MedusaHeads
from models.sampling import SamplingParams
from models.target import Target
from models.tiny import byte_tokenizer

NEAR_TIE = 0.5  # logits: bf16 values of 16 to 32 are 0.125 apart, and gaps up to 0.5 were seen to flip
NEAR_TIE_FP32 = 1e-3

Trials = dict[Method, list[Trial]]  # in the order of prompts
Differences = dict[Method, list["Difference"]]


@dataclass(frozen=True)
class Difference:
    """Where greedy texts of one prompt part, and how close to the target's best token both are there."""

    prompt: str
    index: int  # of the emitted token
    gap: float  # best logit minus that of the worse of the two tokens, of the target reading the text so far at once
    is_failure: bool


@torch.inference_mode()
def first_difference(target: Target, prompt: Prompt, plain: Sequence[int], ours: Sequence[int]) -> Difference | None:
    """None where the texts are equal. They may differ between tokens that nearly tie for the best only: mostly two, now
    and then three."""
    index = next((i for i, pair in enumerate(zip(plain, ours)) if pair[0] != pair[1]), None)
    if index is None:
        assert len(plain) == len(ours), "a text ended without differing"
        return None
    input_ids = torch.tensor([[*prompt.token_ids, *plain[:index]]], device=target.device)
    logits = target.logits(target.states(input_ids).final_hidden[0, -1]).float()  # (V,)
    gap = (logits.max() - logits[[plain[index], ours[index]]].min()).item()
    limit = NEAR_TIE_FP32 if target.dtype == torch.float32 else NEAR_TIE
    return Difference(f"{prompt.set_name}/{prompt.prompt_id}", index, gap, gap > limit)


def prompt_seed(prompt: Prompt, seed: int) -> int:
    """A seed of the prompt's own: the order of prompts changes nothing."""
    return zlib.crc32(f"{prompt.set_name}/{prompt.prompt_id}/{seed}".encode())


def method_name(
    method: str,
    draft_sampling: str,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    fallback: str = "never",
) -> str:
    """chain_k4, chain_k4_auto, chain_k4_greedy_draft, chain_k4_top_p0.9: what changes the figures of a set and
    temperature. Filtered figures never take the place of unfiltered ones; greedy decoding is the same under every
    filter."""
    method += "_auto" if fallback == "auto" else ""
    if temperature == 0:
        return method
    method += "_greedy_draft" if draft_sampling == "greedy" else ""
    method += f"_top_k{top_k}" if top_k else ""
    method += f"_top_p{top_p:g}" if top_p < 1 else ""
    return method + (f"_min_p{min_p:g}" if min_p else "")


def methods_at(
    temperature: float, methods: Sequence[str], draft_sampling: Sequence[str], **naming: Any
) -> list[Method]:
    """What is decoded at a temperature: above 0 a chain once for each way of drafting; a tree's tokens are certain."""
    found = []
    for shape in map(TreeShape.parse, methods):
        is_drawn = temperature > 0 and shape.kind == "chain"
        for kind in draft_sampling if is_drawn else ["probabilistic"]:
            found.append(Method(temperature, method_name(str(shape), kind, temperature, **naming), shape, kind))
    return found


def decode_trials(
    target: Target,
    draft: nn.Module | None,
    prompts: Sequence[Prompt],
    *,
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_sampling: Sequence[str] = ("probabilistic",),
    plain: bool = True,
    max_new_tokens: int = 96,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    fallback: str = "never",
    seed: int = 0,
) -> Trials:
    """Decode every prompt plainly and by each method, interleaved. Shapes are fixed: no early stop, no schedule.

    draft: methods that need none run without it; None where all are of that kind.
    plain: False leaves the plain runs out, and with them all that is compared with them.
    """
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}

    def run(prompt: Prompt, temperature: float, method: Method | None, length: int, num_trees: int) -> DecodeResult:
        of_method = {} if method is None else {"method": method.shape, "draft_sampling": method.draft_sampling}
        return speculative_decode(
            target,
            None if method is None else draft,
            prompt.token_ids,
            temperature=temperature,
            max_new_tokens=length,
            seed=prompt_seed(prompt, seed),
            record_trees=num_trees,
            fallback=fallback,
            **filters,
            **of_method,
        )

    runs: dict[float, list[Method | None]] = {
        t: [*([None] if plain else []), *methods_at(t, methods, draft_sampling, fallback=fallback, **filters)]
        for t in temperatures
    }
    for temperature, of_temperature in runs.items():
        for method in of_temperature:
            run(prompts[0], temperature, method, min(8, max_new_tokens), 0)
    shown = set(shown_prompts(prompts))
    trials: Trials = defaultdict(list)
    with ProgressBar("decoding", len(prompts) * sum(map(len, runs.values())), "texts") as bar:
        for number, prompt in enumerate(prompts):
            for temperature, of_temperature in runs.items():
                results: dict[Method | None, DecodeResult] = {}
                for method in of_temperature if number % 2 == 0 else reversed(of_temperature):
                    num_trees = ROUNDS_DRAWN if number in shown else 0
                    results[method] = run(prompt, temperature, method, max_new_tokens, num_trees)
                    bar.advance(1)
                plain_result = results.pop(None, None)
                draftable = plain_result and num_draftable(draft, plain_result.token_ids)
                for method in filter(None, of_temperature):
                    of_draft = draftable if method.shape.needs_draft else None
                    trial = Trial(prompt.set_name, prompt.prompt_id, plain_result, results[method], of_draft)
                    trials[method].append(trial)
    return dict(trials)


def num_draftable(draft: nn.Module | None, token_ids: Sequence[int]) -> int | None:
    """How many of these tokens a head's draft vocabulary holds; None for a draft model."""
    if not isinstance(draft, EagleHead | MedusaHeads):
        return None
    ids = torch.tensor(token_ids, device=draft.draft_vocab.device)
    return int(torch.isin(ids, draft.draft_vocab).sum())


def greedy_differences(target: Target, prompts: Sequence[Prompt], trials: Trials) -> Differences:
    """Where greedy texts part from the plain ones, for each method that was decoded beside plain runs."""
    return {
        method: [
            difference
            for prompt, trial in zip(prompts, of_method)
            if (difference := first_difference(target, prompt, trial.plain.token_ids, trial.ours.token_ids))
        ]
        for method, of_method in trials.items()
        if method.temperature == 0 and of_method[0].plain is not None
    }


def all_metrics(trials: Trials, differences: Differences) -> dict[str, Metric]:
    """Figures of every set and of all sets together, `tau/mt_bench/T0/chain_k4`."""
    metrics: dict[str, Metric] = {}
    for method, of_method in trials.items():
        sets = list(dict.fromkeys(trial.set_name for trial in of_method))
        for name in [*sets, "all"] if len(sets) > 1 else sets:
            chosen = [t for t in of_method if name in (t.set_name, "all")]
            where = f"{name}/{method.key}"
            metrics |= decode_metrics(chosen, shape=method.shape, suffix=where)
            if method in differences:
                parted = [d for d in differences[method] if name in (d.prompt.split("/")[0], "all")]
                counts = {
                    "greedy_differences": len(parted),
                    "greedy_failures": sum(d.is_failure for d in parted),
                    "greedy_gap_max": max((d.gap for d in parted), default=0.0),
                }
                metrics |= {f"{key}/{where}": Metric(value, None, len(chosen)) for key, value in counts.items()}
    return metrics


def decode_pair(
    pair: Pair, decode: Mapping[str, Any], *, output_root: str | Path, overwrite: bool = False
) -> dict[str, Metric]:
    """Evaluate a pair by the keys of conf/decode, print a table and texts, write the files of the module's first lines
    into `output_root/<name>/`, and return the figures.

    Raises UserError for bad settings and unknown sets.
    """
    check_decode(decode, has_draft=pair.draft is not None)
    options = dict(decode)
    sets, num_prompts = options.pop("sets"), options.pop("num_prompts")
    target, draft = pair.target, pair.draft
    if isinstance(draft, PreTrainedModel):
        check_vocabulary(target, draft)
    shapes = map(TreeShape.parse, decode["methods"])
    check_attention(masked_models(target, draft), shapes, key="decode.methods")
    prompts = load_prompts(sets, target.tokenizer, num_prompts=num_prompts)
    too_long = [p for p in prompts if len(p.token_ids) >= target.max_positions]
    if too_long:
        print(f"decode: {len(too_long)} of {len(prompts)} prompts left out, longer than the target's positions")
        prompts = [p for p in prompts if len(p.token_ids) < target.max_positions]
        if not prompts:
            raise UserError(f"decode.sets={list(sets)}: every prompt is longer than {target.max_positions} tokens")
    folder = Path(output_root) / pair.name
    header = pair.header(prompts=prompts_fingerprint(prompts))
    check_place(folder / "results.json", header, overwrite=overwrite)
    trials = decode_trials(target, draft, prompts, **options)
    differences = greedy_differences(target, prompts, trials)
    metrics = all_metrics(trials, differences)

    title = f"{pair.draft_name} for {target.name}"
    # of an earlier call's figures for a set, temperature and method nothing stays beside the new ones, and nothing over
    # all sets that it had
    measured = {key.removeprefix("fallback_steps") for key in metrics if key.startswith("fallback_steps/")}
    stale = tuple(measured | {f"/all/{key.split('/', 2)[2]}" for key in measured})  # /set/T0/chain_k4
    merge_results(
        folder / "results.json", header, metrics, is_stale=lambda key: key.endswith(stale), overwrite=overwrite
    )
    write_atomic(folder / "decode.json", json.dumps(_counts(decode, trials, differences), indent=1) + "\n")
    view = text_view(target.tokenizer, prompts, trials)
    write_atomic(folder / "generations.txt", view.full)
    write_atomic(folder / "generations.html", html_view(target.tokenizer, prompts, trials, title=title))
    written = [folder / name for name in ("results.json", "decode.json", "generations.txt", "generations.html")]
    written += write_report(folder, run_folder=pair.run and pair.run.owner)  # with the figures of earlier calls
    print(view.short)
    print_decode_table(title, metrics)
    for line in vocabulary_lines(metrics):
        print(line)
    if not options["plain"]:
        print(
            "decode: decode.plain=false, so no speed-up is measured and no greedy text compared with the target's own"
        )
    _print_differences(differences, len(prompts))
    fallback = sum(trial.ours.fallback_steps for of_method in trials.values() for trial in of_method)
    if fallback:
        print(f"decode: {fallback} plain steps where the draft's or the target's positions ran out (not in alpha)")
    paused = sum(trial.ours.paused_steps for of_method in trials.values() for trial in of_method)
    if paused:
        print(f"decode: {paused} plain steps by decode.fallback=auto (in tau, not in alpha)")
    for path in written:
        print(path)
    return metrics


def check_decode(decode: Mapping[str, Any], *, has_draft: bool = True) -> None:
    """Raises UserError, naming the key, before anything is loaded or decoded."""
    known = {
        "sets", "num_prompts", "methods", "temperatures", "draft_sampling", "plain", "max_new_tokens", "top_k", "top_p",
        "min_p", "fallback", "seed",
    }  # fmt: skip
    for key in decode:
        if key not in known:
            raise UserError(f"decode.{key}: unknown key; use {', '.join(sorted(known))}")
    for key in ("methods", "temperatures", "draft_sampling"):
        if isinstance(decode[key], str | int | float) or not decode[key]:
            raise UserError(f"decode.{key}={decode[key]}: give a list, for example [{decode[key] or ''}]")
    shapes = [str(TreeShape.parse(name)) for name in decode["methods"]]
    if needing := [name for name in shapes if TreeShape.parse(name).needs_draft and not has_draft]:
        raise UserError(
            f"decode.methods={list(decode['methods'])}: {needing[0]} needs a draft, and draft=none gives none; use "
            "methods such as ngram_n3_k5 and lookahead_w5_n3_g5"
        )
    if repeated := {name for name in shapes if shapes.count(name) > 1}:
        raise UserError(f"decode.methods={list(decode['methods'])}: {min(repeated)} stands there twice; leave one out")
    for temperature in decode["temperatures"]:
        SamplingParams.of(temperature=temperature, **{key: decode[key] for key in ("top_k", "top_p", "min_p")})
    for kind in decode["draft_sampling"]:
        if kind not in ("probabilistic", "greedy"):
            raise UserError(f"decode.draft_sampling={kind}: unknown; use probabilistic or greedy")
    make_fallback(decode["fallback"])
    if decode["max_new_tokens"] < 1:
        raise UserError(f"decode.max_new_tokens={decode['max_new_tokens']}: must be 1 or more")
    load_prompts(decode["sets"], byte_tokenizer(), num_prompts=decode["num_prompts"])


def print_decode_table(title: str, metrics: Mapping[str, Metric]) -> None:
    print_table(
        f"Decoding with {title}: figures [95 % interval over prompts]",
        ("set / temperature / method", *DECODE_COLUMNS),
        [
            (where, *decode_row(metrics, where))
            for where in (key.removeprefix("tau/") for key in metrics if key.startswith("tau/"))
        ],
    )


def _print_differences(differences: Differences, num_prompts: int) -> None:
    for method, of_method in differences.items():
        near_ties = [d for d in of_method if not d.is_failure]
        if near_ties:
            widest = max(near_ties, key=lambda d: d.gap)
            print(
                f"greedy texts, {method.name}: {len(near_ties)} of {num_prompts} prompts part from plain decoding at a "
                f"near tie; the widest gap of the target is {widest.gap:.3f}, {widest.prompt} token "
                f"{widest.index}"
            )
        failures = [d for d in of_method if d.is_failure]
        for d in failures:
            print(
                f"FAILURE: greedy texts differ: {method.name}, {d.prompt}, token {d.index}, {d.gap:.3f} below the "
                "target's best token"
            )
        if failures:
            print(
                f"!!! {method.name}: {len(failures)} of {num_prompts} prompts: greedy text is NOT the target's; "
                "this is a defect !!!"
            )


def _counts(settings: Mapping[str, Any], trials: Trials, differences: Differences) -> dict[str, Any]:
    """What decode.json holds: settings, histograms of accepted lengths, counts and seconds per prompt."""
    methods = {}
    for method, of_method in trials.items():
        sets = dict.fromkeys(trial.set_name for trial in of_method)
        methods[method.key] = {
            "accepted_histogram": {
                name: accepted_histogram([t for t in of_method if t.set_name == name], depth=method.shape.depth)
                for name in sets
            },
            "prompts": [
                {
                    "prompt": f"{t.set_name}/{t.prompt_id}",
                    "rounds": [[r.drafted, r.judged, r.accepted, r.accepted_uncut] for r in t.ours.rounds],
                    "plain": None if t.plain is None else _summary(t.plain),
                    "speculative": _summary(t.ours),
                }
                for t in of_method
            ],
        }
    early_stop = {"confidence_threshold": None, "draft_len_schedule": "constant"}
    return {
        "settings": {**settings, **early_stop},
        "rounds": "[drafted, depths judged, accepted, accepted before EOS and length cuts]",
        "methods": methods,
        "greedy_differences": {method.key: [asdict(d) for d in parted] for method, parted in differences.items()},
    }


def _summary(result: DecodeResult) -> dict[str, Any]:
    seconds = {f"{name}_s": getattr(result, f"{name}_s") for name in ("wall", "prefill", "target", "draft")}
    return {"token_ids": result.token_ids, "finish_reason": result.finish_reason, **seconds}


@entry("decode")
def main(cfg: DictConfig) -> None:
    decode = OmegaConf.to_container(cfg.decode, resolve=True)
    overrides = HydraConfig.get().overrides.task
    check_decode(decode, has_draft=not is_without_draft(cfg, overrides))
    pair = load_pair(cfg, overrides)
    decode_pair(pair, decode, output_root=cfg.output_root, overwrite=cfg.overwrite)
    log_to_wandb(cfg.logger, Path(cfg.output_root) / pair.name, run_folder=pair.run and pair.run.owner)


if __name__ == "__main__":
    main()
