"""The speculative loop against plain decoding: python -m eval.decode [run=NAME | draft=hf draft.id=...]

1. first turns of the benchmark sets, in the target's chat template
2. per prompt and temperature: plain and speculative decoding in turn (the order alternates), after a warm-up
3. at temperature 0 both texts are compared; in bf16 near ties may differ, anything else is a failure and said so
4. figures with intervals -> results.json; counts per prompt -> decode.json; marked texts -> generations.txt
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
from transformers import PreTrainedModel

from data.progress import ProgressBar
from eval.entry import entry
from eval.loop import DecodeResult, check_vocabulary, speculative_decode
from eval.measures import Trial, accepted_histogram, decode_metrics
from eval.prompts import Prompt, load_prompts, prompts_fingerprint
from eval.report import print_table
from eval.results import Metric, make_header, merge_results, write_atomic
from eval.run import Pair, load_pair
from eval.text_view import text_view
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target

NEAR_TIE = 0.5  # logits: bf16 values of 16 to 32 are 0.125 apart, and gaps up to 0.5 were seen to flip
NEAR_TIE_FP32 = 1e-3

TrialKey = tuple[float, str]  # temperature, method: (0.0, "chain_k4")


@dataclass(frozen=True)
class Difference:
    """Where greedy texts of one prompt part, and how close the target's two best tokens are there."""

    prompt: str
    index: int  # of the emitted token
    gap: float  # best logit minus the second, of the target reading the text so far at once
    is_failure: bool


@torch.inference_mode()
def first_difference(target: Target, prompt: Prompt, plain: Sequence[int], ours: Sequence[int]) -> Difference | None:
    """None where the texts are equal. Differing is allowed between the target's two best tokens in a near tie only."""
    index = next((i for i, pair in enumerate(zip(plain, ours)) if pair[0] != pair[1]), None)
    if index is None:
        assert len(plain) == len(ours), "a text ended without differing"
        return None
    input_ids = torch.tensor([[*prompt.token_ids, *plain[:index]]], device=target.device)
    logits = target.logits(target.states(input_ids).final_hidden[0, -1]).float()  # (V,)
    best, second = logits.topk(2).values.tolist()
    in_top_two = min(logits[plain[index]].item(), logits[ours[index]].item()) >= second
    limit = NEAR_TIE_FP32 if target.dtype == torch.float32 else NEAR_TIE
    is_failure = best - second > limit or not in_top_two
    return Difference(f"{prompt.set_name}/{prompt.prompt_id}", index, best - second, is_failure)


def prompt_seed(prompt: Prompt, seed: int) -> int:
    """A seed of the prompt's own: the order of prompts changes nothing."""
    return zlib.crc32(f"{prompt.set_name}/{prompt.prompt_id}/{seed}".encode())


def method_name(
    draft_len: int, draft_sampling: str, temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> str:
    """chain_k4, chain_k4_greedy_draft, chain_k4_top_p0.9: what changes the figures of a set and temperature. Filtered
    figures never take the place of unfiltered ones; greedy decoding is the same under every filter."""
    name = f"chain_k{draft_len}"
    if temperature == 0:
        return name
    name += "_greedy_draft" if draft_sampling == "greedy" else ""
    name += f"_top_k{top_k}" if top_k else ""
    name += f"_top_p{top_p:g}" if top_p < 1 else ""
    return name + (f"_min_p{min_p:g}" if min_p else "")


def decode_trials(
    target: Target,
    draft: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    draft_len: int,
    temperatures: Sequence[float],
    draft_sampling: Sequence[str] = ("probabilistic",),
    max_new_tokens: int = 96,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> dict[TrialKey, list[Trial]]:
    """Decode every prompt plainly and by each method, interleaved. draft_len is fixed: no early stop, no schedule."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "draft_len": draft_len}
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature in temperatures:
        warm = options | filters | {"temperature": temperature, "max_new_tokens": min(8, max_new_tokens)}
        for model in (None, draft):
            speculative_decode(target, model, prompts[0].token_ids, **warm)
    trials: dict[TrialKey, list[Trial]] = defaultdict(list)
    kinds = {t: list(draft_sampling) if t > 0 else list(draft_sampling)[:1] for t in temperatures}
    total = len(prompts) * sum(1 + len(k) for k in kinds.values())
    with ProgressBar("decoding", total, "texts") as bar:
        for number, prompt in enumerate(prompts):
            for temperature in temperatures:
                runs: list[str | None] = [None, *kinds[temperature]]
                results: dict[str | None, DecodeResult] = {}
                for kind in runs if number % 2 == 0 else reversed(runs):
                    results[kind] = speculative_decode(
                        target,
                        None if kind is None else draft,
                        prompt.token_ids,
                        temperature=temperature,
                        draft_sampling=kind or "probabilistic",
                        seed=prompt_seed(prompt, seed),
                        **options,
                        **filters,
                    )
                    bar.advance(1)
                for kind in kinds[temperature]:
                    trial = Trial(prompt.set_name, prompt.prompt_id, results[None], results[kind])
                    trials[temperature, method_name(draft_len, kind, temperature, **filters)].append(trial)
    return dict(trials)


def all_metrics(
    trials: Mapping[TrialKey, Sequence[Trial]], differences: Sequence[Difference], *, draft_len: int
) -> dict[str, Metric]:
    """Figures of every set and of all sets together, `tau/mt_bench/T0/chain_k4`."""
    metrics: dict[str, Metric] = {}
    for (temperature, method), of_method in trials.items():
        sets = list(dict.fromkeys(trial.set_name for trial in of_method))
        for name in [*sets, "all"] if len(sets) > 1 else sets:
            chosen = [t for t in of_method if name in (t.set_name, "all")]
            where = f"{name}/T{temperature:g}/{method}"
            metrics |= decode_metrics(chosen, draft_len=draft_len, suffix=where)
            if temperature == 0:
                parted = [d for d in differences if name in (d.prompt.split("/")[0], "all")]
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
    """Evaluate a pair by the keys of conf/decode, print a table and texts, write results.json, decode.json and
    generations.txt into `output_root/<name>/`, and return the figures.

    Raises UserError for bad settings and unknown sets.
    """
    options = dict(decode)
    sets, num_prompts = options.pop("sets"), options.pop("num_prompts")
    target, draft = pair.target, pair.draft
    check_decode(options)
    check_vocabulary(target, draft)
    prompts = load_prompts(sets, target.tokenizer, num_prompts=num_prompts)
    too_long = [p for p in prompts if len(p.token_ids) >= target.max_positions]
    if too_long:
        print(f"decode: {len(too_long)} of {len(prompts)} prompts left out, longer than the target's positions")
        prompts = [p for p in prompts if len(p.token_ids) < target.max_positions]
        if not prompts:
            raise UserError(f"decode.sets={list(sets)}: every prompt is longer than {target.max_positions} tokens")
    trials = decode_trials(target, draft, prompts, **options)
    differences = [
        difference
        for (temperature, _), of_method in trials.items()
        if temperature == 0
        for prompt, trial in zip(prompts, of_method)
        if (difference := first_difference(target, prompt, trial.plain.token_ids, trial.ours.token_ids))
    ]
    draft_len = options["draft_len"]
    metrics = all_metrics(trials, differences, draft_len=draft_len)

    folder = Path(output_root) / pair.name
    header = make_header(
        device=target.device,
        dtype=target.dtype,
        target=pair.target_fingerprint,
        draft=pair.draft_fingerprint,
        data={"prompts": prompts_fingerprint(prompts)},
    )
    merge_results(folder / "results.json", header, metrics, overwrite=overwrite)
    write_atomic(folder / "decode.json", json.dumps(_counts(decode, trials, differences, draft_len), indent=1) + "\n")
    view = text_view(target.tokenizer, prompts, trials)
    write_atomic(folder / "generations.txt", view.full)
    print(view.short)
    print_decode_table(pair.draft_name, target.name, trials, metrics)
    _print_differences(differences, len(prompts))
    fallback = sum(trial.ours.fallback_steps for of_method in trials.values() for trial in of_method)
    if fallback:
        print(f"decode: {fallback} plain steps where the draft's or the target's positions ran out (not in alpha)")
    for name in ("results.json", "decode.json", "generations.txt"):
        print(folder / name)
    return metrics


def check_decode(options: Mapping[str, Any]) -> None:
    """Raises UserError, naming the key, before anything is decoded."""
    known = {"draft_len", "temperatures", "draft_sampling", "max_new_tokens", "top_k", "top_p", "min_p", "seed"}
    for key in options:
        if key not in known:
            raise UserError(f"decode.{key}: unknown key; use {', '.join(sorted(known))}")
    for key in ("temperatures", "draft_sampling"):
        if isinstance(options[key], str | int | float) or not options[key]:
            raise UserError(f"decode.{key}={options[key]}: give a list, for example [{options[key] or ''}]")
    for temperature in options["temperatures"]:
        SamplingParams.of(temperature=temperature, **{key: options[key] for key in ("top_k", "top_p", "min_p")})
    for kind in options["draft_sampling"]:
        if kind not in ("probabilistic", "greedy"):
            raise UserError(f"decode.draft_sampling={kind}: unknown; use probabilistic or greedy")
    for key in ("draft_len", "max_new_tokens"):
        if options[key] < 1:
            raise UserError(f"decode.{key}={options[key]}: must be 1 or more")


def print_decode_table(
    draft_name: str, target_name: str, trials: Mapping[TrialKey, Sequence[Trial]], metrics: Mapping[str, Metric]
) -> None:
    rows = []
    suffixes = [key.removeprefix("tau/") for key in metrics if key.startswith("tau/")]
    for suffix in suffixes:

        def show(name: str, suffix: str = suffix) -> str:
            return str(metrics.get(f"{name}/{suffix}", "-"))

        speedup = metrics[f"speedup/{suffix}"]
        verdict = f"{speedup} slower" if speedup.value < 1 else str(speedup)
        rates = [f"{metrics[f'{kind}_tokens_per_s/{suffix}'].value:.1f}" for kind in ("plain", "spec")]
        predicted = metrics.get(f"predicted_speedup/{suffix}")
        predicted_text = "-" if predicted is None else f"{predicted.value:.2f}"
        rows.append((suffix, show("alpha"), show("tau"), *rates, verdict, predicted_text))
    print_table(
        f"Decoding {target_name} with {draft_name}: figures [95 % interval over prompts]",
        ("set / temperature / method", "alpha", "tau", "plain tok/s", "spec tok/s", "speed-up", "predicted"),
        rows,
    )


def _print_differences(differences: Sequence[Difference], num_prompts: int) -> None:
    near_ties = [d for d in differences if not d.is_failure]
    if near_ties:
        widest = max(near_ties, key=lambda d: d.gap)
        print(
            f"greedy texts: {len(near_ties)} of {num_prompts} prompts part from plain decoding at a near tie; "
            f"the widest top-2 gap of the target is {widest.gap:.3f}, {widest.prompt} token {widest.index}"
        )
    failures = [d for d in differences if d.is_failure]
    for d in failures:
        print(f"FAILURE: greedy texts differ: {d.prompt}, token {d.index}, top-2 gap of the target {d.gap:.3f}")
    if failures:
        print(f"!!! {len(failures)} of {num_prompts} prompts: greedy text is NOT the target's; this is a defect !!!")


def _counts(
    settings: Mapping[str, Any],
    trials: Mapping[TrialKey, Sequence[Trial]],
    differences: Sequence[Difference],
    draft_len: int,
) -> dict[str, Any]:
    """What decode.json holds: settings, histograms of accepted lengths, counts and seconds per prompt."""
    methods = {}
    for (temperature, method), of_method in trials.items():
        sets = dict.fromkeys(trial.set_name for trial in of_method)
        methods[f"T{temperature:g}/{method}"] = {
            "accepted_histogram": {
                name: accepted_histogram([t for t in of_method if t.set_name == name], draft_len=draft_len)
                for name in sets
            },
            "prompts": [
                {
                    "prompt": f"{t.set_name}/{t.prompt_id}",
                    "rounds": [[r.drafted, r.judged, r.accepted, r.accepted_uncut] for r in t.ours.rounds],
                    "plain": _summary(t.plain),
                    "speculative": _summary(t.ours),
                }
                for t in of_method
            ],
        }
    early_stop = {"confidence_threshold": None, "draft_len_schedule": "constant"}
    return {
        "settings": {**settings, **early_stop},
        "rounds": "[drafted, judged, accepted, accepted before EOS and length cuts]",
        "methods": methods,
        "greedy_differences": [asdict(d) for d in differences],
    }


def _summary(result: DecodeResult) -> dict[str, Any]:
    seconds = {f"{name}_s": getattr(result, f"{name}_s") for name in ("wall", "prefill", "target", "draft")}
    return {"token_ids": result.token_ids, "finish_reason": result.finish_reason, **seconds}


@entry("decode")
def main(cfg: DictConfig) -> None:
    decode = OmegaConf.to_container(cfg.decode, resolve=True)
    pair = load_pair(cfg, HydraConfig.get().overrides.task)
    decode_pair(pair, decode, output_root=cfg.output_root, overwrite=cfg.overwrite)


if __name__ == "__main__":
    main()
