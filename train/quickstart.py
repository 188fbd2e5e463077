"""The main job in one process: python -m train.quickstart +experiment=quickstart (or any other experiment).

1. train.distill: cache what is missing, fit, expected acceptance
2. eval.decode: the speculative loop against plain decoding
3. plots and report, one table, and the paths of all that was written
Called again it finds the run finished and its cache complete, says so, and only decodes anew.
"""

import gc
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf, open_dict

from data.signals import SignalSpec
from eval.alpha import evaluate_pair
from eval.decode import check_decode, decode_pair
from eval.entry import entry
from eval.html_report import write_report
from eval.memory import peak_resident_gb
from eval.report import DECODE_COLUMNS, decode_row, print_table
from eval.results import Metric, merge_results, read_results
from eval.run import Pair, load_pair
from eval.wandb_media import log_to_wandb
from train.cache import caches, rows_of
from train.distill import distill, run_name


def quickstart(cfg: DictConfig) -> dict[str, Any]:
    """Run everything for a composed config; returns the content of outputs/<run>/results.json."""
    decode = OmegaConf.to_container(cfg.decode, resolve=True)
    check_decode(decode)  # a mistake in the last stage's settings is told before the first one begins
    seconds: dict[str, float] = {}
    run_json = Path(cfg.checkpoint_root) / run_name(cfg) / "run.json"
    before = run_json.read_text() if run_json.is_file() else None
    with _timed("cache, training, alpha", seconds):
        folder = distill(cfg)
    if cfg.plan or rank_zero_only.rank != 0:
        return {}
    has_trained = run_json.read_text() != before
    gc.collect()  # optimiser, gradients and the training's copy of the target
    with _timed("loading", seconds):
        pair = load_pair(_of_run(cfg, folder.name), [])
    out = Path(cfg.output_root) / pair.name
    if not has_trained:
        _say_cache(cfg, pair)
    if not _has_alpha(out / "results.json", pair):
        with _timed("alpha", seconds):
            evaluate_pair(pair, cfg.alpha, seed=cfg.seed, output_root=cfg.output_root, overwrite=True)
    with _timed("decoding", seconds):
        decode_pair(pair, decode, output_root=cfg.output_root)
    metrics = {f"stage_seconds/{stage.replace(', ', '_')}": Metric(value) for stage, value in seconds.items()}
    if has_trained:  # else the peak would be that of decoding alone
        metrics["resident_gb"] = Metric(peak_resident_gb())
    _add(out / "results.json", metrics)
    results = read_results(out / "results.json")
    title = f"{pair.draft_name} for {pair.target.name}"
    report = write_report(out, run_folder=folder)  # anew: now with the times of the stages
    print_summary(results, title=title, seconds=seconds)
    written = ("results.json", "decode.json", "generations.txt", "generations.html")
    for path in (folder, *(out / name for name in written), *report):
        print(path)
    log_to_wandb(cfg.logger, out, run_folder=folder)
    return results


def print_summary(results: Mapping[str, Any], *, title: str, seconds: Mapping[str, float]) -> None:
    """One table of the run: acceptance on held-out text by temperature, then the decode loop by set and temperature."""
    metrics = {
        key: Metric(metric["value"], metric["ci95"] and tuple(metric["ci95"]))
        for key, metric in results["metrics"].items()
        if metric["value"] is not None
    }
    rows = []
    for key in metrics:
        parts = key.split("/")
        if parts[:2] == ["alpha_expected", "held_out"] and len(parts) == 3:
            rows.append(
                ("held-out text", parts[2], "teacher-forced", str(metrics[key]), *[""] * len(DECODE_COLUMNS[1:]))
            )
    decoded = [key.removeprefix("tau/") for key in metrics if key.startswith("tau/")]
    for where in sorted(decoded, key=lambda where: where.startswith("all/")):  # the sets, then all of them together
        rows.append((*where.split("/"), *decode_row(metrics, where)))
    stages = ", ".join(f"{stage}: {value:.0f} s" for stage, value in seconds.items())
    memory = metrics.get("resident_gb")
    print_table(
        f"{title}, {results['dtype']} on {results['device']}; [95 % intervals over rows or prompts]",
        ("", "temperature", "method", *DECODE_COLUMNS),
        rows,
        note=stages + (f"; peak resident memory {memory.value:.2f} GB" if memory else ""),
    )


@contextmanager
def _timed(stage: str, seconds: dict[str, float]):
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _of_run(cfg: DictConfig, name: str) -> DictConfig:
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.run = name
    return cfg


def _say_cache(cfg: DictConfig, pair: Pair) -> None:
    """A finished run skips its cache: look whether it is there, and say so (or write what was deleted)."""
    if cfg.cache.mode == "disk":
        spec = SignalSpec(cfg.cache.signal, cfg.cache.top_k, pair.target.tap_ids)
        caches(cfg, pair.target, spec, {split: rows_of(cfg, pair.target, split) for split in ("train", "held_out")})


def _has_alpha(path: Path, pair: Pair) -> bool:
    """Whether the file holds the expected acceptance of this very pair."""
    if not path.is_file():
        return False
    results = read_results(path)
    is_ours = results["target"] == pair.target_fingerprint and results["draft"] == pair.draft_fingerprint
    return is_ours and any(key.startswith("alpha_expected/") for key in results["metrics"])


def _add(path: Path, metrics: Mapping[str, Metric]) -> None:
    """Figures of this process beside those already there, under the same header."""
    header = {key: value for key, value in read_results(path).items() if key not in ("metrics", "merges")}
    merge_results(path, header, metrics)


@entry("distill")
def main(cfg: DictConfig) -> None:
    quickstart(cfg)


if __name__ == "__main__":
    main()
