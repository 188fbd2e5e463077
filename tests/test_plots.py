"""Plots: what is read from the files, and that readable PNGs come out of a run's worth of figures."""

import csv
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.decode_plots import (
    acceptance_by_depth,
    alpha_by_depth,
    by_temperature,
    plot_acceptance_by_depth,
    plot_alpha_by_depth,
    plot_by_temperature,
)
from eval.html_report import plot_run, snapshot_curves
from eval.plots import _smooth, read_metrics_csv
from eval.results import Metric, merge_results
from models.errors import UserError


def write_csv(path: Path, *, steps: int = 400) -> Path:
    """As Lightning writes it: training and validation on lines of their own, empty cells between."""
    rng = np.random.default_rng(0)
    names = ["epoch", "step", "train/loss", "train/alpha", "train/tokens", "val/alpha", "val/kl"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for step in range(9, steps, 10):
            alpha = 0.55 * (1 - np.exp(-step / 120))
            loss = 1.6 + 7 * np.exp(-step / 60) + rng.normal(0, 0.15)
            writer.writerow(
                {
                    "step": step,
                    "train/loss": loss,
                    "train/alpha": alpha + rng.normal(0, 0.02),
                    "train/tokens": step * 4096,
                }
            )
            if step % 50 == 49:
                writer.writerow({"step": step, "val/alpha": alpha, "val/kl": 1.7 + 7 * np.exp(-step / 60)})
    return path


METHODS = {"chain_k4": 4, "static_3x2x1": 3, "dynamic_d5_k10_n16": 5}


def make_results() -> dict:
    metrics = {"alpha_expected/held_out/T1": {"value": 0.53, "ci95": [0.51, 0.55], "n": 90}}
    for t, name in enumerate(("T0", "T1")):
        for s, prompts in enumerate(("all", "mt_bench", "gsm8k")):
            for m, (method, deepest) in enumerate(METHODS.items()):
                for depth in range(1, deepest + 1):
                    value = 0.5 - 0.05 * t + 0.07 * s + 0.06 * m - 0.03 * depth
                    for figure, x in (("alpha_at_depth", value), ("survival_at_depth", value**depth)):
                        metrics[f"{figure}/d{depth}/{prompts}/{name}/{method}"] = {
                            "value": x, "ci95": [x - 0.03 * depth * x, x + 0.02 * depth * x], "n": 20,
                        }  # fmt: skip
                metrics[f"tau/{prompts}/{name}/{method}"] = {"value": 2 + s - t + m, "ci95": [1.0, 9.0], "n": 20}
    return {"metrics": metrics}


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_csv_columns_leave_out_empty_cells(tmp_path):
    columns = read_metrics_csv(write_csv(tmp_path / "metrics.csv"))
    assert columns["train/loss"].shape == (40, 2) and columns["val/alpha"].shape == (8, 2)
    assert columns["val/alpha"][0, 0] == 49
    with pytest.raises(UserError, match="logger=csv"):
        read_metrics_csv(tmp_path / "none.csv")


def test_depths_are_grouped_by_temperature_and_method():
    panels = alpha_by_depth(make_results()["metrics"])
    assert list(panels) == [f"{t}, {method}" for t in ("T0", "T1") for method in METHODS]
    assert [point[0] for point in panels["T0, chain_k4"]["gsm8k"]] == [1, 2, 3, 4]
    depth, value, low, high = panels["T0, chain_k4"]["mt_bench"][0]
    assert (depth, round(value, 2)) == (1, 0.54) and low < value < high
    figure = {"value": 0.5, "ci95": None, "n": 1}
    unsorted = {f"alpha_at_depth/d1/all/{t}/chain_k4": figure for t in ("T0", "T1.5", "T1")}
    assert list(alpha_by_depth(unsorted)) == ["T0, chain_k4", "T1, chain_k4", "T1.5, chain_k4"]


def test_methods_are_compared_over_all_sets_or_the_only_one():
    metrics = make_results()["metrics"]
    panels = acceptance_by_depth(metrics, "survival_at_depth")
    assert list(panels) == ["T0", "T1"] and set(panels["T0"]) == set(METHODS)
    assert round(panels["T0"]["static_3x2x1"][1][1], 4) == round(0.5**2, 4)  # of `all`, depth 2
    one_set = {key: metric for key, metric in metrics.items() if "/gsm8k/" in key}
    assert round(acceptance_by_depth(one_set, "alpha_at_depth")["T1"]["chain_k4"][0][1], 2) == 0.56


def test_a_set_has_its_colour_in_every_panel(tmp_path, monkeypatch):
    """A method that was measured on one set only must not borrow the colour that another set has elsewhere."""
    figure = {"value": 0.5, "ci95": None, "n": 1}
    where = (
        "all/T0/chain_k3",
        "gsm8k/T0/chain_k3",
        "mt_bench/T0/chain_k3",
        "gsm8k/T0/chain_k8",
        "humaneval/T0/chain_k8",
    )
    drawn = []
    errorbar = Axes.errorbar
    monkeypatch.setattr(
        Axes, "errorbar", lambda axes, *a, **k: drawn.append((k["label"], k["color"])) or errorbar(axes, *a, **k)
    )
    labels = []
    legend = Figure.legend
    monkeypatch.setattr(
        Figure, "legend", lambda own, handles, names, **k: labels.extend(names) or legend(own, handles, names, **k)
    )
    plot_alpha_by_depth({f"alpha_at_depth/d1/{key}": figure for key in where}, tmp_path / "x.png", title="x")
    assert len(drawn) == 5 and len(dict(drawn)) == len(set(drawn)) == 4  # gsm8k twice, in one colour
    assert labels == ["all", "gsm8k", "mt_bench", "humaneval"]
    panels = acceptance_by_depth(
        {f"alpha_at_depth/d{d}/{key}": figure for d, key in enumerate(where, 1)}, "alpha_at_depth"
    )
    assert panels["T0"]["chain_k8"][0][0] == 4  # the first of its sets


def test_temperatures_in_order_over_all_sets_or_the_only_one():
    metrics = make_results()["metrics"]
    assert by_temperature(metrics, "tau")["static_3x2x1"] == [(0.0, 3, 1.0, 9.0), (1.0, 2, 1.0, 9.0)]
    metrics = {
        "tau/gsm8k/T1.5/chain_k4": {"value": 1.5, "ci95": None, "n": 9},
        "tau/gsm8k/T0.7/chain_k4": {"value": 2.5, "ci95": [None, None], "n": 9},
        "tau/gsm8k/T0/chain_k4": {"value": None, "ci95": None, "n": 9},
        "tau_uncut/gsm8k/T0/chain_k4": {"value": 7, "ci95": None, "n": 9},
    }
    assert by_temperature(metrics, "tau") == {"chain_k4": [(0.7, 2.5, 2.5, 2.5), (1.5, 1.5, 1.5, 1.5)]}


def test_by_temperature_shows_what_was_measured(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Axes, "set", lambda axes, **told: titles.append(told["title"]))
    metrics = make_results()["metrics"]
    plot_by_temperature(metrics, tmp_path / "x.png", title="x")
    assert titles == ["acceptance alpha", "tokens a target forward, tau"]  # the teacher-forced one alone; no speed-up
    metrics["speedup/all/T1/chain_k4"] = {"value": 0.8, "ci95": [0.7, 0.9], "n": 20}
    titles.clear()
    plot_by_temperature(metrics, tmp_path / "x.png", title="x")
    assert titles[2:] == ["speed-up"] and png_size(tmp_path / "x.png")[0] > 1500


def test_a_depth_never_reached_has_no_point():
    key = "alpha_at_depth/d4/gsm8k/T0/chain_k4"
    assert alpha_by_depth({key: {"value": None, "ci95": [None, None], "n": 0}}) == {}


def write_snapshot(folder: Path, *, tau: float, target: str = "t", method: str = "chain_k4") -> None:
    header = {"command": "c", "git_sha": "g", "device": "cpu", "dtype": "float32", "versions": {}, "data": {}}
    header |= {"target": {"name": target}, "draft": {"name": folder.name}}
    metrics = {f"tau/{name}/T0/{method}": Metric(tau, (tau - 0.1, tau + 0.2), 9) for name in ("all", "gsm8k")}
    merge_results(folder / "results.json", header, metrics)


def test_snapshots_make_a_curve_where_there_are_two(tmp_path):
    write_snapshot(tmp_path / "mine-step-001000", tau=1.75)
    write_snapshot(tmp_path / "mine-step-000500", tau=1.5)
    write_snapshot(tmp_path / "mine-step-000500", tau=1.5, method="chain_k7")
    write_snapshot(tmp_path / "mine-step-002000", tau=2.0, target="another")
    write_snapshot(tmp_path / "mine-too-step-000500", tau=3.0)
    write_snapshot(tmp_path / "mine-step-decay", tau=3.0)  # a run of its own
    curves = snapshot_curves(tmp_path / "mine", {"name": "t"})
    assert curves == {"chain_k4, T = 0": [(500, 1.5, 1.4, 1.7), (1000, 1.75, 1.65, 1.95)]}


def test_a_run_gives_six_pngs(tmp_path):
    write_snapshot(tmp_path / "mine-step-000500", tau=1.5)
    write_snapshot(tmp_path / "mine-step-001000", tau=1.75)
    (tmp_path / "mine").mkdir()
    write_csv(tmp_path / "mine" / "metrics.csv")
    paths = plot_run(tmp_path / "mine", {**make_results(), "target": {"name": "t"}}, title="quickstart")
    names = ["loss", "val_alpha", "snapshots", "by_temperature", "acceptance_by_depth", "alpha_by_depth"]
    assert [path.stem for path in paths] == names
    for path in paths:
        width, height = png_size(path)
        assert width >= 800 and height >= 500


def test_many_methods_are_told_apart(tmp_path, monkeypatch):
    metrics = {
        f"{figure}/d{depth}/all/T0.7/chain_k{k}": {"value": 0.5 / depth, "ci95": None, "n": 1}
        for figure in ("alpha_at_depth", "survival_at_depth")
        for k in range(1, 9)
        for depth in range(1, k + 1)
    }
    drawn = []

    def record(axes, *points, **look):
        drawn.append(tuple(look[key] for key in ("label", "color", "marker", "linestyle")))
        return errorbar(axes, *points, **look)

    errorbar = Axes.errorbar
    monkeypatch.setattr(Axes, "errorbar", record)
    path = plot_acceptance_by_depth(metrics, tmp_path / "deep" / "x.png", title="x")
    assert path.stat().st_size > 10_000
    assert len({look[1:] for look in drawn}) == 8 == len(set(drawn))  # the same look above and below


def test_a_method_that_was_never_judged_is_drawn_below(tmp_path):
    """Rounds but no judged token: texts too short for lookahead's first draft, or plain steps only."""
    figures = {"alpha_at_depth/d1/all/T0/chain_k1": 0.5, "survival_at_depth/d1/all/T0/chain_k1": 0.5}
    figures |= {f"survival_at_depth/d1/all/{t}/lookahead_w5_n3_g5": 0.0 for t in ("T0", "T1")}
    metrics = {key: {"value": value, "ci95": [value, value], "n": 2} for key, value in figures.items()}
    assert plot_acceptance_by_depth(metrics, tmp_path / "x.png", title="x").stat().st_size > 10_000


def test_without_files_there_is_nothing_to_plot(tmp_path):
    assert plot_run(tmp_path / "none", {"metrics": {}, "target": {}}, title="x") == []
    with pytest.raises(UserError, match=r"eval\.decode"):
        plot_alpha_by_depth({}, tmp_path / "x.png", title="x")
    for plot in (plot_acceptance_by_depth, plot_by_temperature):
        with pytest.raises(UserError, match=r"eval\.decode"):
            plot({}, tmp_path / "x.png", title="x")


def test_smoothing_keeps_a_constant_and_the_length():
    assert np.allclose(_smooth([2.0] * 100), 2.0) and len(_smooth(range(7))) == 7
