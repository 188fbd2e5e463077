"""Our plain decoding beside vLLM's, with a stand-in for vLLM: turns, texts, and what is said where vLLM fails."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import train.bench
import train.serving
from models.target import Target
from train.bench import vllm_speed
from train.measure_vllm import plain_vs_vllm
from train.serving import ServingError, engine_turns

FAKE_VLLM = '''
"""Every token takes 2 ms; the engine talks on stdout, as vLLM does."""
import json, os, time
from pathlib import Path

class SamplingParams:
    def __init__(self, **options): self.options = options

class LLM:
    def __init__(self, **options):
        print("INFO starting")
        Path(os.environ["FAKE_LOG"]).write_text(json.dumps(options))
        Path(os.environ["FAKE_LOG"]).with_name("pid").write_text(str(os.getpid()))
        if os.environ.get("FAKE_BROKEN"): raise ValueError("no such architecture")
    def generate(self, prompts, params, use_tqdm):
        print("INFO a prompt")
        length, first = params.options["max_tokens"], prompts[0]["prompt_token_ids"][0]
        if first == 13: raise ValueError("an unlucky prompt")
        time.sleep(0.002 * length)
        text = type("Text", (), {"token_ids": (first,) * length})
        return [type("Output", (), {"outputs": [text]})]
'''
OPTIONS = {"dtype": torch.float32, "max_model_len": 32, "max_new_tokens": 4, "enforce_eager": True}


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "options.json"))
    monkeypatch.setattr(train.serving, "VLLM_PYTHON", Path(sys.executable))
    monkeypatch.setattr(train.bench, "VLLM_PYTHON", Path(sys.executable))
    return tmp_path


def test_an_engine_answers_in_turn_and_ends_with_the_block(fake_vllm: Path) -> None:
    with engine_turns("a/model", [[5, 6], [7]], **OPTIONS, log=fake_vllm / "vllm.log") as turn:
        answers = [turn(number) for number in (1, 0, 1)]
        process = Path("/proc") / (fake_vllm / "pid").read_text()
        deadline = time.monotonic() + 30
        while "State:\tT" not in (process / "status").read_text():  # stopped: it leaves the cores to ours
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not process.exists()
    assert [answer["token_ids"] for answer in answers] == [[7] * 4, [5] * 4, [7] * 4]
    assert all(answer["seconds"] >= 0.008 for answer in answers)
    engine = json.loads((fake_vllm / "options.json").read_text())
    assert engine["dtype"] == "float32" and engine["enforce_eager"] and engine["max_num_seqs"] == 1
    assert "INFO a prompt" in (fake_vllm / "vllm.log").read_text()


def test_an_engine_that_dies_is_told_with_the_end_of_its_log(fake_vllm: Path) -> None:
    with (
        pytest.raises(ServingError, match="an unlucky prompt"),
        engine_turns("a/model", [[13]], **OPTIONS, log=fake_vllm / "vllm.log") as turn,
    ):
        turn(0)


def test_an_engine_that_never_stands_is_ended(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_vllm / "vllm.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(train.serving, "START_LIMIT_S", 0.5)
    with (
        pytest.raises(ServingError, match="exit code -9"),
        engine_turns("a/model", [[1]], **OPTIONS, log=fake_vllm / "vllm.log"),
    ):
        pass


def test_both_sides_take_turns(fake_vllm: Path, tiny_target: Target) -> None:
    metrics = plain_vs_vllm(
        tiny_target, work_dir=fake_vllm, num_prompts=2, prompt_tokens=8, max_new_tokens=6, repeats=2
    )
    assert metrics["plain_vs_vllm"].n == metrics["vllm_tokens_per_s"].n == 4
    assert 0 < metrics["vllm_tokens_per_s"].value <= 1000 / 2
    engine = json.loads((fake_vllm / "options.json").read_text())
    assert engine["max_model_len"] == 15 and Path(engine["model"]).name != "model"


def test_the_bench_goes_on_without_vllm(
    fake_vllm: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "1")
    assert vllm_speed(tiny_target, work_dir=fake_vllm) == {}
    assert "no such architecture" in capsys.readouterr().out
    monkeypatch.setattr(train.bench, "VLLM_PYTHON", fake_vllm / "nowhere")
    assert vllm_speed(tiny_target, work_dir=fake_vllm) == {}
    told = capsys.readouterr().out
    assert "make setup-vllm" in told and told.count("\n") == 1
