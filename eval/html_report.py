"""report.html, all of a run on one page that needs nothing else: python -m eval.html_report [run=NAME].

1. figures, from outputs/<run>/results.json: what is fastest, what is slower than plain decoding, the tables
2. plots: learning curves from metrics.csv, acceptance by depth and by temperature
3. generations.html, coloured by who produced each token
4. the config and the commands, from checkpoints/<run>; every figure with its interval

What a run has no file for is left out, and said. eval.decode writes the page at its end.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eval.entry import entry
from eval.html_view import page_parts, page_style, printable
from eval.plots import plot_run
from eval.report import DECODE_COLUMNS, as_metrics, decode_row, decoded, overall
from eval.results import Metric, read_results, write_atomic
from eval.run import load_run, run_of_snapshot
from eval.wandb_media import log_to_wandb
from models.errors import UserError

PLOTS = {  # file -> what to see in it
    "loss": "Training loss and held-out KL against tokens seen.",
    "val_alpha": "Acceptance at T = 1 while training; the point at the end is the final draft on more held-out text.",
    "by_temperature": "Acceptance, tokens a target forward and speed-up against temperature. Below the dotted line "
    "speculation is slower than plain decoding.",
    "acceptance_by_depth": "Above: of the rounds that reached a depth, the share that accepted a token there. Below: "
    "the share of all rounds that accepted so many tokens; the heights of a curve add up to tau - 1.",
    "alpha_by_depth": "The upper figure by set of prompts.",
}


TEXT_COLUMNS = ("T", "set", "method", "key")


def write_report(folder: str | Path, *, run_folder: Path | None = None) -> list[Path]:
    """Write the plots that the files of a run allow, and `<folder>/report.html` of all; returns their paths.

    folder: that of a results.json. run_folder: checkpoints/<run>, for the config and the training's command.
    Raises UserError when there are no results.
    """
    folder = Path(folder)
    results = read_results(folder / "results.json")
    title = f"{results['draft'].get('name', folder.name)} for {results['target'].get('name', 'the target')}"
    plots = plot_run(folder / "metrics.csv", results, folder, title=title)
    generations = folder / "generations.html"
    page = html_report(
        results,
        title=title,
        plots={path.stem: path.read_bytes() for path in plots},
        generations=generations.read_text() if generations.is_file() else None,
        config=_read(run_folder, "resolved_config.yaml"),
        run_info=json.loads(_read(run_folder, "run.json") or "{}"),
    )
    write_atomic(folder / "report.html", page)
    return [*plots, folder / "report.html"]


def html_report(
    results: Mapping[str, Any],  # as results.json holds them
    *,
    title: str,
    plots: Mapping[str, bytes],  # name -> PNG
    generations: str | None = None,  # the page of eval.html_view
    config: str | None = None,  # YAML
    run_info: Mapping[str, Any] | None = None,  # run.json; empty where there is none
) -> str:
    """The whole page."""
    metrics = as_metrics(results)
    style, content = page_parts(generations) if generations else (page_style(1), None)
    sections = [
        ("Figures", [*_sentences(metrics), _decode_table(metrics), _greedy_table(metrics), _held_out_table(metrics)]),
        ("Learning curves", [_plot(plots, name) for name in ("loss", "val_alpha")]),
        ("Acceptance by depth and temperature", [_plot(plots, name) for name in list(PLOTS)[2:]]),
        ("Generations", [f'<div class="generations">{content}</div>' if content else None]),
        ("Config", [_config(config)]),
        ("Commands", [_commands(results, run_info or {})]),
        ("All figures", [_all_figures(results["metrics"])]),
    ]
    missing = {
        "Figures": "No figures yet: run eval.alpha and eval.decode.",
        "Learning curves": "No metrics.csv beside the results: this draft was not trained here, or logger=csv was off.",
        "Acceptance by depth and temperature": "Nothing measured by depth or temperature yet: run eval.decode.",
        "Generations": "No generations.html beside the results: run eval.decode.",
        "Config": "No resolved_config.yaml: this draft was not trained here.",
    }
    body, links = [], []
    for name, parts in sections:
        parts = [part for part in parts if part] or [f'<p class="figures">{_text(missing[name])}</p>']
        anchor = name.lower().replace(" ", "-")
        links.append(f'<a href="#{anchor}">{name}</a>')
        body.append(f'<section id="{anchor}"><h2>{name}</h2>{"".join(parts)}</section>')
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    measured = f"{results['dtype']} on {results['device']}; commit {results['git_sha'][:12]}; {versions}"
    return _PAGE.format(
        title=_text(title), style=style + _CSS, measured=_text(measured), links=" ".join(links), body="\n".join(body)
    )


def _sentences(metrics: Mapping[str, Metric]) -> list[str]:
    """What to take from the table: the fastest method at each temperature, and all that is slower than plain."""
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
            lines.append(f"{degrees}: {told}, {behind}.")
            continue
        lines.append(f"{degrees}: {fastest} is the fastest, {_short(ratio)} times as fast as plain decoding, {behind}.")
        slower = [
            f"{method} on {name} ({_short(each)})"
            for at, name, method in decoded(metrics)
            if at == temperature and (each := metrics.get(f"speedup/{name}/{at}/{method}")) and each.value < 1
        ]
        if slower:
            lines.append(f"{degrees}, slower than plain decoding: {', '.join(slower)}.")
    return [f'<p class="told">{_text(line)}</p>' for line in lines]


def _short(metric: Metric) -> str:
    low, high = metric.ci95 or (None, None)
    return f"{metric.value:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def _decode_table(metrics: Mapping[str, Metric]) -> str | None:
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
    return _table(
        ("T", "set", "method", *DECODE_COLUMNS, "prompts"),
        rows,
        "The decode loop against plain decoding by the same engine [95 % intervals over prompts]. alpha: accepted over "
        "judged drafted tokens, chains only; tau: tokens a target forward; nodes: drafted tokens a round; predicted: "
        "tau over the cost of a round in plain steps.",
    )


def _greedy_table(metrics: Mapping[str, Metric]) -> str | None:
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
    return _table(
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


def _held_out_table(metrics: Mapping[str, Metric]) -> str | None:
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
            ("target_entropy", "the target's entropy in nats:"), ("alpha_tokens", "tokens judged:"),
        )
        if f"{name}/held_out" in metrics
    ]  # fmt: skip
    positions = [bucket.removeprefix("pos_").replace("_up", " and up").replace("_", " to ") for bucket in buckets]
    return _table(
        ("T", "alpha_expected", *(f"positions {each}" for each in positions)),
        rows,
        "Teacher-forced on held-out text: the chance that a token drawn from the draft survives, mean of "
        f"sum_v min(target, draft) [95 % intervals over rows]. {'; '.join(more)}.",
    )


def _table(columns: Sequence[str], rows: Iterable[tuple[Sequence[str], str]], caption: str) -> str:
    """rows: (cells, CSS classes)."""
    kinds = [' class="text"' if column in TEXT_COLUMNS else "" for column in columns]
    head = "".join(f"<th{kind}>{_text(column)}</th>" for kind, column in zip(kinds, columns))
    body = "".join(
        f'<tr class="{classes.strip()}">'
        f"{''.join(f'<td{kind}>{_text(cell)}</td>' for kind, cell in zip(kinds, cells))}</tr>"
        for cells, classes in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="figures">{_text(caption)}</p>'
    )


def _plot(plots: Mapping[str, bytes], name: str) -> str | None:
    if name not in plots:
        return None
    data = base64.b64encode(plots[name]).decode()
    return (
        f'<figure class="plot"><img alt="{name}" src="data:image/png;base64,{data}" />'
        f"<figcaption>{_text(PLOTS[name])}</figcaption></figure>"
    )


def _config(config: str | None) -> str | None:
    return None if config is None else f"<details><summary>resolved_config.yaml</summary>{_pre(config)}</details>"


def _commands(results: Mapping[str, Any], run_info: Mapping[str, Any]) -> str:
    parts = []
    if run_info.get("command"):
        told = f"training, commit {run_info['git_sha'][:12]}"
        if {"steps", "seconds", "device", "precision"} <= run_info.keys():
            told += (
                f": {run_info['steps']} steps in {run_info['seconds'] / 60:.0f} minutes, {run_info['precision']} on "
                f"{run_info['device']}"
            )
        parts.append(f"<p>{_text(told)}</p>{_pre(run_info['command'])}")
    for merge in results.get("merges", []):
        told = f"{len(merge['keys'])} figures, commit {merge['git_sha'][:12]}, {merge['dtype']} on {merge['device']}"
        parts.append(f"<p>{_text(told)}</p>{_pre(merge['command'])}")
    if not parts:
        parts.append(_pre(results["command"]))
    return "".join(parts)


def _all_figures(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for key, metric in metrics.items():
        value = "-" if metric["value"] is None else f"{metric['value']:.4g}"
        is_known = metric["ci95"] and None not in metric["ci95"]
        interval = f"{metric['ci95'][0]:.4g} to {metric['ci95'][1]:.4g}" if is_known else ""
        rows.append(((key, value, interval, str(metric["n"])), ""))
    table = _table(("key", "value", "95 % interval", "n"), rows, "As results.json holds them.")
    return f"<details><summary>{len(rows)} figures</summary>{table}</details>"


def _pre(text: str) -> str:
    return f'<pre class="wide">{_text(text)}</pre>'


def _text(text: str) -> str:
    return escape(printable(text), quote=True)


def _read(folder: Path | None, name: str) -> str | None:
    path = None if folder is None else folder / name
    return path.read_text() if path is not None and path.is_file() else None


def run_folder_of(name: str, checkpoint_root: str | Path) -> Path | None:
    """The folder of the run whose results are called `name`: of a snapshot's, its run's. None where there is none."""
    for run in (name, re.sub(r"-step-\d+$", "", name)):
        folder = Path(checkpoint_root) / run
        if (folder / "resolved_config.yaml").is_file():
            return folder
    return None


def find_outputs(run: str | None, output_root: str | Path) -> Path:
    """Folder of results of `run`: a name, checkpoints/NAME, a snapshot, or outputs/NAME; None: the newest results.

    Raises UserError when there is none, naming those there are.
    """
    root = Path(output_root)
    having = {path.parent.name: path for path in root.glob("*/results.json") if _is_of_a_pair(path)}
    if run is None:
        if not having:
            raise UserError(f"output_root={root}: no results there; run eval.decode first")
        return max(having.values(), key=lambda path: path.stat().st_mtime).parent
    given = Path(run)
    name = load_run(given).name if run_of_snapshot(given) else given.name
    if name in having:
        return having[name].parent
    if (given / "results.json").is_file():
        return given
    raise UserError(
        f"run={run}: no {root / name / 'results.json'}; run eval.decode first, or choose one of "
        f"{', '.join(sorted(having)) or '(none)'}"
    )


def _is_of_a_pair(path: Path) -> bool:
    """Whether a results file holds figures of a target and a draft (a bench has a file of the same form)."""
    try:
        return any(key.startswith(("tau/", "alpha_expected/")) for key in read_results(path)["metrics"])
    except UserError:
        return False


@entry("report")
def main(cfg: DictConfig) -> None:
    folder = find_outputs(cfg.run, cfg.output_root)
    run_folder = run_folder_of(folder.name, cfg.checkpoint_root)
    for path in write_report(folder, run_folder=run_folder):
        print(path)
    log_to_wandb(cfg.logger, folder, run_folder=run_folder)


_CSS = """
body{max-width:1340px}section{margin-top:1.5rem}.told{font-weight:600}.told,.figures{max-width:115ch}
nav{margin:.6rem 0;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem}nav a{color:var(--on)}
table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums;margin:.8rem 0 .2rem}
th,td{padding:.16rem .55rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{border-bottom:2px solid var(--line)}th.text,td.text{text-align:left}
tr.overall td{font-weight:600}tr.slower td{color:#c2410c}
#learning-curves .plot{display:inline-block;width:49%;min-width:420px}
.plot img{max-width:100%;height:auto;background:#fff;border-radius:6px}
pre{background:color-mix(in srgb,var(--fg) 6%,var(--bg));padding:.6rem .8rem;border-radius:6px;font-size:.84rem;
 margin:.3rem 0 1rem}
.generations h2{font-size:1.1rem;border:0;margin-top:1.2rem}.generations>p{font-size:.92rem}
@media (prefers-color-scheme:dark){tr.slower td{color:#fb923c}}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8" /><meta name="viewport" content="width=device-width,initial-scale=1" />
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<p class="figures">{measured}</p>
<nav>{links}</nav>
{body}
</body></html>
"""


if __name__ == "__main__":
    main()
