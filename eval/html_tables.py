"""Parts of report.html: the sentences and tables of a results file."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from eval.html_view import printable
from eval.report import DECODE_COLUMNS, as_metrics, decode_row, decoded, overall, vocabulary_lines
from eval.results import Metric

TEXT_COLUMNS = ("T", "set", "method", "key")
COMPARED = {  # figure of outputs/compare -> column
    "tau": "tau",
    "alpha": "alpha",
    "tokens_per_s": "tok/s",
    "speedup": "speed-up",
    "peak_gb": "peak memory [GB]",
}


def sentences(metrics: Mapping[str, Metric]) -> list[str]:
    """What to take from the table: the fastest method at each temperature, all that is slower than plain, and what a
    draft vocabulary leaves out."""
    lines = []
    for temperature, methods in overall(metrics).items():
        degrees = f"T = {temperature.removeprefix('T')}"
        speedups = {
            method: metrics[key]
            for method, name in methods.items()
            if (key := f"speedup/{name}/{temperature}/{method}") in metrics
        }
        if not speedups:
            continue
        fastest = max(speedups, key=lambda method: speedups[method].value)
        ratio, tau = speedups[fastest], metrics[f"tau/{methods[fastest]}/{temperature}/{fastest}"]
        behind = f"with {_short(tau)} tokens a target forward ({methods[fastest]}, {tau.n} prompts)"
        if ratio.value < 1:
            told = (
                f"every method is slower than plain decoding; the least so is {fastest}, {_short(ratio)} times as fast"
            )
            lines.append(("told fastest", f"{degrees}: {told}, {behind}."))
            continue
        told = f"{fastest} is the fastest, {_short(ratio)} times as fast as plain decoding"
        lines.append(("told fastest", f"{degrees}: {told}, {behind}."))
        slower = [
            f"{method} on {name} ({_short(each)})"
            for at, name, method in decoded(metrics)
            if at == temperature and (each := metrics.get(f"speedup/{name}/{at}/{method}")) and each.value < 1
        ]
        if slower:
            lines.append(("told", f"{degrees}, slower than plain decoding: {', '.join(slower)}."))
    lines += [("told", line) for line in vocabulary_lines(metrics)]
    return [f'<p class="{classes}">{html_text(line)}</p>' for classes, line in lines]


def _short(metric: Metric) -> str:
    low, high = metric.ci95 or (None, None)
    return f"{metric.value:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def decode_table(metrics: Mapping[str, Metric]) -> str | None:
    rows, in_short = [], overall(metrics)
    for temperature, name, method in decoded(metrics):
        where = f"{name}/{temperature}/{method}"
        cells = decode_row(metrics, where)
        rows.append(
            (
                (temperature.removeprefix("T"), name, method, *cells, str(metrics[f"tau/{where}"].n)),
                ("slower" if "slower" in cells[DECODE_COLUMNS.index("speed-up")] else "")
                + (" overall" if in_short[temperature][method] == name else ""),
            )
        )
    if not rows:
        return None
    return table(
        ("T", "set", "method", *DECODE_COLUMNS, "prompts"),
        rows,
        "The decode loop against plain decoding by the same engine [95 % intervals over prompts]. alpha: accepted over "
        "judged drafted tokens, chains only; tau: tokens a target forward; nodes: drafted tokens a round; predicted: "
        "tau over the cost of a round in plain steps.",
    )


def greedy_table(metrics: Mapping[str, Metric]) -> str | None:
    """Whether greedy texts are the target's own."""
    rows = []
    for method, name in overall(metrics).get("T0", {}).items():
        parted, failures, gap = (
            metrics.get(f"greedy_{what}/{name}/T0/{method}") for what in ("differences", "failures", "gap_max")
        )
        if parted is not None:
            cells = (method, str(parted.n), f"{parted.value:.0f}", f"{gap.value:.3f}", f"{failures.value:.0f}")
            rows.append((cells, "slower" if failures.value else ""))
    if not rows:
        return None
    return table(
        (
            "method",
            "greedy texts",
            "part from plain decoding",
            "widest gap there [logits]",
            "not by a near tie: defects",
        ),
        rows,
        "Greedy texts against plain decoding, which they must equal but for near ties of the target's logits in bf16.",
    )


def held_out_table(metrics: Mapping[str, Metric]) -> str | None:
    prefix = "alpha_expected/held_out/"
    keys = [key.removeprefix(prefix).split("/") for key in metrics if key.startswith(prefix)]
    temperatures = sorted({key[0] for key in keys}, key=lambda name: float(name.removeprefix("T")))
    buckets = sorted({key[1] for key in keys if len(key) == 2}, key=lambda name: int(name.split("_")[1]))
    if not temperatures:
        return None
    rows = [
        (
            (
                temperature.removeprefix("T"),
                *(
                    str(metrics.get(f"{prefix}{temperature}{suffix}", "-"))
                    for suffix in ("", *(f"/{bucket}" for bucket in buckets))
                ),
            ),
            "",
        )
        for temperature in temperatures
    ]
    more = [
        f"{told} {metrics[f'{name}/held_out']}"
        for name, told in (
            ("top1_agreement", "equal best tokens:"), ("kl", "KL(target, draft) in nats:"),
            ("target_entropy", "the target's entropy in nats:"),
        )
        if f"{name}/held_out" in metrics
    ]  # fmt: skip
    if "alpha_tokens/held_out" in metrics:
        more.append(f"tokens judged: {metrics['alpha_tokens/held_out'].value:,.0f}")
    positions = [bucket.removeprefix("pos_").replace("_up", " and up").replace("_", " to ") for bucket in buckets]
    return table(
        ("T", "alpha_expected", *(f"positions {each}" for each in positions)),
        rows,
        "Teacher-forced on held-out text: the chance that a token drawn from the draft survives, mean of "
        f"sum_v min(target, draft) [95 % intervals over rows]. {'; '.join(more)}.",
    )


def compare_table(results: Mapping[str, Any]) -> str | None:
    """Of outputs/compare/results.json, keys such as `tau/T0/eagle3/chain_k3`: methods and drafts beside one another."""
    rows: dict[tuple[float, str], dict[str, Metric]] = defaultdict(dict)
    for key, metric in as_metrics(results).items():
        if match := re.fullmatch(r"(\w+)/T(\d[^/]*)/(.+)", key):
            rows[float(match[2]), match[3]][match[1]] = metric

    def speedup(figures: Mapping[str, Metric]) -> float:
        return figures["speedup"].value if "speedup" in figures else 0.0

    columns = [name for name in COMPARED if any(name in figures for figures in rows.values())]
    if not columns:
        return None
    cells = []
    fastest_first = sorted(rows.items(), key=lambda row: (row[0][0], -speedup(row[1]), row[0][1]))
    for (temperature, method), figures in fastest_first:
        is_slower = 0 < speedup(figures) < 1
        line = [str(figures.get(name, "-")) for name in columns]
        cells.append(((f"{temperature:g}", method, *line), "slower" if is_slower else ""))
    return table(
        ("T", "method", *(COMPARED[name] for name in columns)),
        cells,
        "All drafts and methods on the same prompts, interleaved in one run [95 % intervals over prompts]. Rows of "
        "batch4 and its like: against plain decoding of the same batches, intervals over batches.",
    )


def table(columns: Sequence[str], rows: Iterable[tuple[Sequence[str], str]], caption: str) -> str:
    """rows: (cells, CSS classes)."""
    kinds = [' class="text"' if column in TEXT_COLUMNS else "" for column in columns]
    head = "".join(f"<th{kind}>{html_text(column)}</th>" for kind, column in zip(kinds, columns))
    body = "".join(
        f'<tr class="{classes.strip()}">'
        f"{''.join(f'<td{kind}>{html_text(cell)}</td>' for kind, cell in zip(kinds, cells))}</tr>"
        for cells, classes in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="figures">{html_text(caption)}</p>'
    )


def all_figures(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for key, metric in metrics.items():
        value = "-" if metric["value"] is None else f"{metric['value']:.4g}"
        is_known = metric["ci95"] and None not in metric["ci95"]
        interval = f"{metric['ci95'][0]:.4g} to {metric['ci95'][1]:.4g}" if is_known else ""
        rows.append(((key, value, interval, str(metric["n"])), ""))
    held = table(("key", "value", "95 % interval", "n"), rows, "As results.json holds them.")
    return f"<details><summary>{len(rows)} figures</summary>{held}</details>"


def html_text(text: str) -> str:
    """Escaped, control characters made visible."""
    return escape(printable(text), quote=True)


def html_pre(text: str) -> str:
    return f'<pre class="wide">{html_text(text)}</pre>'
