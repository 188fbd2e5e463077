"""Exported drafts in vLLM against our own loop: `make serve-check`, in vLLM's own environment (`make setup-vllm`).

Without `run`, on drafts that are over-fitted for the purpose (train/serve_drafts.py), greedily, K = 3:
1. our loop's counts: drafts, accepted, accepted at each position
2. train.export writes each draft for vLLM; one engine a draft decodes the same prompts
3. counts and texts must be equal, except where a near tie is named (`judge`)
4. an EAGLE-3 head read one block too late must *not* give those counts, or the check would see nothing
5. the OpenAI-compatible server answers a chat, with the EAGLE-3 head and without
With `run=NAME`: that run's draft on `prompts=FILE` or decode.sets, in every method and temperature of `decode`:
1 + accepted / drafts must be that of our loop, within 2 % greedily and within chance above T = 0.
Something unequal beyond these rules is named, and the exit code is 1.
"""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from eval.decode import check_decode, methods_at, prompt_seed
from eval.drafters import check_shape
from eval.entry import entry
from eval.loop import DecodeResult, speculative_decode
from eval.measures import Method
from eval.prompts import Prompt, load_prompts, prompts_fingerprint, read_prompt_file
from eval.report import print_table
from eval.results import Metric, make_header, merge_results, write_atomic
from eval.run import Pair, draft_fingerprint, load_for, load_pair, needs_draft
from eval.tree import TreeShape
from models.errors import UserError
from models.medusa import MedusaHeads
from models.servable import kind_of
from models.target import Target
from train.export import export_run
from train.serve_drafts import KINDS, Answer, over_fitted, own_answers
from train.serve_rules import Judged, compare, judge, narrowest_draft_gap, text_difference
from train.serving import (
    Counts,
    Draft,
    Served,
    chat,
    check_installed,
    generate,
    openai_server,
    server_counts,
    target_folder,
)

DRAFT_LEN = 3
MIN_POSITIONS = 1024  # of an engine's longest text


# --- over-fitted drafts ------------------------------------------------------------------------------------------


def check_over_fitted(
    cfg: DictConfig, overrides: Sequence[str], *, kinds: Sequence[str] = tuple(KINDS)
) -> tuple[list[str], dict[str, Metric]]:
    """Lines of what failed, and the figures; a table and what was noticed are printed."""
    target = load_tapped(cfg)
    dtype = str(target.dtype).removeprefix("torch.")
    folder = Path(cfg.output_root).resolve() / "serve-check" / f"{Path(target.name).name}-{dtype}"
    answers = own_answers(target, folder, overwrite=cfg.overwrite)
    prompts, max_new_tokens = [answer.prompt for answer in answers], max(len(a.token_ids) for a in answers)
    of_the_target = [o for o in overrides if o.lstrip("+").split("=")[0].split(".")[0] in ("target", "dtype", "device")]
    model = target_folder(target, folder / "target")
    engine = engine_options(target, prompts, max_new_tokens, model=model, logs=folder)
    options = {"method": f"chain_k{DRAFT_LEN}", "max_new_tokens": max_new_tokens}
    judged: dict[str, Judged] = {}
    fingerprints: dict[str, str] = {}
    ours, drafts, served = {}, {}, {}
    for kind in kinds:
        run = over_fitted(kind, target, answers, folder, of_the_target, overwrite=cfg.overwrite)
        draft = load_for(target, run)
        fingerprints |= {f"{kind}_weights": draft_fingerprint(draft)["draft_weights"]}
        drafts[kind] = Draft(export_for_vllm(run, folder / "exports" / kind, of_the_target), kind_of(draft), DRAFT_LEN)
        ours[kind] = [speculative_decode(target, draft, prompt.token_ids, **options) for prompt in prompts]
        served[kind] = engine(kind, drafts[kind])
        judged[kind] = judge(
            kind,
            target,
            prompts,
            ours[kind],
            served[kind],
            draft_len=DRAFT_LEN,
            draft_gap=lambda prompt, draft=draft: narrowest_draft_gap(target, draft, prompt, **options),
        )
        print(f"serve-check: {kind}: ours {judged[kind].ours}, vLLM {judged[kind].served}: {judged[kind].verdict}")
    failures = [line for each in judged.values() for line in each.failures]
    rows = [(kind, str(each.ours), str(each.served), each.verdict) for kind, each in judged.items()]
    if "eagle3" in kinds:
        shifted = shifted_taps(drafts["eagle3"], target, folder / "exports" / "eagle3-shifted")
        counts = reduce(add, (each.counts for each in engine("eagle3-shifted", shifted)))
        unshifted = reduce(add, (each.counts for each in served["eagle3"]))
        is_seen = counts.drafts > unshifted.drafts + 1  # more than a near tie explains
        rows.append(("eagle3, taps one block late", "", str(counts), "told apart" if is_seen else "NOT TOLD APART"))
        if not is_seen:
            failures.append(f"eagle3: taps one block late give {counts}, in place {unshifted}: the check sees nothing")
        server = judge_server(model, target, answers[0], drafts["eagle3"], ours["eagle3"][0], logs=folder)
        rows.append(("server, eagle3, one chat", str(server.ours), str(server.served), server.verdict))
        failures += server.failures
        judged["server"] = server
    print_table(
        f"Over-fitted drafts, greedy, K = {DRAFT_LEN}: {len(prompts)} prompts x {max_new_tokens} tokens, {dtype}",
        ("draft", "our loop", "vLLM", ""),
        rows,
    )
    for line in (line for each in judged.values() for line in each.notes):
        print(f"near tie: {line}")
    metrics = {
        f"{name}/{side}/{field}": Metric(value, n=len(prompts) if name != "server" else 1)
        for name, each in judged.items()
        for side, counts in (("ours", each.ours), ("vllm", each.served))
        for field, value in figures(counts).items()
    }
    metrics["failures"] = Metric(len(failures))
    header = make_header(
        device=target.device,
        dtype=target.dtype,
        target={"name": target.name, **target.fingerprint()},
        draft={"name": "over-fitted drafts", **fingerprints},
        data={"prompts": prompts_fingerprint(prompts)},
    )
    print(merge_results(folder.parent / "results.json", header, metrics, overwrite=True))
    return failures, metrics


def figures(counts: Counts) -> dict[str, float]:
    positions = {f"accepted_at/p{i}": n for i, n in enumerate(counts.per_position, start=1)}
    return {"drafts": counts.drafts, "accepted": counts.accepted, **positions, "mean_length": counts.mean_length}


def load_tapped(cfg: DictConfig) -> Target:
    return instantiate(cfg.target, tap_ids=cfg.target.tap_ids or "default")


def export_for_vllm(run: Path, out: Path, overrides: Sequence[str] = ()) -> Path:
    """The run's draft as `python -m train.export run=... to=vllm` writes it."""
    places = [f"run={run}", f"out={out}", f"checkpoint_root={run.parent}", "to=vllm", "overwrite=true"]
    return export_run(compose("export", overrides=[*overrides, *places]))


def shifted_taps(draft: Draft, target: Target, out: Path) -> Draft:
    """The same head, its config naming the blocks behind the ones it was trained on."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(draft.folder, out)
    config = json.loads((out / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [tap_id + 1 for tap_id in target.tap_ids]
    (out / "config.json").write_text(json.dumps(config))
    return Draft(out, draft.kind, draft.draft_len)


def engine_options(
    target: Target, prompts: Sequence[Prompt], max_new_tokens: int, *, model: str, logs: Path
) -> Callable[..., list[Served]]:
    """A function (name of the log, draft, further options of `generate`) -> texts of these prompts."""

    def engine(name: str, draft: Draft | None, **options: Any) -> list[Served]:
        print(f"serve-check: vLLM, {name}", flush=True)
        return generate(
            model,
            [prompt.token_ids for prompt in prompts],
            dtype=target.dtype,
            max_model_len=longest_text(target, prompts, max_new_tokens),
            draft=draft,
            max_new_tokens=max_new_tokens,
            stop_ids=target.eos_token_ids,
            log=logs / "logs" / f"{name.replace('/', '-')}.log",
            **options,
        )

    return engine


def longest_text(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    needed = max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens + 1
    return min(target.max_positions, max(needed, MIN_POSITIONS))


def judge_server(model: str, target: Target, answer: Answer, draft: Draft, ours: DecodeResult, *, logs: Path) -> Judged:
    """One chat, answered with the draft and without: the same text (or a near tie), and our loop's counts."""
    messages = [{"role": "user", "content": answer.prompt.text}]
    max_tokens = len(answer.token_ids)
    options = {"dtype": target.dtype, "max_model_len": longest_text(target, [answer.prompt], max_tokens)}
    print("serve-check: vLLM's server, without a draft and with one", flush=True)
    with openai_server(model, log=logs / "logs" / "server-plain.log", **options) as url:
        plain_text, plain_ids = chat(url, messages, max_tokens=max_tokens)
    with openai_server(model, draft=draft, log=logs / "logs" / "server.log", **options) as url:
        text, ids = chat(url, messages, max_tokens=max_tokens)
        counts = server_counts(url, draft.draft_len)
    own, notes, failures = Counts.of(ours, draft.draft_len), [], []
    for other, its_ids in (("without a draft", plain_ids), ("by our own loop", ours.token_ids)):
        difference = text_difference(target, answer.prompt, its_ids, ids)
        if difference is not None:
            line = (
                f"server: the text parts from that {other} at token {difference.index}, top-2 gap of the target "
                f"{difference.gap:.3f}"
            )
            (failures if difference.is_failure else notes).append(line)
    if ids == plain_ids and text != plain_text:
        failures.append(f"server: the same ids read {text!r} with the draft and {plain_text!r} without")
    if ids == ours.token_ids and counts != own:
        failures.append(f"server: its counters say {counts}, our loop {own}")
    return Judged(own, counts, notes, failures)


# --- a run -------------------------------------------------------------------------------------------------------


def check_run(cfg: DictConfig, overrides: Sequence[str]) -> tuple[list[str], dict[str, Metric]]:
    """As `check_over_fitted`, for the draft of a run on real prompts; figures go into outputs/<run>/results.json."""
    decode = OmegaConf.to_container(cfg.decode, resolve=True)
    check_settings(decode)
    needs_draft(cfg, overrides, "the serving check")
    pair = load_pair(cfg, overrides)
    target, draft = pair.target, pair.draft
    check_vllm_drafts(draft, target, decode, draft_len=cfg.export.draft_len)
    prompts = prompts_of(cfg, target)
    out = Path(cfg.output_root).resolve() / pair.name
    exported = out / "served" / "export"
    groups = ("target", "dtype", "device", "export")
    of_the_export = [o for o in overrides if o.lstrip("+").split("=")[0].split(".")[0] in groups]
    folder = Path(cfg.draft.id) if pair.run is None else export_for_vllm(pair.run.folder, exported, of_the_export)
    model = target_folder(target, out / "served" / "target")
    engine = engine_options(target, prompts, decode["max_new_tokens"], model=model, logs=out / "served")
    failures, notes, rows, metrics, counts = [], [], [], {}, {}
    for temperature in decode["temperatures"]:
        for method in methods_at(temperature, decode["methods"], decode["draft_sampling"]):
            ours = decoded(target, draft, prompts, method, decode)
            as_vllm = Draft(folder, kind_of(draft), method.shape.depth, method.draft_sampling)
            if temperature == 0:
                as_vllm = Draft(folder, kind_of(draft), method.shape.depth)
            served = engine(method.key, as_vllm, temperature=temperature, seed=decode["seed"])
            compared, lines, failed = compare(method, target, prompts, ours, served)
            metrics |= compared
            notes += lines
            failures += failed
            where = f"all/{method.key}"
            row = [compared[f"served/{name}/{where}"] for name in ("tau_ours", "tau_vllm", "ratio")]
            rows.append((method.key, *map(str, row), "UNEQUAL" if failed else "agrees"))
            counts[method.key] = [
                {"prompt": f"{p.set_name}/{p.prompt_id}", "ours": asdict(o), "vllm": asdict(s.counts)}
                for p, o, s in zip(prompts, (Counts.of(r, method.shape.depth) for r in ours), served)
            ]
    print_table(
        f"{pair.draft_name} for {target.name} in vLLM: 1 + accepted / drafts [95 % interval], {len(prompts)} prompts",
        ("method", "our loop", "vLLM", "vLLM / ours", ""),
        rows,
    )
    for line in notes:
        print(line)
    print(write_run_results(pair, prompts, metrics, counts, out))
    return failures, metrics


def decoded(
    target: Target, draft: nn.Module, prompts: Sequence[Prompt], method: Method, decode: Mapping[str, Any]
) -> list[DecodeResult]:
    print(f"serve-check: our loop, {method.key}", flush=True)
    return [
        speculative_decode(
            target,
            draft,
            prompt.token_ids,
            method=method.shape,
            temperature=method.temperature,
            draft_sampling=method.draft_sampling,
            max_new_tokens=decode["max_new_tokens"],
            seed=prompt_seed(prompt, decode["seed"]),
        )
        for prompt in prompts
    ]


def prompts_of(cfg: DictConfig, target: Target) -> list[Prompt]:
    """The first decode.num_prompts of the file `prompts`, or of each of decode.sets."""
    if cfg.prompts is None:
        prompts = load_prompts(cfg.decode.sets, target.tokenizer, num_prompts=cfg.decode.num_prompts)
    else:
        prompts = read_prompt_file(cfg.prompts, target.tokenizer)[: cfg.decode.num_prompts]
    room = target.max_positions - cfg.decode.max_new_tokens
    if too_long := [prompt for prompt in prompts if len(prompt.token_ids) >= room]:
        print(f"serve-check: {len(too_long)} of {len(prompts)} prompts left out, too long for the target's positions")
    prompts = [prompt for prompt in prompts if len(prompt.token_ids) < room]
    if not prompts:
        raise UserError(
            f"prompts={cfg.prompts}: every prompt is too long for the target's {target.max_positions} tokens"
        )
    return prompts


def check_settings(decode: Mapping[str, Any]) -> None:
    """Raises UserError for what vLLM does not do, or does in a way of its own."""
    check_decode(decode)
    for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if decode[key] != off:
            raise UserError(f"decode.{key}={decode[key]}: vLLM filters the target alone; leave it at {off}")
    if decode["fallback"] != "never":
        raise UserError(f"decode.fallback={decode['fallback']}: vLLM drafts in every round; leave it at never")
    for name in decode["methods"]:
        if not name.startswith("chain_"):
            raise UserError(f"decode.methods={list(decode['methods'])}: vLLM drafts chains; leave {name} out")


def check_vllm_drafts(draft: nn.Module, target: Target, decode: Mapping[str, Any], *, draft_len: int) -> None:
    """Raises UserError for methods that the draft has not, and for what vLLM does not do with Medusa heads: each head
    of the export drafts one token, its best."""
    for name in decode["methods"]:
        check_shape(draft, shape := TreeShape.parse(name), vocab_size=target.vocab_size)
        if isinstance(draft, MedusaHeads) and shape.depth != draft_len:
            raise UserError(
                f"decode.methods={list(decode['methods'])}: vLLM drafts one token a Medusa head, and the export has "
                f"{draft_len} of them; use [chain_k{draft_len}]"
            )
    sampling = list(decode["draft_sampling"])
    if isinstance(draft, MedusaHeads) and any(decode["temperatures"]) and sampling != ["greedy"]:
        raise UserError(f"decode.draft_sampling={sampling}: vLLM takes the best token of a Medusa head; use [greedy]")


def write_run_results(
    pair: Pair, prompts: Sequence[Prompt], metrics: Mapping[str, Metric], counts: Mapping[str, Any], out: Path
) -> Path:
    header = pair.header(served_prompts=prompts_fingerprint(prompts))
    write_atomic(out / "served" / "counts.json", json.dumps(counts, indent=1) + "\n")
    return merge_results(out / "results.json", header, metrics)


@entry("serve_check")
def main(cfg: DictConfig) -> None:
    overrides = HydraConfig.get().overrides.task
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines end with this process
    is_pair = bool(cfg.run) or any(override.startswith("draft") for override in overrides)
    check_installed()
    failures, _ = check_run(cfg, overrides) if is_pair else check_over_fitted(cfg, overrides)
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
