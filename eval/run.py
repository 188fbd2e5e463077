"""A finished run, found again: its folder, its config, and the config an evaluation of it should use.

`checkpoints/<run>/` holds the draft in transformers layout, `resolved_config.yaml` and `run.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from models.errors import UserError

# What the draft was trained on: taken from the run, not from the defaults.
OF_THE_RUN = ("target", "data", "dtype")


@dataclass(frozen=True)
class Run:
    """A run on disk. `info` is its run.json (command, git_sha, metrics, target fingerprint, versions)."""

    folder: Path
    config: DictConfig
    info: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name


def find_run(run: str | Path | None, checkpoint_root: str | Path) -> Path:
    """Folder of `run`: a name under `checkpoint_root`, a path, or None for the newest finished run.

    Finished means that it has a run.json. Raises UserError when there is none, naming those there are.
    """
    root = Path(checkpoint_root)
    finished = {path.parent.name: path for path in root.glob("*/run.json")}
    if run is None:
        if not finished:
            raise UserError(
                f"checkpoint_root={root}: no finished run there; train one first "
                "(python -m train.distill +experiment=quickstart), or give draft=hf draft.id=NAME_OR_FOLDER"
            )
        return max(finished.values(), key=lambda path: path.stat().st_mtime).parent
    for folder in (root / run, Path(run)):
        if (folder / "run.json").is_file():
            return folder
    if any(folder.is_dir() for folder in (root / run, Path(run))):
        raise UserError(
            f"run={run}: no run.json there, its training has not finished; run train.distill again"
        )
    raise UserError(f"run={run}: no such run; there are: {', '.join(sorted(finished)) or 'none'} (in {root})")


def load_run(folder: str | Path) -> Run:
    """Read a run's config and run.json. Raises UserError when one is missing or broken."""
    folder = Path(folder)
    try:
        info = json.loads((folder / "run.json").read_text())
        config = OmegaConf.load(folder / "resolved_config.yaml")
    except (OSError, ValueError) as error:
        raise UserError(f"run={folder}: cannot read it ({error}); train it again") from None
    assert isinstance(config, DictConfig)
    return Run(folder, config, info)


def run_config(cfg: DictConfig, run_dir: str | Path, overrides: Sequence[str]) -> DictConfig:
    """`cfg` with the run's own target, data and dtype, except what `overrides` (the command line) set.

    overrides: as `HydraConfig.get().overrides.task` lists them: ["data.max_length=256", "target=gpt2"].
    Everything else (device, alpha, decode, folders) stays as composed. `run` becomes the run's name.
    """
    run = load_run(run_dir)
    merged = cfg.copy()
    with open_dict(merged):
        for key in OF_THE_RUN:
            if key in run.config and key in cfg:
                OmegaConf.update(merged, key, run.config[key], merge=False)
        for key in map(_override_key, overrides):
            if key.split(".")[0] not in OF_THE_RUN:
                continue
            if _has(cfg, key):
                OmegaConf.update(merged, key, OmegaConf.select(cfg, key), merge=False)
        merged.run = run.name
    return merged


def _override_key(override: str) -> str:
    """The config key that a command-line override sets: `+data.seed=3` sets `data.seed`."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0].replace("/", ".")


def _has(cfg: DictConfig, key: str) -> bool:
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and leaf in node
