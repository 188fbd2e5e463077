"""Every experiment composes with every entry point; mistakes get one line and exit code 2."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train.distill
from eval.entry import CONF_DIR, check_config, explain
from models.errors import UserError

ENTRIES = sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != "base")
EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
GROUPS = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != "experiment")
ROOT = CONF_DIR.parent


def compose_config(entry: str, *overrides: str):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose(entry, overrides=list(overrides))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_with_every_entry_point(entry, experiment):
    cfg = compose_config(entry, f"+experiment={experiment}")
    check_config(cfg)
    cfg = OmegaConf.to_container(cfg, resolve=True)
    assert cfg["run"] == experiment
    assert cfg["target"]["source"] and cfg["draft"]["_target_"] and cfg["data"]["sources"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_choice_composes(group):
    choices = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
    assert choices
    for choice in choices:
        cfg = compose_config("distill", f"{group}={choice}")
        assert group in cfg


def test_the_command_line_beats_the_experiment():
    assert compose_config("distill", "+experiment=quickstart").data.max_length == 256
    assert compose_config("distill", "+experiment=quickstart", "data.max_length=128").data.max_length == 128


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_its_lab_note(experiment):
    head = (CONF_DIR / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert head[0] == "# @package _global_"
    notes = "\n".join(line for line in head if line.startswith("#"))
    assert "# Run:" in notes and "# Expect:" in notes


def test_an_experiment_without_the_package_line_is_refused():
    composed = compose_config("distill")
    OmegaConf.set_struct(composed, False)
    cfg = OmegaConf.merge(composed, {"experiment": {"optim": {"lr": 3}}})
    with pytest.raises(UserError, match="# @package _global_"):
        check_config(cfg)
    cfg = OmegaConf.merge(composed, {"optimiser": {"lr": 3}})
    with pytest.raises(UserError, match="optimiser: unknown top-level key"):
        check_config(cfg)


def test_an_error_behind_instantiate_is_found():
    try:
        try:
            raise UserError("draft.init=x: no such folder")
        except UserError as error:
            raise RuntimeError("Error in call to target 'models.drafts.build_draft'") from error
    except RuntimeError as error:
        assert explain(error) == "draft.init=x: no such folder"


SMOKE = ["+experiment=smoke"]
MISTAKES = {
    "unknown key": (["optim.lrr=1"], "lrr"),
    "unknown top-level key": (["+optimiser=adam"], "optimiser: unknown top-level key"),
    "unknown group choice": (["draft=gpt5"], "gpt5"),
    "experiment without a plus": (["experiment=smoke"], "+experiment="),
    "unknown experiment": (["+experiment=nope"], "+experiment=nope: no such experiment; the experiments are: gpt2_30m"),
    "missing file": ([*SMOKE, "data.sources=[{path: no/such.jsonl, kind: text}]"], "no/such.jsonl"),
    "unknown source key": ([*SMOKE, "data.sources=[{pth: a.txt}]"], "pth"),
    "no network": (["target=gpt2"], "target=smollm2_135m"),
    "no mandatory value": (["target=hf"], "target.source"),
    "rows longer than the draft": ([*SMOKE, "data.max_length=4096"], "max_length"),
    "no such device": ([*SMOKE, "device=cuda"], "no CUDA device"),
    "unknown loss": ([*SMOKE, "loss.name=kl_div"], "kl_div"),
    "wrong type": ([*SMOKE, "optim.lr=fast"], "optim.lr"),
    "unknown strategy": ([*SMOKE, "trainer.strategy=foo"], "trainer.strategy=foo"),
    "strategy that cuts parameters up": ([*SMOKE, "trainer.strategy=fsdp"], "trainer.strategy=fsdp"),
    "wrong type without a class": ([*SMOKE, "data.held_out_fraction=x"], "data.held_out_fraction=x"),
    "negative": ([*SMOKE, "trainer.max_epochs=-1"], "max_epochs"),
}


@pytest.fixture
def distill(tmp_path, monkeypatch, capsys):
    """`train.distill` in this process: exit code and what it wrote to stderr."""

    def run(*overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["distill", *in_folder(overrides, tmp_path)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            train.distill.main()
        return stopped.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(case, distill, tmp_path):
    overrides, message = MISTAKES[case]
    code, err = distill(*overrides)
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0], err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("checkpoints/*/*.safetensors"))


def test_empty_data_is_named(distill, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    code, err = distill(*SMOKE, f"data.sources=[{{path: {empty}, kind: text}}]")
    assert code == 2 and "empty.jsonl" in err, err


@pytest.mark.parametrize("key", ["output", "cache", "checkpoint"])
def test_a_file_where_a_folder_should_be(key, distill, tmp_path):
    (tmp_path / "file").write_text("")
    code, err = distill(*SMOKE, "trainer.max_steps=1", f"{key}_root={tmp_path / 'file'}")
    assert code == 2 and "Traceback" not in err, err
    assert f"error: {tmp_path / 'file'}" in err


def test_the_process_ends_with_the_line_alone(tmp_path):
    command = [sys.executable, "-m", "train.distill", *in_folder(["optim.lrr=1"], tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr


def in_folder(overrides: Sequence[str], folder: Path) -> list[str]:
    """All that a job writes goes below `folder`, unless an override says otherwise."""
    roots = {"checkpoint_root": "checkpoints", "output_root": "outputs", "cache_root": "cache"}
    return [*(f"{key}={folder / name}" for key, name in roots.items()), *overrides]
