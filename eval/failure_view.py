"""What is told of failure modes: a sentence for each place where speculation is slower, a table and a plot of a part.

A round costs `verify_cost + draft_cost` plain steps and gives tau tokens: below that many tokens it loses. A chain of K
needs an alpha with (1 - alpha^(K+1)) / (1 - alpha) above the cost (eval/theory.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from eval.plots import COLOURS, MARKERS, new_figure, tidy, write_figure
from eval.report import as_metrics, print_table
from eval.results import Metric
from eval.theory import expected_tokens
from eval.tree import TreeShape

FIGURES = (
    "speedup", "predicted_speedup", "tau", "alpha", "verify_cost", "draft_cost", "plain_tokens_per_s",
    "spec_tokens_per_s", "loop_overhead",
)  # fmt: skip
COLUMNS = {
    "speedup": "speed-up", "tau": "tau", "alpha": "alpha", "verify_cost": "verify", "draft_cost": "draft",
    "plain_tokens_per_s": "plain tok/s", "spec_tokens_per_s": "spec tok/s",
}  # fmt: skip
AXIS = {
    "temperature": "temperature T",
    "draft_len": "drafted tokens K",
    "batch": "batch size",
    "kinds": "kind of text",
}
PANELS = {
    "temperature": ("speedup", "tau", "alpha"),
    "draft_len": ("speedup", "tau", "cost"),
    "batch": ("speedup", "tokens_per_s", "cost"),
    "kinds": ("speedup", "tau"),
}
LABELS = {
    "speedup": "speed-up over plain decoding",
    "tau": "tokens a round, tau",
    "alpha": "acceptance alpha (chains)",
    "cost": "plain target steps a round",
    "tokens_per_s": "tokens/s of the whole batch",
}
COSTS = {"cost of a round: draft and verify": ("verify_cost", "draft_cost"), "verify alone": ("verify_cost",)}
MARKED_TEMPERATURE = 1.5  # from here on sampled text of a small model is noise

Figures = Mapping[str, Metric]  # "speedup/chain_k3/0.25"


def sentences(figures: Figures, part: str) -> list[str]:
    """One for each place where speculation is slower than plain decoding, with the reason; else that there is none."""
    measured = {key.removeprefix("speedup/"): m for key, m in figures.items() if key.startswith("speedup/")}
    told = [
        f"{describe(where, part)}: {_times(metric)}: slower than plain{_doubt(metric)}, because "
        + reason(figures, where, part)
        for where, metric in measured.items()
        if metric.value < 1
    ]
    if measured and not told:
        where, least = min(measured.items(), key=lambda each: each[1].value)
        told.append(f"nowhere slower than plain; the least gain is that of {describe(where, part)}: {_times(least)}")
    return told


def describe(where: str, part: str) -> str:
    """chain_k3/2 -> "chain_k3 at T = 2"."""
    method, place = where.split("/")
    return {
        "temperature": f"{method} at T = {place}",
        "draft_len": f"chain_k{place}",
        "batch": f"{method} at batch size {place}",
        "kinds": f"{method} on {place}",
    }[part]


def reason(figures: Figures, where: str, part: str) -> str:
    """What a round gives and costs, and the alpha that a chain would need."""
    found = [figures.get(f"{name}/{where}") for name in ("tau", "verify_cost", "draft_cost")]
    if None in found:
        return "texts end with their first tokens: no rounds to judge"
    tau, verify, draft = (metric.value for metric in found)
    cost = verify + draft
    parts = f"{verify:.2f} to verify, {draft:.2f} to draft"
    round_told = f"a round gives {tau:.2f} tokens and costs {cost:.2f} plain steps ({parts})"
    if tau >= cost:
        overhead = figures[f"loop_overhead/{where}"].value
        rows = ", and rows of a batch wait for the slowest" if part == "batch" else ""
        return f"{round_told}, which would gain; prefill and the loop's own work ({overhead:.0%}) eat it{rows}"
    shape = _shape(where, part)
    alpha = figures.get(f"alpha/{where}")
    if shape.kind != "chain" or alpha is None:
        return round_told
    needed = break_even_alpha(cost, shape.depth)
    if needed is None:
        return f"{round_told}: more than its {shape.depth + 1} tokens at best, whatever is accepted"
    if alpha.value > needed:
        return f"{round_told}: alpha {alpha.value:.2f} would do, but texts end within rounds or acceptance is uneven"
    return f"{round_told}: alpha is {alpha.value:.2f}, and K = {shape.depth} needs more than {needed:.2f}"


def break_even_alpha(cost: float, draft_len: int) -> float | None:
    """The alpha at which a chain's expected tokens equal the cost of its round; None where none is enough."""
    if cost >= draft_len + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, draft_len) < cost else (low, middle)
    return high


def _shape(where: str, part: str) -> TreeShape:
    method, place = where.split("/")
    return TreeShape.parse(f"chain_k{place}" if part == "draft_len" else method)


def _times(metric: Metric) -> str:
    interval = "" if metric.ci95 is None else f" [{metric.ci95[0]:.2f}, {metric.ci95[1]:.2f}]"
    return f"{metric.value:.2f}x{interval}"


def _doubt(metric: Metric) -> str:
    return " (or not: the interval reaches above 1)" if metric.ci95 is not None and metric.ci95[1] > 1 else ""


def print_part(part: Mapping[str, Any]) -> None:
    """A part's table and sentences."""
    figures, rows = as_metrics(part), []
    for where in (key.removeprefix("speedup/") for key in figures if key.startswith("speedup/")):
        cells = [figures.get(f"{name}/{where}") for name in COLUMNS]
        told = [
            "-" if m is None else str(m) if name in ("speedup", "tau") else f"{m.value:.2f}"
            for name, m in zip(COLUMNS, cells)
        ]
        rows.append((describe(where, part["name"]), *told))
    print_table(f"{part['title']} [95 % interval]", ("method", *COLUMNS.values()), rows)
    for sentence in part["sentences"]:
        print(f"  {sentence}")


def plot_part(part: Mapping[str, Any], path: str | Path, *, title: str) -> Path:
    """The part's panels, with 95 % intervals over prompts (batches); where speculation is slower is shaded."""
    name, figures = part["name"], as_metrics(part)
    figure = new_figure(4.3 * len(PANELS[name]), 4.6)
    grid = figure.subplots(1, len(PANELS[name]), squeeze=False)[0]
    for axes, panel in zip(grid, PANELS[name]):
        if panel == "cost":
            _cost_lines(axes, figures, name)
        elif panel == "tokens_per_s":
            _lines(axes, figures, name, "spec_tokens_per_s")
            _lines(axes, figures, name, "plain_tokens_per_s", label="plain", first=1)
        else:
            _lines(axes, figures, name, panel)
        if panel == "speedup":
            axes.axhspan(0, 1, color="black", alpha=0.07, linewidth=0, label="slower than plain")
            axes.set_ylim(0, None)
        if name == "temperature":
            axes.axvline(MARKED_TEMPERATURE, color="grey", linestyle=":", linewidth=1.5)
            axes.text(
                MARKED_TEMPERATURE, 1.01, f"T = {MARKED_TEMPERATURE:g}", transform=axes.get_xaxis_transform(),
                ha="center", fontsize=8, color="grey",
            )  # fmt: skip
        axes.set(xlabel=AXIS[name], ylabel=LABELS[panel])
        tidy(axes)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(f"{title}: {part['title'].lower()}", fontsize=11)
    return write_figure(figure, path)


def _lines(axes: Axes, figures: Figures, part: str, figure: str, *, label: str | None = None, first: int = 0) -> None:
    """A line for each method, in the colours from `first` on. Kinds of text have no order: their points stand apart."""
    keys = [key.split("/")[1:] for key in figures if key.startswith(f"{figure}/")]
    methods, places = (list(dict.fromkeys(column)) for column in zip(*keys)) if keys else ([], [])
    ticks = _positions(places, part)
    for number, method in enumerate(methods):
        found = [place for place in places if f"{figure}/{method}/{place}" in figures]
        metrics = [figures[f"{figure}/{method}/{place}"] for place in found]
        value = np.array([m.value for m in metrics])
        low, high = np.array([m.ci95 or (m.value, m.value) for m in metrics]).T
        offset = 0.16 * (number - (len(methods) - 1) / 2) if part == "kinds" else 0.0
        axes.errorbar(
            [ticks[place] + offset for place in found], value, yerr=np.abs([value - low, high - value]),
            color=COLOURS[(first + number) % 6], marker=MARKERS[(first + number) % 6], capsize=3, linewidth=1.5,
            linestyle="none" if part == "kinds" else "-", label=label or method,
        )  # fmt: skip
    if part in ("batch", "kinds", "draft_len"):
        axes.set_xticks(list(ticks.values()), list(ticks))


def _cost_lines(axes: Axes, figures: Figures, part: str) -> None:
    """Costs of a round of the only method, and the tokens it gives: above the cost it gains."""
    wheres = [key.removeprefix("verify_cost/") for key in figures if key.startswith("verify_cost/")]
    ticks = _positions([where.split("/")[1] for where in wheres], part)
    for number, (label, names) in enumerate(COSTS.items()):
        cost = [sum(figures[f"{name}/{where}"].value for name in names) for where in wheres]
        axes.plot(ticks.values(), cost, color=COLOURS[2 + number], marker=MARKERS[2 + number], label=label)
    tau = [figures[f"tau/{where}"].value for where in wheres]
    axes.plot(ticks.values(), tau, color="black", linestyle="--", linewidth=1.2, label="tokens a round gives")
    axes.set_xticks(list(ticks.values()), list(ticks))
    axes.set_ylim(0, None)


def _positions(places: Sequence[str], part: str) -> dict[str, float]:
    """Where a place stands on the axis: numbers as they are, batch sizes and kinds side by side."""
    if part in ("batch", "kinds"):
        return {place: float(number) for number, place in enumerate(places)}
    return {place: float(place) for place in places}
