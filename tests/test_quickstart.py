"""The whole job in one process on the tiny random target: files, table, and what a second call reuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eval.entry import CONF_DIR, check_config
from models.errors import UserError
from train.quickstart import main, quickstart

REPOSITORY = Path(__file__).parents[1]


def arguments_of(tmp_path: Path, *more: str) -> list[str]:
    roots = [f"{name}_root={tmp_path / name}" for name in ("output", "checkpoint", "cache")]
    small = ["decode.sets=[gsm8k]", "decode.num_prompts=1", "data.max_train_tokens=6000", "trainer.max_epochs=1"]
    return ["+experiment=smoke", *roots, *small, *more]


def run(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "train.quickstart", *arguments_of(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_quickstart_and_its_second_call(tmp_path):
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    out = tmp_path / "output" / "smoke"
    written = ["results.json", "decode.json", "generations.txt", "generations.html"]
    written += ["loss.png", "val_alpha.png", "alpha_by_depth.png", "acceptance_by_depth.png"]
    written += ["by_temperature.png", "report.html"]
    for name in written:
        assert (out / name).is_file() and str(out / name) in first.stdout, name
    results = json.loads((out / "results.json").read_text())
    metrics = results["metrics"]
    assert {"alpha_expected/held_out/T1", "tau/gsm8k/T0/chain_k4", "speedup/gsm8k/T1/chain_k4"} <= metrics.keys()
    assert 0.1 < metrics["resident_gb"]["value"] < 10
    assert results["target"]["name"] == "tiny_random" and results["draft"]["name"] == "smoke"
    assert {"held_out", "prompts"} <= results["data"].keys()

    second = run(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "finished before" in second.stdout and second.stdout.count("reused") == 2
    again = json.loads((out / "results.json").read_text())["metrics"]
    assert again.keys() == metrics.keys() - {"stage_seconds/alpha"} | {"stage_seconds/decoding"}
    for key in ("resident_gb", "alpha_expected/held_out/T1", "tau/gsm8k/T0/chain_k4"):
        assert again[key] == metrics[key], key


@pytest.mark.parametrize("mistake", ["decode.methods=[chain_k0]", "decode.sets=[gsm9k]"])
def test_a_mistake_is_one_line(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart", *arguments_of(tmp_path, mistake)])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    key, _, _ = mistake.partition("=")
    assert stopped.value.code == 2 and err.splitlines()[-1].startswith(f"error: {key}="), err
    assert "Traceback" not in err and not out
    assert not (tmp_path / "cache").exists()  # told before anything began


def test_quickstart_with_an_eagle_1_head(tmp_path):
    """The experiment as it is, on a target of bytes; it sets simulated steps, which this head has not."""
    roots = [f"{name}_root={tmp_path / name}" for name in ("output", "checkpoint", "cache")]
    small = [
        "data.max_train_tokens=6000",
        "data.max_held_out_tokens=1500",
        "data.max_length=128",
        "alpha.max_tokens=300",
    ]
    small += ["trainer.max_steps=2", "decode.sets=[gsm8k]", "decode.num_prompts=1", "decode.max_new_tokens=6"]
    eagle1 = ["+experiment=quickstart", "draft=eagle1", "target=tiny_random", "dtype=fp32", *small, *roots]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        with pytest.raises(UserError, match=r"^draft\.simulation\.steps=3: .*; set draft\.simulation=null$"):
            check_config(compose("distill", eagle1))
        check_config(cfg := compose("distill", [*eagle1, "draft.simulation=null"]))
    metrics = quickstart(cfg)["metrics"]
    for method in ("chain_k3", "dynamic_d4_k4_n8"):
        assert metrics[f"tau/gsm8k/T0/{method}"]["value"] >= 1 and metrics[f"tau/gsm8k/T1/{method}"]["value"] >= 1
        assert metrics[f"greedy_failures/gsm8k/T0/{method}"]["value"] == 0
    assert metrics["alpha_expected/held_out/T1"]["value"] > 0
    assert (tmp_path / "output" / "quickstart" / "loss.png").is_file()
