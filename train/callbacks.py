"""What can be removed from training without changing its result: logging, progress, averaging, saving, stopping."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from data.datamodule import Batch, PackedDataModule
from data.progress import ProgressBar
from train.module import Distiller


class StepCallback(Callback):
    """Calls `on_step` after each optimiser step (not after each micro-batch)."""

    _last_step = 0

    def on_train_start(self, trainer: Trainer, module: Distiller) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: Distiller, outputs: Any, batch: Batch, index: int) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self.on_step(trainer, module)

    def on_step(self, trainer: Trainer, module: Distiller) -> None:
        """What a subclass does after optimiser step `trainer.global_step`."""


class Metrics(StepCallback):
    """train/* every `every` steps, val/* after each validation, and the progress bar.

    train/loss, train/alpha, train/kl are token means over one optimiser step; train/tokens counts all packed tokens of
    all ranks since the run began; train/tokens_per_s is over the steps since the last line, without validation.
    """

    def __init__(self, *, every: int = 10, extra: dict[str, float] | None = None):
        self.every, self.extra = every, extra or {}
        self.tokens = 0
        self.bar: ProgressBar | None = None

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tokens = state["tokens"]

    def on_train_start(self, trainer: Trainer, module: Distiller) -> None:
        super().on_train_start(trainer, module)
        self._since = (time.monotonic(), self.tokens)
        self._window_tokens = 0
        if trainer.is_global_zero:
            total = expected_tokens(trainer.datamodule, trainer.world_size)
            self.bar = ProgressBar("training", total, "tokens", done=self.tokens)
            self.bar.__enter__()
        if self.extra and trainer.global_step == 0:
            log(trainer, self.extra)

    def on_train_batch_start(self, trainer: Trainer, module: Distiller, batch: Batch, index: int) -> None:
        self._window_tokens += batch["input_ids"].numel()

    def on_step(self, trainer: Trainer, module: Distiller) -> None:
        new = self._window_tokens
        if trainer.world_size > 1:
            new = int(trainer.strategy.reduce(torch.tensor(new, device=module.device), reduce_op="sum"))
        self._window_tokens = 0
        self.tokens += new
        if self.bar is not None:
            self.bar.advance(new)
        if trainer.global_step % self.every == 0 or trainer.global_step in (1, module.total_steps):
            now = time.monotonic()
            rate = (self.tokens - self._since[1]) / max(now - self._since[0], 1e-9)
            self._since = (now, self.tokens)
            means = {f"train/{name}": value for name, value in module.last_window.means().items()}
            more = {
                "train/lr": trainer.optimizers[0].param_groups[0]["lr"],
                "train/grad_norm": float(module.grad_norm),
                "train/tokens": self.tokens,
                "train/tokens_per_s": rate,
            }
            log(trainer, {**means, **more})

    def on_validation_start(self, trainer: Trainer, module: Distiller) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Trainer, module: Distiller) -> None:
        self._since = (self._since[0] + time.monotonic() - self._paused, self._since[1])
        means = module.validation.means()
        log(trainer, {**{f"val/{name}": value for name, value in means.items()}, "train/tokens": self.tokens})

    def teardown(self, trainer: Trainer, module: Distiller, stage: str) -> None:
        if self.bar is not None:
            self.bar.__exit__(None, None, None)
            self.bar = None


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Straight to the loggers, at the optimiser's step count."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


def expected_tokens(data: PackedDataModule, world_size: int) -> int:
    """Packed tokens of the whole run: exact for whole epochs, else from the mean batch."""
    per_epoch, batches = int(data.stream.lengths.sum()), data.stream.num_batches(1)
    wanted = data.num_batches(world_size) * world_size
    if data.num_epochs is not None:
        wanted = min(wanted, data.stream.num_batches(data.num_epochs))
    return round(per_epoch * wanted / batches)


def trained(module: Distiller) -> list[Tensor]:
    return [p for p in module.draft.parameters() if p.requires_grad]


class WeightAverage(StepCallback):
    """Exponential moving average of the draft's weights; validation and the saved draft use it.

    ema <- decay * ema + (1 - decay) * weights after each step, with decay capped at (1 + step) / (10 + step), so that a
    short run is not dominated by its start.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.average: list[Tensor] | None = None

    def on_fit_start(self, trainer: Trainer, module: Distiller) -> None:
        weights = trained(module)
        if self.average is None:
            self.average = [p.detach().clone() for p in weights]
        self.average = [a.to(p.device) for a, p in zip(self.average, weights)]

    @torch.no_grad()
    def on_step(self, trainer: Trainer, module: Distiller) -> None:
        step = trainer.global_step
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, [p.detach() for p in trained(module)], 1 - decay)

    @torch.no_grad()
    def swap(self, module: Distiller) -> None:
        """Exchange average and weights; a second call brings them back."""
        for average, parameter in zip(self.average, trained(module)):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)

    def on_validation_start(self, trainer: Trainer, module: Distiller) -> None:
        self.swap(module)

    def on_validation_end(self, trainer: Trainer, module: Distiller) -> None:
        self.swap(module)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class Snapshots(StepCallback):
    """`snapshots/step-000500/`: the draft as it would be saved then, every so many steps: a learning curve to decode.

    average: saves these weights instead, where there is one.
    """

    def __init__(self, folder: Path, every: int, average: WeightAverage | None):
        self.folder, self.every, self.average = folder, every, average

    def on_step(self, trainer: Trainer, module: Distiller) -> None:
        if trainer.global_step % self.every or not trainer.is_global_zero:
            return
        folder = self.folder / f"step-{trainer.global_step:06d}"
        partial = folder.with_name(f".{folder.name}.partial")  # whole or not there: it may be judged meanwhile
        if self.average is not None:
            self.average.swap(module)
        module.draft.save_pretrained(partial)
        if self.average is not None:
            self.average.swap(module)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed behind it and goes on from before
        partial.rename(folder)


class Stopped(SystemExit):
    """Training was asked to stop (SIGTERM, Ctrl-C) and has saved its state. The exit code is the shell's for it."""


class StateCheckpoint(StepCallback):
    """`state/last.ckpt`: what a continuation needs, every `every_minutes` or `every_steps`, at the end, and on SIGTERM.

    Saved only between optimiser steps, where no gradient is pending: a continuation equals an uninterrupted run (of
    several processes with dropout all but the first go on with other masks: one generator's state is kept).
    Written beside, synced and renamed: a kill or a second signal leaves the former file or the new one, never a half.
    SIGTERM and Ctrl-C set a flag; the step under way is finished, saved, and the process exits with 143 (130).
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, path: Path, *, every_minutes: float | None = 10.0, every_steps: int | None = None):
        self.path = path
        self.every_minutes, self.every_steps = every_minutes, every_steps
        self.received: int | None = None

    def state_dict(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}  # drafts with dropout draw from it
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generators = state

    def on_save_checkpoint(self, trainer: Trainer, module: Distiller, checkpoint: dict[str, Any]) -> None:
        # of a state saved at the last step Lightning would say that nothing is left, also when the run became longer
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: Trainer, module: Distiller) -> None:
        super().on_train_start(trainer, module)
        if state := self.__dict__.pop("_generators", None):
            torch.set_rng_state(state["cpu"].cpu())
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"].cpu())
        self._last_save = time.monotonic()
        self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def _receive(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice by hand: at once, without saving
        self.received = number

    def on_step(self, trainer: Trainer, module: Distiller) -> None:
        minutes = (time.monotonic() - self._last_save) / 60
        wants_stop = self.received is not None
        wants_save = (
            wants_stop
            or (self.every_minutes is not None and minutes >= self.every_minutes)
            or (self.every_steps is not None and trainer.global_step % self.every_steps == 0)
            or trainer.global_step == module.total_steps  # here, not in on_train_end: a longer run may go on from it
        )
        if trainer.world_size > 1:  # clocks and signals differ between ranks, the decision must not
            flags = torch.tensor([int(wants_save), int(wants_stop)], device=module.device)
            flags = trainer.strategy.reduce(flags, reduce_op="sum")
            wants_save, wants_stop = bool(flags[0] > 0), bool(flags[1] > 0)
        if wants_save:
            self.save(trainer)
        if wants_stop:
            if trainer.is_global_zero:
                print(f"stopped at step {trainer.global_step}, state saved; the same command continues", flush=True)
            raise Stopped(128 + (self.received or signal.SIGTERM))

    def teardown(self, trainer: Trainer, module: Distiller, stage: str) -> None:
        for number, handler in self.__dict__.pop("_before", {}).items():
            signal.signal(number, handler)

    def save(self, trainer: Trainer) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(partial)  # every rank takes part, the first one writes
        if trainer.is_global_zero:
            replace_synced(partial, self.path)
        trainer.strategy.barrier("state")
        self._last_save = time.monotonic()


def replace_synced(partial: Path, path: Path) -> None:
    """Give a written file its final name, once its bytes are on disk."""
    handle = os.open(partial, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
