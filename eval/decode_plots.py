"""PNG plots of the decode loop: acceptance by depth, of one method by set, of all methods side by side; and all
methods by temperature."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.plots import COLOURS, DASHES, MARKERS, new_figure, tidy, write_figure
from models.errors import UserError

Point = tuple[int, float, float, float]  # depth, value, low, high


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
    """Panels of `alpha_by_depth.png`: "T0, chain_k4" -> set -> points; low temperatures first."""
    panels: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    curves = sorted(by_depth(metrics, "alpha_at_depth").items(), key=lambda each: float(each[0][1].removeprefix("T")))
    for (name, temperature, method), points in curves:
        panels[f"{temperature}, {method}"][name] = points
    return dict(panels)


def acceptance_by_depth(metrics: Mapping[str, Mapping[str, Any]], figure: str) -> dict[str, dict[str, list[Point]]]:
    """Panels of `acceptance_by_depth.png`: "T0" -> method -> points, over all sets together (or the first one)."""
    curves = by_depth(metrics, figure)
    pooled = {where[1:] for where in curves if where[0] == "all"}
    panels: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    for (name, temperature, method), points in sorted(curves.items(), key=lambda each: each[0][1:]):
        if name == "all" or (temperature, method) not in pooled:
            panels[temperature].setdefault(method, points)
    return dict(panels)


def plot_alpha_by_depth(metrics: Mapping[str, Mapping[str, Any]], path: str | Path, *, title: str) -> Path:
    """Share of rounds that reach a depth whose draft token is accepted there, with 95 % intervals; a panel each for
    temperature and method. UserError when the results hold no `alpha_at_depth`."""
    panels = alpha_by_depth(metrics)
    if not panels:
        raise UserError("results.json: no alpha_at_depth in it; run eval.decode first")
    names = list(dict.fromkeys(name for sets in panels.values() for name in sets))
    styles = {name: i for i, name in enumerate(names)}  # a set has its colour in every panel
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = new_figure(max(6.4, 4.6 * num_columns), 0.6 + 4.0 * num_rows)
    grid = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, sets) in zip(grid.flat, panels.items()):
        _by_depth(axes, sets, styles)
        axes.set(title=panel, xlabel="depth of the drafted token")
    for axes in grid[:, 0]:
        axes.set_ylabel("accepted / rounds that reached the depth")
    _legend(figure, grid, names, most_columns=5)
    figure.suptitle(f"{title}\nacceptance by depth, 95 % intervals over prompts", fontsize=11)
    return write_figure(figure, path)


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
    temperatures = sorted(set().union(*panels.values()), key=lambda name: float(name.removeprefix("T")))
    if not temperatures:
        raise UserError("results.json: no alpha_at_depth in it; run eval.decode first")
    methods = list(dict.fromkeys(name for panel in panels.values() for curves in panel.values() for name in curves))
    styles = {name: i for i, name in enumerate(methods)}
    figure = new_figure(max(6.8, 5.0 * len(temperatures)), 7.4)
    grid = figure.subplots(2, len(temperatures), sharey="row", sharex="col", squeeze=False)
    for row, (name, label) in zip(grid, figures.items()):
        row[0].set_ylabel(label)
        for axes, temperature in zip(row, temperatures):
            _by_depth(axes, panels[name].get(temperature, {}), styles)
    for top, bottom, temperature in zip(*grid, temperatures):
        top.set_title(f"temperature {temperature.removeprefix('T')}", fontsize=11)
        bottom.set_xlabel("depth d of the drafted token")
    _legend(figure, grid, methods, most_columns=3)
    figure.suptitle(f"{title}\nacceptance by depth, 95 % intervals over prompts", fontsize=11)
    return write_figure(figure, path)


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
    figure = new_figure(max(6.8, 4.4 * len(shown)), 4.8)
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
        tidy(axes)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
    figure.suptitle(f"{title}\nby temperature, 95 % intervals over prompts (held-out text: rows)", fontsize=11)
    return write_figure(figure, path)


def _legend(figure: Figure, grid: np.ndarray, names: Sequence[str], *, most_columns: int) -> None:
    """One below all panels; not every name is in each of them."""
    handles = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=min(most_columns, len(names)),
        frameon=False,
    )  # fmt: skip


def _errorbar(axes: Axes, points: Sequence[tuple[float, ...]], shift: float, style: int | None) -> Any:
    """(x, value, low, high) joined by a line; style None: grey, for what the others are compared with."""
    x, value, low, high = np.asarray(points, dtype=np.float64).T
    look = {"color": "0.45", "marker": "x", "linestyle": "-."}
    if style is not None:
        look = {"color": COLOURS[style % 6], "marker": MARKERS[style % 6], "linestyle": DASHES[style // 6 % 3]}
    return axes.errorbar(x + shift, value, yerr=np.abs([value - low, high - value]), capsize=3, linewidth=1.5, **look)


def _by_depth(axes: Axes, curves: Mapping[str, Sequence[Point]], styles: Mapping[str, int]) -> None:
    """Curves with intervals, side by side. styles: the colour of each name."""
    for i, (name, points) in enumerate(curves.items()):
        depth, value, low, high = np.asarray(points).T
        style = styles[name]
        shift = (i - (len(curves) - 1) / 2) * min(0.08, 0.5 / len(curves))
        axes.errorbar(
            depth + shift, value, yerr=np.abs([value - low, high - value]), color=COLOURS[style % 6],
            marker=MARKERS[style % 6], linestyle=DASHES[style // 6 % 3], capsize=3, linewidth=1.5, label=name,
        )  # fmt: skip
    axes.set_ylim(0, 1.02)
    if curves:
        axes.set_xticks(sorted({point[0] for points in curves.values() for point in points}))
    tidy(axes)
