"""What a model card says of a run: its shape, its figures with intervals, its data, and how it is served."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from eval.report import overall
from eval.results import MADE_BY, makers, read_results
from eval.run import Run, cast_weights, draft_fingerprint, read_draft
from models.drafts import max_positions
from models.eagle import EagleHead
from models.medusa import MedusaHeads
from models.model_card import KNOWN_TARGETS, Card, target_licence
from models.servable import DRAFT_MODEL, EAGLE3, MEDUSA, kind_of
from models.serve_command import serve_command
from models.target import Target

SHOWN = ("alpha_expected/held_out/T", "tau/", "speedup/", "alpha/")  # metrics of a card


def make_card(
    cfg: DictConfig,
    run: Run,
    target: Target,
    draft: EagleHead | MedusaHeads | PreTrainedModel,
    *,
    source: str,
    target_path: str,
    out: Path,
) -> Card:
    """The card of `run`, exported to `cfg.to` in the folder `out`. source: of the target, as its config names it."""
    kind = kind_of(draft)
    limit = position_limit(draft, target)
    metrics, measured = run_metrics(Path(cfg.output_root) / run.name / "results.json", run, target)
    return Card(
        name=run.name,
        kind=kind,
        engine=cfg.to,
        target=KNOWN_TARGETS[source][0] if source in KNOWN_TARGETS else source,
        licence=cfg.export.licence or target_licence(source, target_path),
        command=serve_command(
            cfg.to,
            kind,
            out,
            target_path,
            draft_len=cfg.export.draft_len,
            dtype=dtype_name(draft),
            max_positions=limit,
        ),
        notes=[*serving_notes(cfg.to, kind, limit), *weight_notes(source, target)],
        facts=facts(draft, target),
        metrics=metrics,
        measured=measured,
        sources=OmegaConf.to_container(run.config.data.sources, resolve=True) if "data" in run.config else [],
        made_by=made_by(run),
    )


def position_limit(draft: EagleHead | MedusaHeads | PreTrainedModel, target: Target) -> int | None:
    """Positions of a draft model that has fewer than its target; None otherwise (heads have the target's)."""
    if isinstance(draft, EagleHead | MedusaHeads) or max_positions(draft) >= target.max_positions:
        return None
    return max_positions(draft)


def serving_notes(to: str, kind: str, limit: int | None) -> list[str]:
    notes = []
    if kind == EAGLE3 and to in ("vllm", "sglang", "trtllm"):
        notes.append(
            "Weights and config.json are the same for vLLM, SGLang and TensorRT-LLM; only the command differs."
        )
    if limit is not None:
        notes.append(
            f"The draft has {limit} positions and the target more. Serve texts of at most {limit} tokens"
            + (": vLLM drafts past them without an error, and what it drafts there is noise." if to == "vllm" else ".")
        )
    if kind == MEDUSA:
        notes.append(
            "Each head in the folder drafts one token, so num_speculative_tokens is their number; vLLM takes the best "
            "of each. Rows of a head outside of its draft vocabulary are the mean of those inside: they never win."
        )
    elif to == "vllm":
        notes.append(
            'At temperature above 0 vLLM proposes the draft\'s best token; `"draft_sample_method": "probabilistic"` in '
            "--speculative-config draws from the draft instead."
        )
    if to in ("sglang", "trtllm"):
        notes.append("Written from the engine's documentation and sources; not run by Draftsmith's own tests.")
    if to == "hf" and kind == DRAFT_MODEL:
        notes.append("generation_config.json fixes the number of drafted tokens; transformers' own heuristics are off.")
    return notes


def weight_notes(source: str, target: Target) -> list[str]:
    """What a reader must know of the target's weights, where they are not those of the model that the card names."""
    if not source.startswith("package:") and not source.endswith(".gguf"):
        return []
    return [
        f"Trained and measured against {target.name} as read from a quantised GGUF file. Its weights of full precision "
        "accept other counts, which are not measured: train on those where they are served."
    ]


def facts(draft: EagleHead | MedusaHeads | PreTrainedModel, target: Target) -> dict[str, Any]:
    """Shape of the draft, as its config says it in part only."""
    count = sum(p.numel() for p in draft.parameters())
    common = {"weights": f"{count:,} in {dtype_name(draft)}", "target": f"{target.name}, {target.config.model_type}"}
    if isinstance(draft, MedusaHeads):
        c = draft.config
        return {
            "weights trained": common.pop("weights"),  # the folder has rows for all of the target's ids
            **common,
            "heads trained": c.num_heads,
            "reads": "the target's post-norm final state",
            "draft vocabulary": f"{c.truncated_vocab_size:,} of {target.vocab_size:,} ids",
        }
    if not isinstance(draft, EagleHead):
        return {**common, "architecture": type(draft).__name__, "positions": max_positions(draft)}
    c = draft.config
    if c.version == 1:
        return {**common, "reads": "the target's post-norm final state", "positions": target.max_positions}
    return {
        **common,
        "reads": f"the streams entering blocks {', '.join(map(str, c.tap_ids))} of {target.num_blocks}",
        "draft vocabulary": f"{c.draft_vocab_size:,} of {target.vocab_size:,} ids",
        "positions": target.max_positions,
    }


def run_metrics(path: Path, run: Run, target: Target) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Figures of results.json with their intervals, and the commands that made them; else the bare ones of run.json.

    Those of another draft are left out, with a line: a run trained or imported anew keeps its name.
    """
    if path.is_file():
        results = read_results(path)
        draft = cast_weights(read_draft(target, run.folder), getattr(torch, results["dtype"]))  # as it was measured
        if results["draft"].get("draft_weights") == draft_fingerprint(draft)["draft_weights"]:
            shown = shown_metrics(results["metrics"])
            return shown, makers(results, shown)
        print(f"export: {path} is of another draft and left out; measure this one by eval.decode overwrite=true")
    bare = {key: {"value": value} for key, value in run.info.get("metrics", {}).items()}
    return shown_metrics(bare), [{key: run.info[key] for key in MADE_BY if key in run.info}]


def made_by(run: Run) -> dict[str, Any]:
    info = run.info
    wanted = {key: info[key] for key in ("command", "git_sha", "steps", "precision") if key in info}
    wanted |= {f"{name} version": version for name, version in info.get("versions", {}).items()}
    wanted |= {f"data, {split}": fingerprint for split, fingerprint in info.get("data", {}).items()}
    hashes = {key: value for key, value in info.get("target", {}).items() if key != "name"}
    return wanted | hashes


def dtype_name(draft: EagleHead | MedusaHeads | PreTrainedModel) -> str:
    return str(draft.dtype).removeprefix("torch.")


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Those of results.json that a card shows: expected acceptance; tau, speed-up and alpha as a report begins."""
    sets, chosen = overall(metrics), {}
    for start in SHOWN:
        for key, m in metrics.items():
            if not key.startswith(start) or "/pos_" in key:
                continue
            if start != SHOWN[0]:
                _, name, temperature, method = key.split("/")
                if sets.get(temperature, {}).get(method) != name:
                    continue
            chosen[key] = m
    return chosen
