"""Which method to decode with, on this machine, for these prompts: python -m eval.tune [run=NAME] [tune.prompts=FILE]

1. plain answers to a few prompts of the workload
2. a profile of the machine: target forwards by their tokens, drafting by shape, the loop around both
3. acceptance: every draft replayed along those answers (eval/tune_replay.py); lookahead by short runs
4. the speed-up predicted for every chain, tree and n-gram length (eval/tune_predict.py)
5. the best of these measured on other prompts, plain decoding beside them
6. the choice, its break-even point and the engines' flags -> outputs/skill-speculative-tuning[-NAME].md and .json
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from eval.entry import entry
from eval.loop import speculative_decode
from eval.report import print_table
from eval.results import make_header, write_atomic
from eval.run import Pair, load_for, load_pair
from eval.skill_file import skill_text
from eval.tree import TreeShape
from eval.tune_predict import Candidate, Machine, Measured, Plain, choose, ranked, shortlist
from eval.tune_profile import DraftProfile, TargetProfile, loop_seconds
from eval.tune_steps import (
    Draft,
    Workload,
    answers,
    loop_profile,
    measure,
    predict_draft,
    predict_draftless,
    profile_machine,
)
from eval.tune_workload import read_workload
from models.errors import UserError
from models.servable import kind_of
from models.target import Target

SHOWN = 12  # predictions that are kept of a temperature, beside the best of each kind
# what the command that decodes with the choice does not take over from the one that tuned
NOT_OF_THE_PAIR = ("tune", "run=", "decode", "output_root", "overwrite", "logger", "hydra")


def load_pairs(cfg: DictConfig, overrides: Sequence[str]) -> dict[str, Pair]:
    """The drafts to choose from, by name, beside one target. Raises UserError where their targets differ."""
    if not cfg.tune.runs:
        pair = load_pair(cfg, overrides)
        return {pair.name: pair}
    if any(override.startswith("draft") for override in overrides):
        raise UserError(f"tune.runs={list(cfg.tune.runs)}: runs have their own drafts; leave out draft=, or tune.runs")
    if any(override.startswith("run=") for override in overrides):
        raise UserError(f"tune.runs={list(cfg.tune.runs)}: run={cfg.run} is given too; name it in tune.runs instead")
    pairs: dict[str, Pair] = {}
    for run in cfg.tune.runs:
        of_run = cfg.copy()
        with open_dict(of_run):
            of_run.run = run
        pair = load_pair(of_run, [*overrides, f"run={run}"])
        if pair.name in pairs:
            raise UserError(f"tune.runs={list(cfg.tune.runs)}: two of them are called {pair.name}; leave one out")
        if pairs:
            first = next(iter(pairs.values()))
            if pair.target.fingerprint() != first.target.fingerprint():
                raise UserError(
                    f"tune.runs: {run} is for {pair.target.name}, not for {first.target.name}; tune it alone"
                )
            if pair.config.target == first.config.target:  # one copy of the target in memory
                draft = load_for(first.target, pair.run.folder)
                pair = Pair(first.target, draft, pair.name, pair.draft_name, pair.config, pair.run)
        pairs[pair.name] = pair
    return pairs


def tune(pairs: Mapping[str, Pair], settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What the skill file is made of: plain values, as JSON holds them. overrides: of the command line."""
    first = next(iter(pairs.values()))
    target, temperatures = first.target, settings["temperatures"]
    drafts = {
        run: Draft.of(pair.draft, pair.target, settings["max_chain"])
        for run, pair in pairs.items()
        if pair.draft is not None
    }
    room = min([target.max_positions, *(draft.max_positions for draft in drafts.values())])
    prompts = read_workload(
        settings["prompts"],
        target.tokenizer,
        limit=settings["num_profiled"] + settings["num_measured"],
        max_tokens=room - settings["max_new_tokens"] - settings["max_chain"] - 1,
    )
    if len(prompts) < 2:
        raise UserError(
            f"tune.prompts={settings['prompts']}: holds one prompt that fits; an interval takes two or more"
        )
    profiled, others = prompts[: settings["num_profiled"]], prompts[settings["num_profiled"] :]
    is_measured_anew = len(others) >= 2
    measured_prompts = others if is_measured_anew else prompts
    speculative_decode(target, None, profiled[0].token_ids, max_new_tokens=8)  # warm-up
    print(f"tune: plain answers to {len(profiled)} prompts of {settings['prompts']}", flush=True)
    works = [
        answers(target, profiled, t, max_new_tokens=settings["max_new_tokens"], seed=settings["seed"])
        for t in temperatures
    ]
    texts = [text for work in works for text in work.texts]
    print("tune: profiling this machine", flush=True)
    target_profile, draft_profiles = profile_machine(target, drafts, texts, settings)
    config = target.model.config.get_text_config()
    content: dict[str, Any] = {
        "name": settings["name"],
        **make_header(
            device=target.device,
            dtype=target.dtype,
            target=first.target_fingerprint,
            draft={run: pair.draft_name for run, pair in pairs.items()},
            data={},
        ),
        "arguments": [o for o in overrides if not o.lstrip("+~").startswith(NOT_OF_THE_PAIR)],
        "target_source": str(first.config.target.source),
        "target_config": {"model_type": config.model_type, "num_hidden_layers": config.num_hidden_layers},
        "drafts": {run: draft_facts(pairs[run], draft, target) for run, draft in drafts.items()},
        "workload": {
            "source": settings["prompts"],
            "num_profiled": len(profiled),
            "num_measured": len(measured_prompts),
            "is_measured_anew": is_measured_anew,
            "prompt_tokens": fmean(len(text.prompt) for text in texts),
            "answer_tokens": fmean(len(text.answer) for text in texts),
            "max_new_tokens": settings["max_new_tokens"],
        },
        "target_profile": asdict(target_profile),
        "is_disturbed": target_profile.is_disturbed,
        "draft_profiles": {run: asdict(profile) for run, profile in draft_profiles.items()},
        "temperatures": {},
    }
    for work in works:
        print(f"tune: acceptance at T = {work.temperature:g}", flush=True)
        plain = Plain(
            step_s=target_profile.seconds(1, is_chain=True) + loop_seconds(work.results),
            prefill_s=fmean(r.prefill_s for r in work.results),
            num_tokens=fmean(len(text.answer) for text in work.texts),
        )
        candidates, acceptance = predict_all(pairs, drafts, work, target_profile, draft_profiles, plain, settings)
        chosen = shortlist(candidates, settings["candidates"])
        print(f"tune: measuring {', '.join(c.method for c in chosen)}", flush=True)
        measured = measure(pairs, measured_prompts, chosen, plain, settings)
        print_comparison(work.temperature, measured)
        best = choose(measured)
        content["temperatures"][f"{work.temperature:g}"] = {
            "plain": asdict(plain),
            "acceptance": acceptance,
            "predicted": [c.to_json() for c in ranked(candidates)[:SHOWN]],
            "best_of_each_kind": [c.to_json() for c in best_of_each_kind(candidates)],
            "measured": [m.to_json() for m in measured],
            "choice": None if best is None else best.to_json(),
        }
    return content


def draft_facts(pair: Pair, draft: Draft, target: Target) -> dict[str, Any]:
    """What commands and flags need of a draft. is_run: `folder` is a run; else what an off-the-shelf draft comes from.
    max_positions: where the draft has fewer than the target."""
    return {
        "kind": kind_of(draft.model),
        "folder": str(pair.run.folder if pair.run else pair.draft_name),
        "is_run": pair.run is not None,
        "model_type": getattr(draft.model.config, "model_type", None),
        "max_positions": draft.max_positions if draft.max_positions < target.max_positions else None,
    }


def predict_all(
    pairs: Mapping[str, Pair],
    drafts: Mapping[str, Draft],
    work: Workload,
    target_profile: TargetProfile,
    draft_profiles: Mapping[str, DraftProfile],
    plain: Plain,
    settings: Mapping[str, Any],
) -> tuple[list[Candidate], dict[str, Any]]:  # of every draft and of none; acceptance by run
    target = next(iter(pairs.values())).target
    candidates, acceptance = predict_draftless(target, work, target_profile, plain, settings), {}
    for run, draft in drafts.items():
        machine = Machine(target_profile, draft_profiles[run], loop_profile(draft, work, settings["max_nodes"]))
        found, acceptance[run] = predict_draft(run, draft, work, machine, plain, settings["max_nodes"])
        candidates += found
    return candidates, acceptance


def best_of_each_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    """For engines that do not draft every kind of shape."""
    return ranked({(c.run, c.shape.kind): c for c in reversed(ranked(candidates))}.values())


def print_comparison(temperature: float, measured: Sequence[Measured]) -> None:
    print_table(
        f"T = {temperature:g}: predicted and measured [95 % interval over prompts]",
        ("method", "draft", "tau predicted", "tau measured", "predicted", "at that tau", "measured", "off by"),
        [
            (
                m.candidate.method,
                m.candidate.run or "none",
                f"{m.candidate.tau:.2f}",
                "{:.2f} [{:.2f}, {:.2f}]".format(*m.tau),
                f"{m.candidate.speedup:.2f}",
                f"{m.speedup_at_tau:.2f}",
                "{:.2f} [{:.2f}, {:.2f}]".format(*m.speedup) + (" slower" if m.speedup[0] < 1 else ""),
                f"{m.error:+.1%}",
            )
            for m in measured
        ],
    )


def skill_path(output_root: str | Path, name: str | None) -> Path:
    return Path(output_root) / f"skill-speculative-tuning{f'-{name}' if name else ''}.md"


def check_tune(settings: Mapping[str, Any]) -> None:
    """Raises UserError, naming the key, before anything is loaded."""
    for name in settings["lookahead"]:
        if TreeShape.parse(name, key="tune.lookahead").kind != "lookahead":
            raise UserError(
                f"tune.lookahead={settings['lookahead']}: {name} is none; use for example lookahead_w5_n3_g5"
            )


@entry("tune")
def main(cfg: DictConfig) -> None:
    settings = OmegaConf.to_container(cfg.tune, resolve=True)
    check_tune(settings)
    overrides = HydraConfig.get().overrides.task
    content = tune(load_pairs(cfg, overrides), settings, overrides)
    path = skill_path(cfg.output_root, settings["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    write_atomic(path, skill_text(content))
    for temperature, of_temperature in content["temperatures"].items():
        choice = of_temperature["choice"]
        print(
            f"T = {temperature}: " + (f"{choice['method']} with {choice['run'] or 'no draft'}" if choice else "plain")
        )
    print(path)


if __name__ == "__main__":
    main()
