"""The report's figures in W&B: tables, the plots, the coloured generations and the report itself; docs/dashboard.md has
the names. Nothing here is imported before a run asks for it by logger=wandb."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from eval.report import as_metrics, decoded, overall
from eval.results import Metric, read_results

DECODE_FIGURES = (
    "alpha",
    "tau",
    "tree_nodes",
    "plain_tokens_per_s",
    "spec_tokens_per_s",
    "speedup",
    "predicted_speedup",
)
PAGES = ("report", "generations")


def log_to_wandb(loggers: Mapping[str, DictConfig], folder: Path, *, run_folder: Path | None) -> None:
    """Where `loggers` has wandb: log the files of `folder`, into the training's own run if it was logged there.

    folder: outputs/<run>, with its results.json and report.html. run_folder: checkpoints/<run>, None where the draft
    was not trained here. WANDB_MODE=offline needs no account.
    """
    if "wandb" not in loggers:
        return
    import wandb

    results = read_results(folder / "results.json")
    run_id, config = re.sub(r"[^\w-]+", "-", folder.name)[:64], {key: results[key] for key in ("target", "draft")}
    if run_folder is not None:
        config = OmegaConf.to_container(OmegaConf.load(run_folder / "resolved_config.yaml"))
        held = run_folder / "state" / "run_id"
        if run_folder.name == folder.name and held.is_file():  # a snapshot's figures stay apart from its run's
            run_id = held.read_text().strip()
    logger = instantiate(loggers["wandb"])(folder=folder, run=folder.name, run_id=run_id, config=config)
    try:
        log_media(logger.experiment, folder, results)
    finally:
        wandb.finish()


def log_media(run: Any, folder: Path, results: Mapping[str, Any]) -> None:
    """run: a W&B run. Logs `tables/...`, `plots/...`, the pages, and every figure as `eval/<key>` in the summary."""
    import wandb

    metrics = as_metrics(results)
    media: dict[str, Any] = {
        f"tables/{name}": wandb.Table(columns=columns, data=rows)
        for name, (columns, rows) in (("decode", decode_rows(metrics)), ("alpha_expected", alpha_rows(metrics)))
        if rows
    }
    media |= {f"plots/{path.stem}": wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))}
    media |= {
        name: wandb.Html(path.read_text(), inject=False)
        for name in PAGES
        if (path := folder / f"{name}.html").is_file()
    }
    run.log(media)
    run.summary.update({f"eval/{key}": value for key, value in {**summary(metrics), **fastest(metrics)}.items()})


def decode_rows(metrics: Mapping[str, Metric]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of `tables/decode`: each figure with the ends of its 95 % interval, None where not measured."""
    columns = ["temperature", "set", "method", "prompts"]
    columns += [f"{name}{end}" for name in DECODE_FIGURES for end in ("", "_low", "_high")]
    rows = []
    for temperature, name, method in decoded(metrics):
        where = f"{name}/{temperature}/{method}"
        row: list[Any] = [float(temperature.removeprefix("T")), name, method, metrics[f"tau/{where}"].n]
        for figure in DECODE_FIGURES:
            row += _three(metrics.get(f"{figure}/{where}"))
        rows.append(row)
    return columns, rows


def alpha_rows(metrics: Mapping[str, Metric]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of `tables/alpha_expected`: by temperature, and by the position of the last token read."""
    rows = []
    for key, metric in metrics.items():
        parts = key.split("/")
        if parts[0] == "alpha_expected":
            positions = parts[3].removeprefix("pos_") if len(parts) == 4 else "all"
            rows.append([parts[1], float(parts[2].removeprefix("T")), positions, *_three(metric), metric.n])
    return ["split", "temperature", "positions", "alpha_expected", "low", "high", "rows"], rows


def summary(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Scalars to compare runs by: everything but the figures by depth, which would be hundreds."""
    return {key: m.value for key, m in metrics.items() if "_at_depth/" not in key and "/pos_" not in key}


def fastest(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """`fastest_speedup/T0`, `fastest_tau/T0`: of the method with the largest measured speed-up, whatever its name."""
    found = {}
    for temperature, methods in overall(metrics).items():
        where = [f"{name}/{temperature}/{method}" for method, name in methods.items()]
        measured = [each for each in where if f"speedup/{each}" in metrics]
        if measured:
            best = max(measured, key=lambda each: metrics[f"speedup/{each}"].value)
            found[f"fastest_speedup/{temperature}"] = metrics[f"speedup/{best}"].value
            found[f"fastest_tau/{temperature}"] = metrics[f"tau/{best}"].value
    return found


def _three(metric: Metric | None) -> list[float | None]:
    """Value, low, high."""
    if metric is None:
        return [None] * 3
    return [metric.value, *(metric.ci95 or (None, None))]
