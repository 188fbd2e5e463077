"""The bench and the GPU check: what they compute, and that a broken check costs nothing but itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eval.results import Metric
from models.drafts import gpt2_draft
from train.bench import quickstart_memory, verdict
from train.gpu_check import CheckFailed, Report, check_alpha, check_greedy, check_rule
from train.measure import (
    cache_vs_forward,
    chunked_loss_peak,
    interleaved_times,
    loop_overhead,
    median_ratio,
    peak_resident_gb,
    random_rows,
)
from train.measure_step import draft_step_vs_plain

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tiny_draft():
    return gpt2_draft(259, n_layer=1, n_head=2, n_embd=32).eval()


def test_sides_run_in_turn():
    order: list[str] = []
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = interleaved_times(sides, repeats=2, device=CPU)
    assert order == ["a", "b"] * 3 and [len(seconds) for seconds in times.values()] == [2, 2]


def test_median_ratio_ignores_an_outlier():
    metric = median_ratio([2.0, 2.0, 90.0], [1.0, 1.0, 1.0])
    assert metric.value == 2.0 and metric.ci95[0] == 2.0 and metric.n == 3


def test_cache_and_loop_measurements(tiny_target, tiny_draft, tmp_path):
    metrics = cache_vs_forward(tiny_target, num_tokens=512, length=64, repeats=2, work_dir=tmp_path)
    assert metrics["cache_vs_forward"].value > 0 and metrics["cache_vs_forward"].n == 2
    assert list(tmp_path.iterdir()) == []  # the caches are removed
    metrics = loop_overhead(tiny_target, tiny_draft, num_prompts=1, max_new_tokens=6, prompt_tokens=8)
    assert {"loop_overhead/greedy", "loop_overhead/T1", "loop_overhead/T1_top_p"} <= metrics.keys()
    assert all(0 < metric.value < 1 for metric in metrics.values())


def test_fused_loss_equals_the_plain_one_and_its_peak_is_small():
    metrics = chunked_loss_peak(num_tokens=64, vocab_size=3000, hidden_size=32)
    assert metrics["chunked_loss_max_difference"].value < 1e-5
    assert metrics["chunked_loss_peak_gb"].value < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_training_steps_do_the_same_work(precision):
    metrics = draft_step_vs_plain(
        precision=precision,
        device=CPU,
        vocab_size=512,
        num_rows=2,
        length=32,
        repeats=1,
        n_layer=1,
        n_head=2,
        n_embd=32,
    )
    assert metrics[f"draft_step_loss_difference/{precision}"].value < (1e-5 if precision == "fp32" else 1e-3)


def test_verdicts_and_memory(tmp_path):
    assert verdict("cache_vs_forward", 0.9).endswith("reached") and verdict("cache_vs_forward", 0.5).endswith("MISSED")
    assert verdict("loop_overhead/greedy", 0.2).endswith("MISSED") and verdict("something", 1.0) == ""
    assert quickstart_memory(tmp_path) == {} and peak_resident_gb() > 0.1


def test_gpu_checks_pass_on_a_cpu(tiny_target, tiny_draft):
    assert max(metric.value for metric in check_rule(CPU, num_draws=250_000).values()) < 0.01
    metrics = check_greedy(tiny_target, tiny_draft, num_prompts=2, num_tokens=8)
    assert metrics["greedy/float32/alpha_of_target_itself"].value == 1.0
    assert check_alpha(tiny_target, tiny_draft, num_rows=1, length=16)["alpha/difference_to_cpu"].value < 1e-6


def test_a_failing_check_is_reported_and_the_others_run(capsys):
    report = Report(deadline_s=30)

    def wrong() -> dict:
        raise CheckFailed("TV 0.2", {"tv": Metric(0.2)})

    def broken() -> dict:
        raise RuntimeError("no kernel")

    report.run("wrong", wrong)
    report.run("broken", broken)
    report.run("fine", lambda: {"x": Metric(1.0)}, prefix="t/")
    assert report.failures == ["wrong: FAILED: TV 0.2", "broken: FAILED: RuntimeError: no kernel"]
    assert report.metrics.keys() == {"tv", "t/x"} and "no kernel" in capsys.readouterr().err
    late = Report(deadline_s=0.0)
    time.sleep(0.01)
    late.run("late", lambda: {"x": Metric(1.0)})
    assert "not started" in late.failures[0] and not late.metrics


def test_random_rows_hold_every_token_once():
    rows = random_rows(50, num_rows=3, length=7)
    assert len(rows) == 3 and rows.num_tokens == rows.num_supervised == 21 and rows.input_ids.max() < 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_without_a_gpu_the_check_is_one_line(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "train.gpu_check", f"output_root={tmp_path}"], cwd=REPOSITORY, capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0 and run.stdout.count("\n") == 1 and "no CUDA device" in run.stdout
