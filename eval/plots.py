"""How the PNG plots look, and a run's learning curves: loss, acceptance on held-out rows, tokens a target forward of
its snapshots. The plots of the decode loop are in decode_plots.py."""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.errors import UserError

# Okabe and Ito's palette: told apart by colour-blind readers too. Markers and dashes differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", ":")
DPI = 130


def read_metrics_csv(path: str | Path) -> dict[str, np.ndarray]:
    """A run's metrics.csv: column -> (points, 2) array of (step, value), empty cells left out."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; training with logger=csv writes it")
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            for name, cell in line.items():
                if name not in (None, "step", "epoch") and cell not in (None, "") and line.get("step"):
                    columns[name].append((float(line["step"]), float(cell)))
    return {name: np.asarray(points) for name, points in columns.items()}


def plot_loss(columns: Mapping[str, np.ndarray], path: str | Path, *, title: str) -> Path:
    """Training loss (each logged step, and smoothed) and held-out KL against tokens seen."""
    figure, axes = _curves()
    loss = columns["train/loss"]
    x = _tokens(columns, loss[:, 0])
    axes.plot(x, loss[:, 1], color=COLOURS[0], alpha=0.25, linewidth=1, label="train/loss, each logged step")
    axes.plot(x, _smooth(loss[:, 1]), color=COLOURS[0], linewidth=2, label="train/loss, smoothed")
    if "val/kl" in columns:
        kl = columns["val/kl"]
        axes.plot(
            _tokens(columns, kl[:, 0]), kl[:, 1], color=COLOURS[1], marker=MARKERS[1], linewidth=1.5, label="val/kl"
        )
    low, high = np.quantile(loss[:, 1], [0.0, 1.0])
    if low > 0 and high / low > 8:  # the first steps would flatten all that follows
        axes.set_yscale("log")
    axes.set(title=title, xlabel=_tokens_label(columns), ylabel="loss, KL [nats per token]")
    return _save(figure, axes, path)


def plot_val_alpha(
    columns: Mapping[str, np.ndarray],
    path: str | Path,
    *,
    title: str,
    final: tuple[float, float, float] | None = None,
) -> Path:
    """Held-out acceptance at T = 1 while training, against tokens seen.

    final: (value, low, high) of `alpha_expected/held_out/T1` after training, drawn as a point with its interval.
    """
    figure, axes = _curves()
    for i, name in enumerate(("val/alpha", "train/alpha")):
        if name not in columns:
            continue
        points = columns[name]
        x = _tokens(columns, points[:, 0])
        if name == "val/alpha":
            axes.plot(x, points[:, 1], color=COLOURS[i], marker=MARKERS[i], linewidth=2, label=name)
        else:
            axes.plot(x, _smooth(points[:, 1]), color=COLOURS[i], alpha=0.6, linewidth=1, label=f"{name}, smoothed")
    if final is not None:
        value, low, high = final
        end = max(_tokens(columns, points[:, 0]).max() for points in columns.values() if len(points))
        axes.errorbar(
            [end], [value], yerr=[[value - low], [high - value]], color=COLOURS[2], marker="D", capsize=5,
            linestyle="none", label=f"alpha_expected, T = 1: {value:.3f} [{low:.3f}, {high:.3f}]",
        )  # fmt: skip
    axes.set(title=title, xlabel=_tokens_label(columns), ylabel="acceptance alpha [chance per drafted token]")
    axes.set_ylim(0, None)
    return _save(figure, axes, path)


def plot_snapshots(curves: Mapping[str, Sequence[tuple[float, ...]]], path: str | Path, *, title: str) -> Path:
    """curves: method at a temperature -> (optimiser step, tau, low, high): tokens a target forward while training."""
    figure, axes = _curves()
    for i, (name, points) in enumerate(curves.items()):
        step, value, low, high = np.asarray(points, dtype=np.float64).T
        axes.errorbar(
            step, value, yerr=np.abs([value - low, high - value]), color=COLOURS[i % 6], marker=MARKERS[i % 6],
            linestyle=DASHES[i // 6 % 3], capsize=3, linewidth=1.5, label=name,
        )  # fmt: skip
    axes.set(title=f"{title}: its snapshots", xlabel="optimiser steps", ylabel="tokens a target forward, tau")
    axes.set_ylim(1, None)
    return _save(figure, axes, path)


def new_figure(width: float, height: float) -> Figure:
    """Empty, of so many inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def tidy(axes: Axes) -> None:
    """A pale grid, no frame above and on the right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _curves() -> tuple[Figure, Axes]:
    figure = new_figure(7.0, 4.4)
    return figure, figure.subplots()


def _save(figure: Figure, axes: Axes, path: str | Path) -> Path:
    tidy(axes)
    axes.legend(frameon=False)
    return write_figure(figure, path)


def _tokens(columns: Mapping[str, np.ndarray], steps: np.ndarray) -> np.ndarray:  # (points,)
    """Millions of tokens seen at each step, or the steps themselves where no token count was logged."""
    if "train/tokens" not in columns:
        return steps
    known = columns["train/tokens"]
    return np.interp(steps, known[:, 0], known[:, 1]) / 1e6


def _tokens_label(columns: Mapping[str, np.ndarray]) -> str:
    return "tokens seen [millions]" if "train/tokens" in columns else "optimiser steps"


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Centred moving average over a twentieth of the run; shorter windows at both ends."""
    values = np.asarray(values, dtype=np.float64)
    half = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.clip(np.arange(len(values)) - half, 0, None)
    high = np.clip(np.arange(len(values)) + half + 1, None, len(values))
    return (sums[high] - sums[low]) / (high - low)
