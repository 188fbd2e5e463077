"""What docs/tutorial.md tells a newcomer to type works: its commands compose, and what it prints of the rule and the
formula is what they print."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eval.decode import check_decode
from eval.entry import CONF_DIR, check_config
from eval.theory import BEST_ALPHAS, DRAFT_COSTS, best_draft_len

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
STEPS = re.split(r"^## (?=\d+\. )", TUTORIAL, flags=re.M)[1:]


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.S)


def commands() -> list[str]:
    """All but the one with a program of its own."""
    return [line for block in blocks(TUTORIAL, "bash") if "<<" not in block for line in block.splitlines()]


def job(command: str) -> tuple[Path, list[str]]:
    """The entry point's file and the overrides that a command stands for; of `make`, of what it would run."""
    words = shlex.split(command)
    if words[0] == "make":
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS", "RUN")}
        dry = ["make", "-n", "--no-print-directory", *words[1:]]  # another make may have started the tests
        told = subprocess.run(dry, cwd=ROOT, env=env, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        words = shlex.split(told.stdout.splitlines()[-1])
    assert words[1] == "-m", words
    return ROOT / f"{words[2].replace('.', '/')}.py", words[3:]


def test_there_are_ten_steps_each_with_a_command_and_its_output():
    assert [step.partition(".")[0] for step in STEPS] == [str(number) for number in range(1, 11)]
    for step in STEPS:
        assert blocks(step, "bash") and blocks(step, "text"), step.splitlines()[0]


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_every_command_composes(command):
    path, overrides = job(command)
    [config] = re.findall(r'^@entry\("(\w+)"\)', path.read_text(), flags=re.M)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose(config, overrides=overrides)
    check_config(cfg)
    check_decode(cfg.decode)


def test_the_rule_prints_what_is_told():
    [program] = re.findall(r"python - <<'END'\n(.*?)^END$", STEPS[0], flags=re.S | re.M)
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    [told] = blocks(STEPS[0], "text")
    for line, expected in zip(printed.stdout.splitlines(), told.splitlines(), strict=True):
        (name, *values), (told_name, *told_values) = line.split(), expected.split()
        assert name == told_name
        assert [float(value) for value in values] == pytest.approx([float(v) for v in told_values], abs=0.004)


def test_the_best_lengths_are_those_of_the_formula():
    [told] = blocks(STEPS[1], "text")
    rows = {line.split()[0]: re.findall(r"K=(\d+) ([\d.]+)x", line) for line in told.splitlines() if "x" in line}
    for alpha in BEST_ALPHAS:
        draft_lens, speedups = best_draft_len(alpha, DRAFT_COSTS)
        best = [(str(k), f"{speedup:.2f}") for k, speedup in zip(draft_lens, speedups)]
        assert rows[f"{alpha:g}"] == best
