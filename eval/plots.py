"""PNG plots of a run: loss, acceptance on held-out rows while training; in the decode loop acceptance by depth, of one
method by set and of all methods beside one another, and all methods by temperature."""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.errors import UserError

# Okabe and Ito's palette: told apart by colour-blind readers too. Markers and dashes differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", ":")
DPI = 130

Point = tuple[int, float, float, float]  # depth, value, low, high


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
    figure, axes = _figure()
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
    figure, axes = _figure()
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


def by_depth(metrics: Mapping[str, Mapping[str, Any]], figure: str) -> dict[tuple[str, str, str], list[Point]]:
    """From the metrics of a results file, `figure/d2/gsm8k/T0/chain_k4`: (set, temperature, method) -> points."""
    curves: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for key, metric in metrics.items():
        match = re.fullmatch(rf"{figure}/d(\d+)/([^/]+)/([^/]+)/([^/]+)", key)
        if match is None or metric["value"] is None:
            continue
        low, high = metric["ci95"] if metric["ci95"] and None not in metric["ci95"] else (metric["value"],) * 2
        curves[match[2], match[3], match[4]].append((int(match[1]), metric["value"], low, high))
    return {where: sorted(points) for where, points in curves.items()}


def alpha_by_depth(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[Point]]]:
    """Panels of `alpha_by_depth.png`: "T0, chain_k4" -> set -> points."""
    panels: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    for (name, temperature, method), points in by_depth(metrics, "alpha_at_depth").items():
        panels[f"{temperature}, {method}"][name] = points
    return dict(panels)


def acceptance_by_depth(metrics: Mapping[str, Mapping[str, Any]], figure: str) -> dict[str, dict[str, list[Point]]]:
    """Panels of `acceptance_by_depth.png`: "T0" -> method -> points, over all sets together (or the only one)."""
    curves = by_depth(metrics, figure)
    pooled = {where[1:] for where in curves if where[0] == "all"}
    panels: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    for (name, temperature, method), points in sorted(curves.items()):
        if name == "all" or (temperature, method) not in pooled:
            panels[temperature][method] = points
    return dict(panels)


def plot_alpha_by_depth(metrics: Mapping[str, Mapping[str, Any]], path: str | Path, *, title: str) -> Path:
    """Share of rounds that reach a depth whose draft token is accepted there, with 95 % intervals; a panel each for
    temperature and method. UserError when the results hold no `alpha_at_depth`."""
    panels = alpha_by_depth(metrics)
    if not panels:
        raise UserError("results.json: no alpha_at_depth in it; run eval.decode first")
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(max(6.4, 4.6 * num_columns), 0.6 + 4.0 * num_rows), dpi=DPI, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, sets) in zip(grid.flat, panels.items()):
        _by_depth(axes, sets)
        axes.set(title=panel, xlabel="depth of the drafted token")
    for axes in grid[:, 0]:
        axes.set_ylabel("accepted / rounds that reached the depth")
    grid[0, 0].legend(frameon=False)
    figure.suptitle(f"{title}\nacceptance by depth, 95 % intervals over prompts", fontsize=11)
    return _write(figure, path)


def plot_acceptance_by_depth(metrics: Mapping[str, Mapping[str, Any]], path: str | Path, *, title: str) -> Path:
    """Methods compared, a column for each temperature. Above: of the rounds that reached a depth, the share that
    accepted a token there. Below: the share of all rounds that accepted so many tokens; their sum is tau - 1.

    95 % intervals over prompts. UserError when the results hold no `alpha_at_depth`.
    """
    figures = {
        "alpha_at_depth": "accepted at depth d /\nrounds that reached it",
        "survival_at_depth": "rounds that accepted\nd tokens or more / rounds",
    }
    panels = {name: acceptance_by_depth(metrics, name) for name in figures}
    temperatures = sorted(panels["alpha_at_depth"], key=lambda name: float(name.removeprefix("T")))
    if not temperatures:
        raise UserError("results.json: no alpha_at_depth in it; run eval.decode first")
    methods = list(dict.fromkeys(name for sets in panels["alpha_at_depth"].values() for name in sets))
    styles = {name: i for i, name in enumerate(methods)}
    figure = Figure(figsize=(max(6.8, 5.0 * len(temperatures)), 7.4), dpi=DPI, layout="constrained")
    grid = figure.subplots(2, len(temperatures), sharey="row", sharex="col", squeeze=False)
    for row, (name, label) in zip(grid, figures.items()):
        row[0].set_ylabel(label)
        for axes, temperature in zip(row, temperatures):
            _by_depth(axes, panels[name].get(temperature, {}), styles)
    for top, bottom, temperature in zip(*grid, temperatures):
        top.set_title(f"temperature {temperature.removeprefix('T')}", fontsize=11)
        bottom.set_xlabel("depth d of the drafted token")
    handles = {label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels())}
    handles = {name: handles[name] for name in methods}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
    figure.suptitle(f"{title}\nacceptance by depth, 95 % intervals over prompts", fontsize=11)
    return _write(figure, path)


def by_temperature(metrics: Mapping[str, Mapping[str, Any]], figure: str) -> dict[str, list[tuple[float, ...]]]:
    """`figure/all/T0.7/chain_k4`: method -> (temperature, value, low, high), over all sets (or the only one)."""
    found: dict[tuple[str, float], tuple[str, tuple[float, ...]]] = {}
    for key, metric in metrics.items():
        match = re.fullmatch(rf"{figure}/([^/]+)/T([^/]+)/([^/]+)", key)
        if match is None or metric["value"] is None:
            continue
        where = match[3], float(match[2])
        if match[1] == "all" or where not in found:
            interval = metric["ci95"] if metric["ci95"] and None not in metric["ci95"] else (metric["value"],) * 2
            found[where] = match[1], (where[1], metric["value"], *interval)
    curves: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for (method, _), (_, point) in sorted(found.items()):
        curves[method].append(point)
    return dict(curves)


def plot_by_temperature(metrics: Mapping[str, Mapping[str, Any]], path: str | Path, *, title: str) -> Path:
    """Acceptance, tokens a target forward and speed-up of each method against temperature, with 95 % intervals; beside
    the live acceptance the teacher-forced one on held-out text. What was not measured has no panel.

    UserError when the results hold none of these.
    """
    figures = {
        "alpha": ("acceptance alpha", "accepted / judged drafted tokens"),
        "tau": ("tokens a target forward, tau", "tokens a round"),
        "speedup": ("speed-up", "plain time / speculative time"),
    }
    panels = {name: by_temperature(metrics, name) for name in figures}
    held_out = [
        (float(match[1]), metric["value"], *metric["ci95"])
        for key, metric in metrics.items()
        if (match := re.fullmatch(r"alpha_expected/held_out/T([^/]+)", key)) and metric["value"] is not None
    ]
    shown = [name for name in figures if panels[name] or (name == "alpha" and held_out)]
    if not shown:
        raise UserError("results.json: neither alpha_expected nor decoded texts in it; run eval.alpha or eval.decode")
    methods = sorted({method for curves in panels.values() for method in curves})
    figure = Figure(figsize=(max(6.8, 4.4 * len(shown)), 4.8), dpi=DPI, layout="constrained")
    grid = figure.subplots(1, len(shown), squeeze=False)[0]
    handles = {}
    for axes, name in zip(grid, shown):
        for method, points in panels[name].items():
            i = methods.index(method)
            handles[method] = _errorbar(axes, points, (i - (len(methods) - 1) / 2) * 0.012, i)
        if name == "alpha" and held_out:
            handles["held-out text, teacher-forced"] = _errorbar(axes, sorted(held_out), 0.0, None)
        if name == "speedup":
            axes.axhline(1, color="black", linewidth=1, linestyle=":")
        temperatures = {point[0] for points in panels[name].values() for point in points}
        axes.set_xticks(sorted(temperatures | ({point[0] for point in held_out} if name == "alpha" else set())))
        axes.margins(x=0.12)
        axes.set(title=figures[name][0], xlabel="temperature", ylabel=figures[name][1])
        axes.set_ylim(0, 1.02 if name == "alpha" else None)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
    figure.suptitle(f"{title}\nby temperature, 95 % intervals over prompts (held-out text: rows)", fontsize=11)
    return _write(figure, path)


def _errorbar(axes: Axes, points: Sequence[tuple[float, ...]], shift: float, style: int | None) -> Any:
    """(x, value, low, high) joined by a line; style None: grey, for what the others are compared with."""
    x, value, low, high = np.asarray(points, dtype=np.float64).T
    look = {"color": "0.45", "marker": "x", "linestyle": "-."}
    if style is not None:
        look = {"color": COLOURS[style % 6], "marker": MARKERS[style % 6], "linestyle": DASHES[style // 6 % 3]}
    return axes.errorbar(x + shift, value, yerr=np.abs([value - low, high - value]), capsize=3, linewidth=1.5, **look)


def plot_run(metrics_csv: str | Path, results: Mapping[str, Any], out_dir: str | Path, *, title: str) -> list[Path]:
    """All plots of a run that its files allow: loss.png, val_alpha.png, alpha_by_depth.png, acceptance_by_depth.png and
    by_temperature.png."""
    out_dir, paths = Path(out_dir), []
    if Path(metrics_csv).is_file() and "train/loss" in (columns := read_metrics_csv(metrics_csv)):
        metric = results["metrics"].get("alpha_expected/held_out/T1")
        final = (metric["value"], *metric["ci95"]) if metric and metric["ci95"] else None
        paths.append(plot_loss(columns, out_dir / "loss.png", title=f"{title}: loss"))
        paths.append(
            plot_val_alpha(columns, out_dir / "val_alpha.png", title=f"{title}: held-out acceptance", final=final)
        )
    if alpha_by_depth(results["metrics"]):
        paths.append(plot_alpha_by_depth(results["metrics"], out_dir / "alpha_by_depth.png", title=title))
        paths.append(plot_acceptance_by_depth(results["metrics"], out_dir / "acceptance_by_depth.png", title=title))
    if any(key.startswith(("alpha_expected/held_out/", "tau/")) for key in results["metrics"]):
        paths.append(plot_by_temperature(results["metrics"], out_dir / "by_temperature.png", title=title))
    return paths


def _by_depth(axes: Axes, curves: Mapping[str, Sequence[Point]], styles: Mapping[str, int] | None = None) -> None:
    """Curves with intervals, side by side. styles: the colour of each name, by default in order."""
    for i, (name, points) in enumerate(curves.items()):
        depth, value, low, high = np.asarray(points).T
        style = i if styles is None else styles[name]
        shift = (i - (len(curves) - 1) / 2) * min(0.08, 0.5 / len(curves))
        axes.errorbar(
            depth + shift, value, yerr=np.abs([value - low, high - value]), color=COLOURS[style % 6],
            marker=MARKERS[style % 6], linestyle=DASHES[style // 6 % 3], capsize=3, linewidth=1.5, label=name,
        )  # fmt: skip
    axes.set_ylim(0, 1.02)
    if curves:
        axes.set_xticks(sorted({point[0] for points in curves.values() for point in points}))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.0, 4.4), dpi=DPI, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Figure, axes: Axes, path: str | Path) -> Path:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return _write(figure, path)


def _write(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


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
