"""How a run is executed: length, batches, devices, precision; checked early, turned into a Lightning Trainer."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import StrategyRegistry

from models.errors import UserError
from models.target import has_fast_bf16

PRECISIONS = {"bf16": "bf16-mixed", "fp32": "32-true"}


@contextmanager
def fast_fp32(device: torch.device) -> Iterator[None]:
    """On a GPU TF32 for what stays in fp32, while training: what is evaluated afterwards is exact again."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class TrainerSpec:
    """See conf/trainer/auto.yaml for units and reasons. Raises UserError naming key, value and fix."""

    max_epochs: int | None = 1
    max_steps: int | None = None
    batch_tokens: int = 2048
    accumulate: int = 1
    precision: str = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    val_every_steps: int | None = None
    log_every_steps: int = 10
    checkpoint_every_minutes: float | None = 10.0
    checkpoint_every_steps: int | None = None
    snapshot_every_steps: int | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        optional = ("max_epochs", "max_steps", "val_every_steps", "checkpoint_every_steps", "snapshot_every_steps")
        for name in (*optional, "batch_tokens", "accumulate", "num_nodes", "log_every_steps"):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"trainer.{name}={value}: must be a whole number of at least 1")
        if self.max_epochs is None and self.max_steps is None:
            raise UserError("trainer.max_epochs, trainer.max_steps: both null; set at least one of them")
        if not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise UserError(f"trainer.num_workers={self.num_workers}: must be a whole number of at least 0")
        minutes = self.checkpoint_every_minutes
        if minutes is not None and (not isinstance(minutes, (int, float)) or minutes <= 0):
            raise UserError(f"trainer.checkpoint_every_minutes={minutes}: must be above 0, or null for never")
        if self.precision not in ("auto", *PRECISIONS):
            raise UserError(f"trainer.precision={self.precision}: unknown; use auto, {' or '.join(PRECISIONS)}")
        # whole parameters on each process: gradient norm, Muon, averages and saved drafts take them so
        strategies = ("auto", *(name for name in StrategyRegistry.available_strategies() if name.startswith("ddp")))
        if self.strategy not in strategies:
            raise UserError(
                f"trainer.strategy={self.strategy}: unknown, or none that leaves the draft whole; use one of "
                f"{', '.join(strategies)}"
            )
        if self.devices != "auto" and (not isinstance(self.devices, int) or self.devices < 1):
            raise UserError(f"trainer.devices={self.devices}: must be auto or a number of processes")

    def beside(self, device_map: str | None) -> "TrainerSpec":
        """This spec beside a target that `target.device_map` spreads over the GPUs: `auto` is one process then.

        Raises UserError for several, because each would load all of such a target.
        """
        if device_map is None:
            return self
        if self.devices not in ("auto", 1):
            raise UserError(
                f"trainer.devices={self.devices}: target.device_map={device_map} spreads the target over all GPUs, "
                "so one process trains beside it; set trainer.devices=1, or target.device_map=null"
            )
        return replace(self, devices=1)

    def num_devices(self, device: torch.device) -> int:
        """Processes on this machine."""
        if self.devices != "auto":
            if device.type == "cuda" and self.devices > torch.cuda.device_count():
                raise UserError(f"trainer.devices={self.devices}: this machine has {torch.cuda.device_count()} GPUs")
            return self.devices
        return max(torch.cuda.device_count(), 1) if device.type == "cuda" and device.index is None else 1

    def resolved_precision(self, device: torch.device) -> str:
        """`bf16` (matrix products in bf16, weights, softmax and optimiser in fp32) or `fp32`."""
        if self.precision == "auto":
            return "bf16" if has_fast_bf16(device) else "fp32"
        return self.precision

    def make(
        self,
        *,
        device: torch.device,
        total_steps: int,
        callbacks: Sequence[Callback],
        loggers: Sequence[Logger],
    ) -> Trainer:
        """The Trainer. Its one epoch is the data module's whole stream; clipping and token means are the module's."""
        quiet_lightning()
        devices = self.num_devices(device)
        chosen = device.type == "cuda" and device.index is not None and devices == 1
        every = self.val_every_steps or max(1, -(-total_steps // 10))
        return Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index] if chosen else devices,
            num_nodes=self.num_nodes,
            strategy=self.strategy,
            precision=PRECISIONS[self.resolved_precision(device)],
            max_epochs=1,
            accumulate_grad_batches=self.accumulate,
            val_check_interval=every * self.accumulate,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            callbacks=list(callbacks),
            logger=list(loggers) or False,
            log_every_n_steps=1,  # of Lightning's own metrics, of which there are none
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


def quiet_lightning() -> None:
    """Without Lightning's start-up lines about devices, and its hints that our loaders answer otherwise."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*LeafSpec.*deprecated.*", ".*exists and is not empty.*"):
        warnings.filterwarnings("ignore", message=message)
