"""EAGLE heads through the whole job on tiny targets: crash and resume, processes, online, the hub experiments."""

# ruff: noqa: F811 (cache_root is a fixture of test_distill)

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from safetensors.torch import load_file
from test_distill import TINY, cache_root, run, run_into_a_crash, start  # noqa: F401

from eval.entry import CONF_DIR
from eval.plots import read_metrics_csv
from eval.run import load_pair
from models.eagle import is_eagle_folder
from models.errors import UserError
from train.distill import distill

HEADS = {
    "eagle3": ["draft=eagle3", "draft.draft_vocab_size=100", "draft.simulation.steps=3", "optim=muon"],
    "eagle1": ["draft=eagle1"],
}


@pytest.fixture(autouse=True)
def _without_the_drafts_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_distill.TINY", [*(o for o in TINY if "n_embd" not in o), "~draft.n_positions"])


def assert_same_heads(folder: Path, other: Path, atol: float) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", HEADS)
def test_crashed_and_resumed_equals_uninterrupted(
    tmp_path: Path,
    cache_root: Path,
    kind: str,
) -> None:
    more = (*HEADS[kind], "optim.ema_decay=0.9", "trainer.checkpoint_every_steps=2", "trainer.snapshot_every_steps=4")
    straight = run(tmp_path, cache_root, *more, name="straight")
    run_into_a_crash(9, tmp_path, cache_root, *more, name="resumed")
    resumed = run(tmp_path, cache_root, *more, name="resumed")
    assert_same_heads(straight, resumed, 1e-6)
    assert is_eagle_folder(straight) and is_eagle_folder(straight / "snapshots" / "step-000004")
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("decode", [f"run={straight / 'snapshots' / 'step-000004'}"])
    pair = load_pair(cfg, [])  # with the target and the taps of the run
    assert (pair.name, pair.target.name) == ("straight-step-000004", "tiny_random")
    first, second = (read_metrics_csv(tmp_path / "outputs" / name / "metrics.csv") for name in ("straight", "resumed"))
    names = ["train/loss", "train/lr", "train/grad_norm", "train/tokens", "val/alpha", "val/kl"]
    for name in names + (["val/alpha_step2", "val/hits_step2"] if kind == "eagle3" else []):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(second[name]), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_two_processes_equal_one_and_online_equals_cached(tmp_path: Path, cache_root: Path, one_thread: None) -> None:
    more = (*HEADS["eagle3"], "trainer.max_steps=4")
    one = run(tmp_path, cache_root, *more, name="one")
    online = run(tmp_path, cache_root, *more, "cache.mode=none", name="online")
    assert_same_heads(one, online, 1e-5)
    process = start(tmp_path, cache_root, *more, "trainer.accumulate=1", "trainer.devices=2", name="two")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert_same_heads(one, tmp_path / "checkpoints" / "two", 1e-5)
    first, second = (read_metrics_csv(tmp_path / "outputs" / name / "metrics.csv") for name in ("one", "two"))
    for name in ("train/loss", "train/tokens", "val/alpha", "val/alpha_step1"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(second[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_val_alpha_is_the_expected_alpha(tmp_path: Path, cache_root: Path, kind: str) -> None:
    """Measured by the training loss and by eval.alpha, through different code."""
    more = (*HEADS[kind], "trainer.max_steps=3", "trainer.val_every_steps=3", "alpha.max_tokens=null")
    metrics = json.loads((run(tmp_path, cache_root, *more) / "run.json").read_text())["metrics"]
    assert metrics["val/alpha"] == pytest.approx(metrics["alpha_expected/held_out/T1"], abs=1e-4)
    assert metrics["val/kl"] == pytest.approx(metrics["kl/held_out"], abs=1e-3)


@pytest.mark.parametrize("experiment", ["gpt2_eagle3", "llama31_8b_eagle3", "qwen3_8b_eagle3"])
def test_the_hub_experiments_run_on_a_target_of_their_shape(
    experiment: str,
    tmp_path: Path,
    cache_root: Path,
) -> None:
    source, taps = ("tiny_gpt2", "[0,1,3]") if experiment.startswith("gpt2") else ("tiny_llama", "default")
    limits = [o for o in TINY if o.startswith(("data.", "trainer.", "alpha."))]
    small = [f"target.source=random:{source}", f"target.tap_ids={taps}", "draft.draft_vocab_size=100", "dtype=fp32"]
    places = [
        f"data.sources=[{{path: {cache_root / 'texts.jsonl'}, kind: text}}]", f"cache_root={cache_root}",
        f"checkpoint_root={tmp_path / 'checkpoints'}", f"output_root={tmp_path / 'outputs'}",
    ]  # fmt: skip
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("distill", [f"+experiment={experiment}", *limits, *small, *places])
    assert cfg.draft.simulation.steps == 7
    info = json.loads((distill(cfg) / "run.json").read_text())
    assert info["metrics"]["alpha_expected/held_out/T1"] > 0.02


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.signal=topk", r"cache\.signal=topk: draft=eagle3 learns from cache=hidden"),
        ("target.tap_ids=null", r"target\.tap_ids=null: draft=eagle3 reads taps"),
        ("draft.draft_vocab_size=999", r"draft\.draft_vocab_size=999: the target has 259 ids"),
        ("draft.num_key_value_heads=3", r"draft\.num_key_value_heads=3: must divide"),
    ],
)
def test_mistakes_name_the_key(tmp_path: Path, cache_root: Path, override: str, message: str) -> None:
    more = (*HEADS["eagle3"], "trainer.max_steps=1", override)
    with pytest.raises((UserError, InstantiationException), match=message):
        run(tmp_path, cache_root, *more)
