"""Where a run's figures go: metrics.csv (default), W&B, or both. Built by the config group `logger`."""

import csv
import math
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only


class MetricsCSV(Logger):
    """`<folder>/metrics.csv`: one line a call, columns in order of appearance, empty where a line has no such figure.

    resume_step: keep the lines up to that step and go on behind them, so a resumed run's file has each step once.
    None starts afresh. (Lightning's own CSV logger deletes the earlier lines.)
    """

    def __init__(self, folder: str | Path, *, resume_step: int | None = None):
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self._columns, self._rows = ["step"], []
        self._start(resume_step)

    @rank_zero_only
    def _start(self, resume_step: int | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and self.path.is_file():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                self._rows = [row for row in reader if (row.get("step") or "").isdigit()]
                self._rows = [row for row in self._rows if int(row["step"]) <= resume_step]
                self._columns = list(reader.fieldnames or ["step"])
        self._rewrite()

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The run's folder holds its resolved config."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **{name: value for name, value in metrics.items() if math.isfinite(value)}}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self) -> None:
        partial = self.path.with_suffix(".csv.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self._rows)
        partial.replace(self.path)


def csv_logger(*, folder: Path, resume_step: int | None, **_: Any) -> Logger:
    return MetricsCSV(folder, resume_step=resume_step)


def wandb_logger(
    *,
    folder: Path,
    run: str,
    run_id: str,
    config: dict[str, Any],
    project: str = "draftsmith",
    entity: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
    **_: Any,
) -> Logger:
    """A W&B run, begun at once so that its config is there before the first step. WANDB_MODE=offline needs no account.

    run_id: the same for every continuation of a run. Lightning logs against `trainer/global_step`, so a continuation
    never runs into W&B's own step counter.
    """
    logger = WandbLogger(
        name=run,
        id=run_id,
        project=project,
        entity=entity,
        group=group,
        tags=tags or [],
        save_dir=str(folder),
        resume="allow",
        config=config,
    )
    if rank_zero_only.rank == 0:
        _ = logger.experiment
    return logger


def finish_loggers() -> None:
    """End the W&B run, also after an error: the next job of a sweep would otherwise write into it."""
    wandb = sys.modules.get("wandb")  # a second of import that a run without it need not pay
    if wandb is not None and wandb.run is not None:
        wandb.finish()
