"""The bench and the GPU check: what they compute, and that a broken check costs nothing but itself."""

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.memory import peak_resident_gb
from eval.results import Metric
from models.drafts import gpt2_draft
from models.target import load_target
from models.tiny import byte_tokenizer
from train.bench import SMALL_HEAD, describe_steps, eagle_cases, eagle_steps, quickstart_memory, verdict
from train.gpu_check import CheckFailed, Report, check_alpha, check_greedy, check_rule
from train.gpu_check_heads import check_simulation, check_trees, head_step_speed, tapped_blocks, untrained_head
from train.measure import (
    cache_vs_forward,
    chunked_loss_peak,
    interleaved_times,
    loop_overhead,
    median_ratio,
    plain_vs_generate,
    random_rows,
)
from train.measure_eagle import (
    Peer,
    PeerError,
    chat_case,
    compare_steps,
    eagle_step,
    packed_batch,
    peer_command,
    peer_versions,
    save_peer_rows,
    supervised_case,
)
from train.measure_step import draft_step_vs_plain
from train.step_flops import HeadShape, SlotCounts, count_slots, matmul_share, necessary_flops

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[1]


TINY_HEAD = HeadShape(vocab_size=259, **SMALL_HEAD)
FAKE_PEER = """
import json, sys, numpy
rows = numpy.load(sys.argv[sys.argv.index("--rows") + 1])
print(json.dumps({"ready": True, "num_batches": len(rows["batch_offsets"]) - 1}), flush=True)
for line in sys.stdin:
    begin, end = rows["row_offsets"][rows["batch_offsets"][[int(line), int(line) + 1]]]
    if end - begin > 200:
        raise SystemExit("batch too large")
    print(json.dumps({"seconds": float(end - begin) / 50, "loss": 1.0}), flush=True)
"""  # 50 tokens/s, whatever the batch


@pytest.fixture
def peer_python(tmp_path):
    """Stands for the interpreter of the peer's environment: takes the same arguments, speaks the same protocol."""
    (tmp_path / "fake.py").write_text(FAKE_PEER)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "fake.py"}" "$@"\n')
    path.chmod(0o755)
    return path


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
    metrics = plain_vs_generate(tiny_target, num_prompts=2, max_new_tokens=6, prompt_tokens=8)
    assert metrics["plain_vs_generate"].value > 0 and metrics["plain_tokens_per_s"].n == 2


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


def test_eagle_step_against_a_peer(peer_python):
    case = supervised_case("fp32_T512", "fp32", vocab_size=259, num_rows=2, length=20, repeats=3)
    metrics = eagle_step(case, TINY_HEAD, peer_python=peer_python, product_sizes=(32, 64))
    assert metrics["speculators_step_tokens_per_s/fp32_T512"] == Metric(50.0, (50.0, 50.0), 3)
    ours, ratio = (metrics[f"eagle3_step_{name}/fp32_T512"] for name in ("tokens_per_s", "vs_speculators"))
    assert ours.n == 3 and ratio.value == pytest.approx(ours.value / 50)
    assert ratio.ci95[0] <= ratio.value <= ratio.ci95[1]
    assert metrics["eagle3_step_matmul_share/fp32"].value > 0 and metrics["matmul_gflops/fp32"].value > 0


def test_both_sides_take_the_same_packed_chats(tmp_path):
    case = chat_case("bf16_chat", "bf16", byte_tokenizer(), batch_tokens=160, max_length=64, repeats=2)
    tokens = [case.num_tokens(turn) for turn in range(3)]
    assert len(case.batches) == 3 and all(96 < count <= 160 for count in tokens)  # no room for one more row
    save_peer_rows(tmp_path / "rows.npz", case)
    arrays = np.load(tmp_path / "rows.npz")
    batches = arrays["row_offsets"][arrays["batch_offsets"]]
    assert np.diff(batches).tolist() == tokens and 0 < arrays["loss_mask"].sum() < len(arrays["loss_mask"])
    batch = packed_batch(case, 1, TINY_HEAD)
    assert batch["input_ids"].tolist() == arrays["input_ids"][batches[1] : batches[2]].tolist()
    turns: list[int] = []
    metrics = compare_steps(case, turns.append, None, shape=TINY_HEAD)
    assert turns == [0, 1, 2] and metrics.keys() == {"eagle3_step_tokens_per_s/bf16_chat"}


def test_a_peer_that_fails_says_why(peer_python, tmp_path, monkeypatch, capsys):
    case = supervised_case("fp32_T2048_packed", "fp32", vocab_size=259, num_rows=11, length=20, repeats=1)
    save_peer_rows(tmp_path / "rows.npz", case)
    with (
        Peer(peer_command(peer_python, case, TINY_HEAD, tmp_path / "rows.npz"), tmp_path / "log") as peer,
        pytest.raises(PeerError, match="batch too large"),
    ):
        peer.step(0)
    monkeypatch.setattr("train.bench.PEER_PYTHON", peer_python)
    metrics = eagle_steps(case, TINY_HEAD)
    assert metrics.keys() == {"eagle3_step_tokens_per_s/fp32_T2048_packed"}  # the bench goes on without it
    assert "no comparison for fp32_T2048_packed: the peer's step ended: batch too large" in capsys.readouterr().out


def test_half_an_environment_of_the_peer_loses_no_measurement(tmp_path, monkeypatch):
    """An installation that was broken off: a Python without the library."""
    assert peer_versions(sys.executable) == "" and peer_versions(tmp_path / "missing") == ""
    monkeypatch.setattr("train.bench.PEER_PYTHON", Path(sys.executable))
    assert "peer" not in describe_steps(TINY_HEAD)


def test_cases_of_the_bench(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr("train.bench.PEER_PYTHON", tmp_path / "missing")
    cases = eagle_cases(tiny_target, quick=True)
    keys = {key for case in cases for key in eagle_steps(case, TINY_HEAD, quick=True)}
    names = {"fp32_T512", "bf16_T512", "fp32_T2048_packed", "bf16_T2048_packed", "bf16_chat"}
    assert {f"eagle3_step_tokens_per_s/{name}" for name in names} <= keys
    assert {"eagle3_step_matmul_share/fp32", "eagle3_step_matmul_share/bf16"} <= keys


def test_slots_counted_by_hand():
    """Row 1: 5 tokens, all masked. Row 2: tokens 2, 3, 4 of 6 are."""
    mask = np.array([1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    slots = count_slots(mask, np.array([0, 5, 11]), num_steps=3)
    # row 1, step 0: slots 0, 1, 2 (x[1..2], x[2..3], x[3..4]); row 2: slots 1 (x[2..3]) and 2 (x[3..4])
    assert slots == SlotCounts(counted=[3 + 2, 2 + 1, 1], context=3 + 3, targets=3 + 2)


def test_slots_equal_the_definition():
    generator = np.random.default_rng(0)
    mask, offsets, steps = generator.random(300) < 0.8, np.array([0, 40, 41, 43, 150, 300]), 4
    counted, targets, context = [0] * steps, set(), 0
    for begin, end in pairwise(offsets):
        last = begin - 1
        for p in range(begin, end):
            for s in range(steps):
                if p + 2 + s < end and mask[p + 1 : p + 3 + s].all():
                    counted[s] += 1
                    targets.add(p + 1 + s)
                    last = p
        context += last + 1 - begin
    assert count_slots(mask, offsets, num_steps=steps) == SlotCounts(counted, context, len(targets))


def test_flops_counted_by_hand():
    """D 4, one query head and one key head of width 2, intermediate 6, Vd 10; 5 and 3 slots at the two steps."""
    shape = HeadShape(
        hidden_size=4, intermediate_size=6, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=20, draft_vocab_size=10,
        num_steps=2, train_lm_head=True,
    )  # fmt: skip
    slots = SlotCounts(counted=[5, 3], context=6, targets=7)
    fc = 2 * 6 * 12 * 4 * 2  # forward, gradient of the weight
    qkv = 2 * 4 * 2 * (5 + 6 + 6) * (2 + 3) + 2 * 4 * 6 * 3 * 3  # step 0: q of 5, k and v of 6 slots; step 1: 3 slots
    block = 2 * 8 * (2 * 4 + 4 * 6 + 4 * 6 + 6 * 4) * 3  # o, gate, up, down of 8 slots
    assert necessary_flops(shape, slots) == fc + qkv + block + 2 * 8 * 4 * 10 * 3 + 2 * 7 * 4 * 10
    frozen = HeadShape(**{**shape.__dict__, "train_lm_head": False})
    assert necessary_flops(shape, slots) - necessary_flops(frozen, slots) == 2 * 8 * 4 * 10


def test_share_takes_the_faster_product():
    """2 * 10^3 operations in 1 s and 2 * 20^3 in 4 s: 4000 a second, so 20000 operations need 5 s of 10."""
    metric = matmul_share(20_000, [10.0, 10.0, 99.0], {10: [1.0, 1.0, 1.0], 20: [4.0, 4.0, 4.0]})
    assert metric.value == 0.5 and metric.n == 3 and metric.ci95[1] == 0.5


def test_verdicts_and_memory(tmp_path):
    assert verdict("cache_vs_forward", 0.9).endswith("reached") and verdict("cache_vs_forward", 0.5).endswith("MISSED")
    assert verdict("loop_overhead/greedy", 0.2).endswith("MISSED") and verdict("something", 1.0) == ""
    assert quickstart_memory(tmp_path) == {} and peak_resident_gb() > 0.1


def test_gpu_checks_pass_on_a_cpu(tiny_target, tiny_draft):
    assert max(metric.value for metric in check_rule(CPU, num_draws=250_000).values()) < 0.01
    metrics = check_greedy(tiny_target, tiny_draft, num_prompts=2, num_tokens=8)
    assert metrics["greedy/float32/alpha_of_target_itself"].value == 1.0
    assert check_alpha(tiny_target, tiny_draft, num_rows=1, length=16)["alpha/difference_to_cpu"].value < 1e-6


def test_gpu_checks_of_heads_pass_on_a_cpu(tiny_draft):
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=tapped_blocks(8))
    head = untrained_head(target)
    assert max(metric.value for metric in check_simulation(target, head, length=16).values()) < 1e-6
    differing = check_trees(target, head.eval(), tiny_draft, num_prompts=1, num_tokens=8)
    assert differing["trees/different_outputs"].value == 0
    assert head_step_speed(target, num_rows=2, length=16)["head/step_tokens_per_s"].value > 0


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
