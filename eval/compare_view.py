"""The tables and the plot of `eval.compare`, from the figures that results.json holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from eval.compare_rows import is_batch, is_generate
from eval.plots import COLOURS, new_figure, tidy, write_figure
from eval.results import Metric

COLUMNS = ("tau", "alpha", "tok/s", "speed-up over plain", "peak GB", "other texts")
Labels = Mapping[str, str]  # key of a row -> draft, in the order of the table


def cells(metrics: Mapping[str, Metric], where: str) -> tuple[str, ...]:
    """Under COLUMNS; where: `T0/eagle3/chain_k3`. What was not measured is a dash, and a slow-down says so."""

    def cell(name: str, form: str) -> str:
        metric = metrics.get(f"{name}/{where}")
        if metric is None:
            return "-"
        if metric.ci95 is None:
            return format(metric.value, form)
        return f"{metric.value:{form}} [{metric.ci95[0]:{form}}, {metric.ci95[1]:{form}}]"

    speedup = metrics.get(f"speedup/{where}")
    is_slower = speedup is not None and speedup.value < 1
    return (
        cell("tau", ".2f"),
        cell("alpha", ".3f"),
        cell("tokens_per_s", ".1f"),
        cell("speedup", ".2f") + (" slower" if is_slower else ""),
        cell("peak_gb", ".2f"),
        _other_texts(metrics, where),
    )


def _other_texts(metrics: Mapping[str, Metric], where: str) -> str:
    """Greedy texts that part from the plain ones: at near ties, and by failure."""
    failures, near_ties = (metrics.get(f"greedy_{name}/{where}") for name in ("failures", "near_ties"))
    if failures is None:
        return "-"
    text = f"{near_ties.value:.0f} of {near_ties.n}"
    return text + (f", {failures.value:.0f} FAIL" if failures.value else "")


def tables(metrics: Mapping[str, Metric], labels: Labels, temperature: float) -> dict[str, list[tuple[str, ...]]]:
    """Title -> row, draft and COLUMNS of what was measured at a temperature: batch 1, then batches."""
    found: dict[str, list[tuple[str, ...]]] = {"batch 1": [], "batches": []}
    for key, label in labels.items():
        where = f"T{temperature:g}/{key}"
        if f"tau/{where}" in metrics:
            found["batches" if is_batch(key) else "batch 1"].append((key, label, *cells(metrics, where)))
    return {f"T = {temperature:g}, {name}": rows for name, rows in found.items() if rows}


def sentences(metrics: Mapping[str, Metric], labels: Labels, temperature: float) -> list[str]:
    """How our plain decoding stands to generate's, what is fastest, and what is slower than plain."""
    degrees = f"T = {temperature:g}"
    told = []
    if ratio := metrics.get(f"plain_vs_generate/T{temperature:g}"):
        is_fair = ratio.value >= 1
        told.append(
            f"{degrees}: plain decoding by this engine is {_interval(ratio)} times as fast as transformers' generate"
            + (": a fair base" if is_fair else ": SLOWER, so that speed-ups over it flatter")
        )
    speedups = {key: metrics.get(f"speedup/T{temperature:g}/{key}") for key in labels if key != "plain"}
    ours = {key: m for key, m in speedups.items() if m and not (is_generate(key) or is_batch(key))}
    if ours:
        fastest = max(ours, key=lambda key: ours[key].value)
        told.append(f"{degrees}: fastest at batch 1 is {fastest}, {_interval(ours[fastest])} times plain decoding")
    if slower := [key for key, m in speedups.items() if m and m.value < 1]:
        told.append(f"{degrees}: slower than plain decoding: {', '.join(slower)}")
    return told


def _interval(metric: Metric) -> str:
    return f"{metric.value:.2f}" + ("" if metric.ci95 is None else f" [{metric.ci95[0]:.2f}, {metric.ci95[1]:.2f}]")


def markdown(
    metrics: Mapping[str, Metric], labels: Labels, temperatures: Sequence[float], *, title: str, notes: Sequence[str]
) -> str:
    lines = [f"# {title}", "", *(f"{note}  " for note in notes), ""]
    for temperature in temperatures:
        for name, rows in tables(metrics, labels, temperature).items():
            lines += [f"## {name}", "", *_markdown_table(("row", "draft", *COLUMNS), rows), ""]
        lines += [f"- {sentence}" for sentence in sentences(metrics, labels, temperature)] + [""]
    return "\n".join(lines)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *([f"`{row[0]}`", *row[1:]] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def plot_compare(
    metrics: Mapping[str, Metric], labels: Labels, temperatures: Sequence[float], path: str | Path, *, title: str
) -> Path:
    """Speed-up over plain decoding of every row with its 95 % interval, a panel for each temperature."""
    shown = [key for key in labels if any(f"speedup/T{t:g}/{key}" in metrics for t in temperatures)]
    drafts = list(dict.fromkeys(labels[key] for key in shown))
    figure = new_figure(4.2 + 3.6 * len(temperatures), 1.6 + 0.3 * len(shown))
    grid = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(grid, temperatures):
        _bars(axes, metrics, labels, shown, drafts, temperature)
        axes.set(title=f"temperature {temperature:g}", xlabel="speed-up over plain decoding")
    grid[0].set_yticks(range(len(shown)), shown)
    grid[0].invert_yaxis()
    handles = {label: bar for axes in grid for bar, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(
        [handles[name] for name in drafts if name in handles],
        [f"draft: {name}" for name in drafts if name in handles],
        loc="outside lower center", ncols=min(4, len(handles)), frameon=False,
    )  # fmt: skip
    told = "95 % intervals over prompts (batches: over batches); left of the line: slower; pale: transformers' generate"
    figure.suptitle(f"{title}\n{told}", fontsize=11)
    return write_figure(figure, path)


def _bars(
    axes: Axes, metrics: Mapping[str, Metric], labels: Labels, shown: Sequence[str], drafts: Sequence[str], t: float
) -> None:
    widest = 1.0
    for place, key in enumerate(shown):
        metric = metrics.get(f"speedup/T{t:g}/{key}")
        if metric is None:
            continue
        low, high = metric.ci95 or (metric.value, metric.value)
        colour = COLOURS[drafts.index(labels[key]) % len(COLOURS)]
        alpha = 0.45 if is_generate(key) else 0.9
        axes.barh(place, metric.value, color=colour, height=0.7, label=labels[key], alpha=alpha)
        errors = np.abs([[metric.value - low], [high - metric.value]])
        axes.errorbar(metric.value, place, xerr=errors, color="black", capsize=2, linewidth=1, linestyle="none")
        axes.annotate(
            f"{metric.value:.2f}", (high, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
        widest = max(widest, high)
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set_xlim(0, widest * 1.15)
    axes.set_axisbelow(True)
    tidy(axes)
