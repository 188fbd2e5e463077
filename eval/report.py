"""Tables of figures on the terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from eval.results import Metric


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str | None = None) -> None:
    """A table on stdout: the first column left, figures right. Nothing is cut off where the output is no terminal."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def print_metrics(title: str, metrics: Mapping[str, Metric], note: str | None = None) -> None:
    """Every metric with its 95 % interval and the number of rows or prompts behind it."""
    rows = [(key, f"{m.value:.4g}", _interval(m), str(m.n)) for key, m in metrics.items()]
    print_table(title, ("metric", "value", "95 % interval", "n"), rows, note)


def _interval(metric: Metric) -> str:
    return "" if metric.ci95 is None else f"{metric.ci95[0]:.4g} to {metric.ci95[1]:.4g}"
