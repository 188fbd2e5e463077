"""report.html, all of a run on one page that needs nothing else: python -m eval.html_report [run=NAME].

1. figures, from outputs/<run>/results.json: what is fastest, what is slower than plain decoding, the tables
2. plots: learning curves from metrics.csv and from decoded snapshots, acceptance by depth and by temperature
3. where speculation fails, from failure_modes.json; drafts and methods compared, from outputs/compare
4. generations.html, coloured by who produced each token
5. the config and the commands, from checkpoints/<run>; every figure with its interval

What a run has no file for is left out, and said. eval.alpha and eval.decode write the page at their end.
"""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eval.decode_plots import alpha_by_depth, plot_acceptance_by_depth, plot_alpha_by_depth, plot_by_temperature
from eval.entry import entry
from eval.html_tables import (
    all_figures,
    compare_table,
    decode_table,
    greedy_table,
    held_out_table,
    html_pre,
    html_text,
    sentences,
)
from eval.html_view import page_parts, page_style
from eval.plots import plot_loss, plot_snapshots, plot_val_alpha, read_metrics_csv
from eval.report import as_metrics, decoded, overall
from eval.results import makers, read_results, write_atomic
from eval.run import load_run, run_of_snapshot
from eval.wandb_media import log_to_wandb
from models.errors import UserError

CURVES = {  # plot -> what to see in it
    "loss": "Training loss and held-out KL against tokens seen.",
    "val_alpha": "Acceptance at T = 1 while training; the point at the end is the final draft on more held-out text.",
    "snapshots": "The decode loop with the drafts of the way there, 95 % intervals over prompts. The final draft may "
    "have been measured on other prompts, so it is not in it.",
}
PLOTS = {
    "by_temperature": "Acceptance, tokens a target forward and speed-up against temperature. Below the dotted line "
    "speculation is slower than plain decoding.",
    "acceptance_by_depth": "Above: of the rounds that reached a depth, the share that accepted a token there. Below: "
    "the share of all rounds that accepted so many tokens; the heights of a curve add up to tau - 1.",
    "alpha_by_depth": "The upper figure by set of prompts.",
}


def write_report(folder: str | Path, *, run_folder: Path | None = None) -> list[Path]:
    """Write the plots that the files of a run allow, and `<folder>/report.html` of all; returns their paths.

    folder: that of a results.json. run_folder: checkpoints/<run>, for the config and the training's command.
    Raises UserError when there are no results.
    """
    folder = Path(folder)
    results = read_results(folder / "results.json")
    title = f"{results['draft'].get('name', folder.name)} for {results['target'].get('name', 'the target')}"
    plots = plot_run(folder, results, title=title)
    page = html_report(
        results,
        title=title,
        plots={path.stem: path.read_bytes() for path in plots},
        failures=failure_parts(folder, results),
        comparison=comparison(folder.parent / "compare", results["target"]),
        generations=_read(folder, "generations.html"),
        config=_read(run_folder, "resolved_config.yaml"),
        run_info=_read_json(run_folder, "run.json"),
    )
    write_atomic(folder / "report.html", page)
    return [*plots, folder / "report.html"]


def plot_run(folder: Path, results: Mapping[str, Any], *, title: str) -> list[Path]:
    """All plots that the files of a run allow: learning curves, and those of the decode loop."""
    paths, metrics = [], results["metrics"]
    if (folder / "metrics.csv").is_file() and "train/loss" in (columns := read_metrics_csv(folder / "metrics.csv")):
        metric = metrics.get("alpha_expected/held_out/T1")
        is_whole = metric and metric["value"] is not None and metric["ci95"] and None not in metric["ci95"]
        final = (metric["value"], *metric["ci95"]) if is_whole else None
        paths.append(plot_loss(columns, folder / "loss.png", title=title))
        if "val/alpha" in columns:
            paths.append(plot_val_alpha(columns, folder / "val_alpha.png", title=title, final=final))
    if curves := snapshot_curves(folder, results["target"]):
        paths.append(plot_snapshots(curves, folder / "snapshots.png", title=title))
    if any(key.startswith(("alpha_expected/held_out/", "tau/")) for key in metrics):
        paths.append(plot_by_temperature(metrics, folder / "by_temperature.png", title=title))
    if alpha_by_depth(metrics):
        paths.append(plot_acceptance_by_depth(metrics, folder / "acceptance_by_depth.png", title=title))
        paths.append(plot_alpha_by_depth(metrics, folder / "alpha_by_depth.png", title=title))
    return paths


def snapshot_curves(folder: Path, target: Mapping[str, str]) -> dict[str, list[tuple[float, ...]]]:
    """From outputs/<run>-step-000500 and its like: "chain_k3, T = 0" -> (step, tau, low, high), two points or more."""
    curves: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for path in folder.parent.glob("*/results.json"):
        snapshot = re.fullmatch(re.escape(folder.name) + r"-step-(\d+)", path.parent.name)
        if snapshot is None or (results := read_results(path))["target"] != target:
            continue
        metrics = as_metrics(results)
        for temperature, methods in overall(metrics).items():
            for method, name in methods.items():
                tau = metrics[f"tau/{name}/{temperature}/{method}"]
                label = f"{method}, T = {temperature.removeprefix('T')}"
                curves[label].append((int(snapshot[1]), tau.value, *(tau.ci95 or (tau.value, tau.value))))
    return {label: sorted(points) for label, points in sorted(curves.items()) if len(points) > 1}


def failure_parts(folder: Path, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of failure_modes.json, each with `title`, `sentences` and its plot's bytes as `data` (or None); none of
    them where they are of another target or draft than the results."""
    held = _read_json(folder, "failure_modes.json")
    if any(held.get(side) != results[side] for side in ("target", "draft")):
        return []
    return [
        {**part, "data": path.read_bytes() if (path := folder / part["png"]).is_file() else None}
        for part in held.get("parts", [])
    ]


def comparison(folder: Path, target: Mapping[str, str]) -> tuple[dict[str, Any], bytes | None] | None:
    """Results and plot of outputs/compare, where they are of this target."""
    if not (folder / "results.json").is_file():
        return None
    results = read_results(folder / "results.json")
    plot = folder / "compare.png"
    return (results, plot.read_bytes() if plot.is_file() else None) if results["target"] == target else None


def html_report(
    results: Mapping[str, Any],  # as results.json holds them
    *,
    title: str,
    plots: Mapping[str, bytes],  # name -> PNG
    failures: Sequence[Mapping[str, Any]] = (),  # see failure_parts
    comparison: tuple[Mapping[str, Any], bytes | None] | None = None,  # results and plot
    generations: str | None = None,  # the page of eval.html_view
    config: str | None = None,  # YAML
    run_info: Mapping[str, Any] | None = None,  # run.json; empty where there is none
) -> str:
    """The whole page."""
    metrics = as_metrics(results)
    style, content = page_parts(generations) if generations else (page_style(1), None)
    curves, loop = (
        [_plot(name, plots[name], told) for name, told in named.items() if name in plots] for named in (CURVES, PLOTS)
    )
    sections = [
        ("Figures", [*sentences(metrics), decode_table(metrics), greedy_table(metrics), held_out_table(metrics)]),
        ("Learning curves", curves),
        ("Acceptance by depth and temperature", loop),
        ("Failure modes", [_failure(part) for part in failures]),
        ("Comparison", _comparison(*comparison) if comparison else []),
        ("Generations", [f'<div class="generations">{content}</div>' if content else None]),
        ("Config", [_config(config)]),
        ("Commands", [_commands(results, run_info or {})]),
        ("All figures", [all_figures(results["metrics"])]),
    ]
    missing = {
        "Figures": "No figures yet: run eval.alpha and eval.decode.",
        "Learning curves": "No metrics.csv beside the results: not trained here, trained without logger=csv, or moved.",
        "Acceptance by depth and temperature": "Nothing measured by depth or temperature yet: run eval.decode.",
        "Failure modes": "No failure_modes.json of this target and draft beside the results: run make failure-modes.",
        "Comparison": "No outputs/compare of this target: run make compare.",
        "Generations": "No generations.html beside the results: run eval.decode.",
        "Config": "No resolved_config.yaml: this draft was not trained here.",
    }
    body, links = [], []
    for name, parts in sections:
        parts = [part for part in parts if part] or [f'<p class="figures">{html_text(missing[name])}</p>']
        anchor = name.lower().replace(" ", "-")
        links.append(f'<a href="#{anchor}">{name}</a>')
        body.append(f'<section id="{anchor}"><h2>{name}</h2>{"".join(parts)}</section>')
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    places = dict.fromkeys(f"{maker['dtype']} on {maker['device']}" for maker in makers(results, results["metrics"]))
    measured = f"{' and '.join(places)}; commit {results['git_sha'][:12]}; {versions}"
    return _PAGE.format(
        title=html_text(title),
        style=style + _CSS,
        measured=html_text(measured),
        links=" ".join(links),
        body="\n".join(body),
    )


def _plot(name: str, png: bytes, told: str) -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<figure class="plot"><img alt="{html_text(name)}" src="data:image/png;base64,{data}" />'
        f"<figcaption>{html_text(told)}</figcaption></figure>"
    )


def _failure(part: Mapping[str, Any]) -> str:
    told = "".join(f"<li>{html_text(sentence)}</li>" for sentence in part["sentences"])
    plot = "" if part["data"] is None else _plot(Path(part["png"]).stem, part["data"], "")
    return f"<h3>{html_text(part['title'])}</h3>{plot}" + (f"<ul>{told}</ul>" if told else "")


def _comparison(results: Mapping[str, Any], png: bytes | None) -> list[str | None]:
    plot = None if png is None else _plot("compare", png, "Speed-up over plain decoding; left of the line slower.")
    return [plot, compare_table(results), html_pre(results["command"])]


def _config(config: str | None) -> str | None:
    return None if config is None else f"<details><summary>resolved_config.yaml</summary>{html_pre(config)}</details>"


def _commands(results: Mapping[str, Any], run_info: Mapping[str, Any]) -> str:
    parts = []
    if run_info.get("command"):
        told = f"training, commit {run_info['git_sha'][:12]}"
        if {"steps", "seconds", "device", "precision"} <= run_info.keys():
            told += (
                f": {run_info['steps']} steps in {run_info['seconds'] / 60:.0f} minutes, {run_info['precision']} on "
                f"{run_info['device']}"
            )
        parts.append(f"<p>{html_text(told)}</p>{html_pre(run_info['command'])}")
    for merge in results.get("merges", []):
        told = f"{len(merge['keys'])} figures, commit {merge['git_sha'][:12]}, {merge['dtype']} on {merge['device']}"
        parts.append(f"<p>{html_text(told)}</p>{html_pre(merge['command'])}")
    if not parts:
        parts.append(html_pre(results["command"]))
    return "".join(parts)


def _read(folder: Path | None, name: str) -> str | None:
    path = None if folder is None else folder / name
    return path.read_text() if path is not None and path.is_file() else None


def _read_json(folder: Path | None, name: str) -> dict[str, Any]:
    """Empty where there is none. Raises UserError for a file that is broken."""
    try:
        held = json.loads(_read(folder, name) or "{}")
        if not isinstance(held, dict):
            raise ValueError
    except ValueError:
        raise UserError(f"{folder / name}: not a JSON file of ours; move it away, or make it anew") from None
    return held


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
    """Whether a results file is of a target and a draft (a bench and a comparison have files of the same form)."""
    try:
        metrics = read_results(path)["metrics"]
        return any(key.startswith("alpha_expected/") for key in metrics) or bool(decoded(metrics))
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
body{max-width:1340px}section{margin-top:1.5rem}.told.fastest{font-weight:600}.told,.figures{max-width:115ch}
nav{margin:.6rem 0;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem}nav a{color:var(--on)}
table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums;margin:.8rem 0 .2rem}
th,td{padding:.16rem .55rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{border-bottom:2px solid var(--line)}th.text{font:inherit;font-weight:700}
th.text,td.text{text-align:left;white-space:nowrap;margin:0}
tr.overall td{font-weight:600}tr.slower td{color:#c2410c}
#learning-curves .plot{display:inline-block;width:49%;min-width:420px}
.plot img{max-width:min(100%,1150px);height:auto;background:#fff;border-radius:6px}
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
