"""Figures of a results file in order, and tables of them on the terminal."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eval.results import Metric


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str | None = None) -> None:
    """A table on stdout: the first column left, figures right. Nothing is cut off where the output is no terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    told = {"style": "italic", "soft_wrap": True, "markup": False, "highlight": False}
    console.print(title, **told)  # a table's own title would be broken to its width
    console.print(table)
    if note:
        console.print(note, **told)


DECODE_COLUMNS = ("alpha", "tau", "nodes", "plain tok/s", "spec tok/s", "speed-up", "predicted")


def decode_row(metrics: Mapping[str, Metric], where: str) -> tuple[str, ...]:
    """Cells under DECODE_COLUMNS of one set, temperature and method; where: `mt_bench/T0/chain_k4`. What was not
    measured is a dash, and a slow-down says so."""

    def cell(name: str, form: str | None = None) -> str:
        metric = metrics.get(f"{name}/{where}")
        if metric is None:
            return "-"
        return format(metric.value, form) if form else str(metric)

    speedup = metrics.get(f"speedup/{where}")
    return (
        cell("alpha"),
        cell("tau"),
        cell("tree_nodes", ".1f"),
        cell("plain_tokens_per_s", ".1f"),
        cell("spec_tokens_per_s", ".1f"),
        cell("speedup") + (" slower" if speedup is not None and speedup.value < 1 else ""),
        cell("predicted_speedup", ".2f"),
    )


def as_metrics(results: Mapping[str, Any]) -> dict[str, Metric]:
    """The figures of a results file that have a value."""
    return {
        key: Metric(m["value"], tuple(m["ci95"]) if m["ci95"] and None not in m["ci95"] else None, m["n"])
        for key, m in results["metrics"].items()
        if m["value"] is not None
    }


def decoded(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(temperature, set, method) of all that was decoded: by temperature, all sets together first."""
    matches = [re.fullmatch(r"tau/([^/]+)/(T\d[^/]*)/([^/]+)", key) for key in metrics]
    found = [(match[2], match[1], match[3]) for match in matches if match]
    return sorted(found, key=lambda each: (float(each[0].removeprefix("T")), each[1] != "all", each[1]))


def overall(metrics: Mapping[str, Metric]) -> dict[str, dict[str, str]]:
    """temperature -> method -> set of its overall figures: `all`, or without it the first set."""
    found: dict[str, dict[str, str]] = {}
    for temperature, name, method in decoded(metrics):  # `all` comes first
        found.setdefault(temperature, {}).setdefault(method, name)
    return found


def vocabulary_lines(metrics: Mapping[str, Metric]) -> list[str]:
    """A sentence for each temperature at which the target leaves the draft vocabulary."""
    lines = []
    for temperature, methods in overall(metrics).items():
        keys = [f"draft_vocab_share/{name}/{temperature}/{method}" for method, name in methods.items()]
        share = next((metrics[key] for key in keys if key in metrics), None)
        if share is not None and share.value < 1:
            degrees = f"T = {temperature.removeprefix('T')}"
            told = f"the draft vocabulary holds {share.value:.1%} of the plain texts' tokens ({share.n} prompts)"
            lines.append(f"{degrees}: {told}; the others are never drafted.")
    return lines


def print_metrics(title: str, metrics: Mapping[str, Metric], note: str | None = None) -> None:
    """Every metric with its 95 % interval and the number of rows or prompts behind it."""
    rows = [(key, f"{m.value:.4g}", _interval(m), str(m.n)) for key, m in metrics.items()]
    print_table(title, ("metric", "value", "95 % interval", "n"), rows, note)


def _interval(metric: Metric) -> str:
    return "" if metric.ci95 is None else f"{metric.ci95[0]:.4g} to {metric.ci95[1]:.4g}"
