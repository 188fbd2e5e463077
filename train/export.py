"""Export a run for a serving engine: `python -m train.export run=checkpoints/NAME to=vllm`.

1. refuse what the engine cannot serve
2. write the folder under a temporary name (models/export.py)
3. check it as the engine reads it (models/check_export.py), load it again in a fresh process and compare logits
4. the model card with the command that serves it; then the folder gets its name
"""

import os
import shutil
from collections.abc import Sequence
from glob import escape
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import PreTrainedModel

from eval.entry import entry
from eval.run import Run, cast_weights, find_run, load_run, read_draft, run_config
from models.check_export import check_folder
from models.eagle import EagleHead
from models.errors import UserError
from models.export import captured_outputs, export
from models.medusa import MedusaHeads
from models.model_card import TAG, card_text
from models.reload import largest_difference
from models.servable import ENGINES, kind_of, servable
from models.serve_command import trtllm_yaml
from models.target import Target, resolve_dtype
from train.export_card import make_card

TOLERANCE = 1e-5  # of reloaded logits, in fp32
NO_PATH = "TARGET"  # stands in the command for a target that no engine could find


def export_run(cfg: DictConfig, overrides: Sequence[str] = ()) -> Path:
    """Export the run `cfg.run` (by default the newest) to the engine `cfg.to`; returns the folder.

    Target and data are the run's own, but for what `overrides` (the command line) set of them. A folder appears under
    its name only when it passed every check. Raises UserError naming the key and the fix.
    """
    if cfg.to is None:
        raise UserError(f"to: not given; use one of {', '.join(ENGINES)}, for example to=vllm")
    run = load_run(find_run(cfg.run, cfg.checkpoint_root))
    out = Path(cfg.out or f"exports/{run.name}-{cfg.to}")
    check_out(out, overwrite=cfg.overwrite)
    source_config = run_config(cfg, run.folder, overrides).target
    target: Target = instantiate(source_config)
    draft = load_trained(run, target, cfg.export.dtype)
    kind, draft_config = kind_of(draft), None if isinstance(draft, EagleHead | MedusaHeads) else draft.config
    any_family = cfg.export.any_family
    if reason := servable(target.config, kind, cfg.to, draft_config=draft_config, any_family=any_family):
        raise UserError(f"to={cfg.to}: {reason}")
    target_path = cfg.export.target_path or served_path(source_config.source, target)
    if cfg.to == "speculators" and target_path == NO_PATH:
        raise UserError(
            "export.target_path: not given; a speculators folder names its target, and this one comes from nowhere"
        )
    card = make_card(cfg, run, target, draft, source=source_config.source, target_path=target_path, out=out)
    drop_leftovers(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        export(draft, target, partial, to=cfg.to, draft_len=cfg.export.draft_len, target_path=target_path)
        check_written(partial, draft, target, cfg.to)
        if cfg.to == "trtllm":
            captured = captured_outputs(target.tap_ids, target.num_blocks)
            yaml = trtllm_yaml(kind, out, draft_len=cfg.export.draft_len, captured=captured)
            (partial / "trtllm.yaml").write_text(yaml)
        (partial / "README.md").write_text(card_text(card))
        move_into_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"export: {out}, for {ENGINES[cfg.to]}; checked, and loaded again with the same logits. Serve it by\n")
    print(card.command, flush=True)
    return out


def check_out(out: Path, *, overwrite: bool) -> None:
    """An export is replaced only where that is asked for; a file, and a folder that holds anything else, never."""
    if out.name in ("", ".."):
        raise UserError(f"out={out}: give a folder by its name")
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out}: is a file; give a folder")
    for folder in out.resolve().parents:
        if (folder / "resolved_config.yaml").is_file():
            raise UserError(f"out={out}: lies in the run {folder}; give a folder outside of it")
    if out.is_dir() and any(out.iterdir()):
        if not is_export(out):
            raise UserError(f"out={out}: holds something that is no export of this tool; give another out")
        if not overwrite:
            raise UserError(f"out={out}: is there already; give another out, or overwrite=true")
    out.parent.mkdir(parents=True, exist_ok=True)


def is_export(folder: Path) -> bool:
    """Told by the model card: runs and targets have a config.json as well."""
    card = folder / "README.md"
    header = card.read_text(errors="replace").split("\n---", 1)[0] if card.is_file() else ""
    return f"- {TAG}" in header.splitlines()


def drop_leftovers(out: Path) -> None:
    """What an export to `out` that was killed left beside it."""
    for folder in out.parent.glob(f".{escape(out.name)}.*.partial"):
        try:
            os.kill(int(folder.name.split(".")[-2]), 0)  # raises where there is no such process
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (PermissionError, ValueError):  # another user's, or no folder of ours
            pass


def load_trained(run: Run, target: Target, dtype: str) -> EagleHead | MedusaHeads | PreTrainedModel:
    """The run's draft on the CPU, its weights in the dtype that is exported."""
    draft = read_draft(target, run.folder)
    return cast_weights(draft, target.dtype if dtype == "auto" else resolve_dtype(dtype, torch.device("cpu")))


def move_into_place(partial: Path, out: Path) -> None:
    """`out` is the new folder, and what it held before is gone."""
    if out.is_dir():
        replaced = partial.with_suffix(".replaced")
        out.replace(replaced)
        partial.replace(out)
        shutil.rmtree(replaced)
    else:
        partial.replace(out)


def check_written(folder: Path, draft: EagleHead | MedusaHeads | PreTrainedModel, target: Target, to: str) -> None:
    """Raises UserError with what an engine would get wrong. `draft` is in fp32 afterwards."""
    if isinstance(draft, EagleHead):
        problems = check_folder(
            folder,
            to=to,
            target_embedding=target.embedding.detach().cpu(),
            target_config=target.config,
            tap_ids=draft.config.tap_ids or None,
        )
        if problems:
            raise UserError(f"to={to}: not exported, the checker says: {'; '.join(problems)}")
    difference = largest_difference(draft, folder)
    if not difference <= TOLERANCE:
        raise UserError(f"to={to}: not exported, the folder's logits differ from the run's by {difference:.2g}")


def served_path(source: str, target: Target) -> str:
    """What an engine can load as this target: a hub id or folder; of a GGUF the folder that it was converted to."""
    return NO_PATH if source.startswith("random:") else str(target.model.config._name_or_path or source)


@entry("export")
def main(cfg: DictConfig) -> None:
    export_run(cfg, HydraConfig.get().overrides.task)


if __name__ == "__main__":
    main()
