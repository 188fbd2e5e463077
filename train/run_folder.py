"""checkpoints/<run>: who owns the folder, what may continue in it, and how its files get there.

config.json, model.safetensors, tokenizer files    the draft, in transformers' layout
resolved_config.yaml                               written when the run begins
state/last.ckpt, state/run_id                      what a continuation needs
run.json                                           written last: a folder with it is finished
"""

import fcntl
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.results import write_atomic
from eval.run import read_config
from models.errors import UserError

# Keys that do not change what is learned: a continuation may set them anew.
FREE = re.compile(
    r"^(run|resume|overwrite|plan|device|output_root|cache_root|checkpoint_root|prompts|out|to"
    r"|(logger|decode|alpha|regenerate|export|tune|compare|failure)\..*"
    r"|target\.(device|device_map|converted_root|name)"
    r"|cache\.(shard_tokens|batch_tokens|name)"
    r"|trainer\.(num_workers|strategy|val_every_steps|log_every_steps|checkpoint_every_\w+|snapshot_every_steps))$"
)
LENGTH = ("trainer.max_steps", "trainer.max_epochs")  # may change: the schedule is then stretched over the new length


@dataclass(frozen=True)
class Start:
    """How a run begins: from `checkpoint` at `step`, or afresh (None, None); or not at all."""

    checkpoint: Path | None = None
    step: int | None = None
    is_finished: bool = False


class RunFolder:
    """The folder of the run `name` under `root`."""

    def __init__(self, root: str | Path, name: str):
        if not re.fullmatch(r"[\w][\w.=+,-]*", name):
            raise UserError(f"run={name}: use letters, digits and . _ = + , - only (it names a folder)")
        self.name, self.path = name, Path(root) / name
        self.checkpoint = self.path / "state" / "last.ckpt"
        self._lock: TextIO | None = None

    def check(self, config: dict[str, Any], *, resume: str, overwrite: bool) -> Start:
        """Decide how to begin. Touches nothing.

        config: resolved, plain. resume: `auto`, `never` or the path of a checkpoint.
        Raises UserError when the folder holds a run of another config, naming the keys that differ, and when
        overwriting would delete what the new run is to begin with.
        """
        explicit = None if resume in ("auto", "never") else Path(resume)
        if explicit is not None and not explicit.is_file():
            raise UserError(f"resume={resume}: no such file; use auto, never, or the path of a state/last.ckpt")
        held = self.path / "resolved_config.yaml"
        if overwrite and held.is_file():
            self._refuse_to_delete(config | {"resume": resume})
        if overwrite or not held.is_file():
            return Start() if explicit is None else Start(explicit, saved_step(explicit))
        before = OmegaConf.to_container(read_config(self.path), resolve=True)
        differing = [(key, old, new) for key, old, new in differences(before, config) if not FREE.match(key)]
        blocking = [item for item in differing if item[0] not in LENGTH]
        if blocking:
            listed = "; ".join(f"{key} was {old}, now {new}" for key, old, new in blocking[:6])
            more = f" and {len(blocking) - 6} more" if len(blocking) > 6 else ""
            raise UserError(
                f"run={self.name}: {self.path} holds a run of another config ({listed}{more}); set them back, choose "
                f"another run=NAME, or overwrite=true to start it afresh"
            )
        if explicit is not None:
            return Start(explicit, saved_step(explicit))
        if resume == "never" and (self.checkpoint.is_file() or (self.path / "run.json").is_file()):
            raise UserError(f"resume=never: {self.path} holds this run already; use overwrite=true or another run=NAME")
        if (self.path / "run.json").is_file() and not differing:
            return Start(is_finished=True)
        return Start(self.checkpoint, saved_step(self.checkpoint)) if self.checkpoint.is_file() else Start()

    def _refuse_to_delete(self, config: dict[str, Any]) -> None:
        """overwrite=true drops the whole folder: nothing that the config names (a checkpoint, a draft) may be in it."""
        for key, value in texts(config):
            if key != "run" and lies_in(Path(value), self.path):
                raise UserError(
                    f"{key}={value}: overwrite=true would delete it with the rest of {self.path}; choose another "
                    f"run=NAME, or leave out overwrite=true to continue this run"
                )

    @rank_zero_only
    def begin(self, config: dict[str, Any], *, overwrite: bool) -> None:
        """Write the resolved config; with overwrite, drop a former run first.

        The run is this process's until `release` (or its death). Raises UserError while another one trains it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path.parent / f".{self.name}.lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UserError(
                f"run={self.name}: another process is training it in {self.path}; wait for it, or choose another "
                f"run=NAME"
            ) from None
        if overwrite and (self.path / "resolved_config.yaml").is_file():
            shutil.rmtree(self.path)
        (self.path / "state").mkdir(parents=True, exist_ok=True)
        (self.path / "run.json").unlink(missing_ok=True)  # not finished any more
        write_atomic(self.path / "resolved_config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
        if not (self.path / "state" / "run_id").is_file():
            write_atomic(self.path / "state" / "run_id", uuid.uuid4().hex[:8])

    def release(self) -> None:
        """Let another process have the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def run_id(self) -> str:
        """The same for every continuation of the run: W&B's id of it."""
        path = self.path / "state" / "run_id"
        return path.read_text().strip() if path.is_file() else self.name

    def save_draft(self, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """The draft's files, each moved into place when whole."""
        partial = self.path / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        draft.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in partial.iterdir():
            file.replace(self.path / file.name)
        partial.rmdir()

    def finish(self, info: dict[str, Any]) -> None:
        """run.json: the run is done."""
        write_atomic(self.path / "run.json", json.dumps(info, indent=1) + "\n")


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every text in a plain config, those in its lists included."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts(each, f"{key}.{name}" if key else str(name))


def lies_in(path: Path, folder: Path) -> bool:
    """Whether something is there at `path`, and in `folder` (or is it), by its own name or behind a link."""
    try:
        path = path.expanduser()
        places = (path.resolve(), path.parent.resolve() / path.name) if path.exists() else ()
    except (OSError, RuntimeError, ValueError):  # no name of a file
        return False
    return any(place.is_relative_to(folder.resolve()) for place in places)


def saved_step(checkpoint: Path) -> int:
    """Optimiser steps behind a checkpoint. Raises UserError when it cannot be read."""
    content = read_checkpoint(checkpoint)
    if not isinstance(content, dict) or not {"global_step", "state_dict", "loops"} <= content.keys():
        raise UserError(f"resume: {checkpoint} is no state of a run; overwrite=true starts the run afresh")
    return int(content["global_step"])


def read_checkpoint(checkpoint: Path) -> dict[str, Any]:
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds on a damaged file
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"resume: {checkpoint} cannot be read ({first_line}); overwrite=true starts the run afresh"
        ) from None


def differences(before: Any, after: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(key, value before, value after) of every leaf that differs between two plain configs."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted(before.keys() | after.keys(), key=str):
            missing = {} if isinstance(before.get(key, after.get(key)), dict) else None
            found += differences(before.get(key, missing), after.get(key, missing), f"{prefix}{key}.")
        return found
    return [] if before == after else [(prefix.rstrip("."), before, after)]
