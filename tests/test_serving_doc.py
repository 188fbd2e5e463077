"""What docs/serving.md prints composes, names targets of make that exist, and says what the code says."""

import json
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eval.entry import CONF_DIR, check_config
from models.servable import EAGLE_FAMILIES, ENGINES
from models.serve_command import serve_command, trtllm_yaml
from train.serving import Draft

ROOT = CONF_DIR.parent
DOC = (ROOT / "docs" / "serving.md").read_text()
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", DOC, flags=re.S)).replace("\\\n", " ")
COMMANDS = [" ".join(line.split("   #")[0].split()) for line in BLOCKS.splitlines()]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(("python -m train.", "python -m eval."))])
def test_printed_commands_compose(command: str) -> None:
    module, *overrides = shlex.split(command)[2:]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        check_config(compose(module.split(".")[1], overrides))


def test_families_are_those_of_the_code() -> None:
    for engine, families in EAGLE_FAMILIES.items():
        assert f"- {ENGINES[engine]}: {', '.join(families)}\n" in DOC


def test_named_targets_of_make_exist() -> None:
    named = set(re.findall(r"make ([a-z-]+)", DOC))
    assert {"setup-vllm", "serve-check", "check-export"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


def words(command: str) -> set[tuple[str, str]]:
    """Options with their values, in any order."""
    parts = shlex.split(command)
    return {(a, b) for a, b in zip(parts, [*parts[1:], ""]) if a.startswith("--")}


def test_the_commands_of_engines_are_those_that_the_export_prints() -> None:
    [vllm] = [c for c in COMMANDS if "vllm.entrypoints" in c]
    folder = "exports/smollm2_eagle3-vllm"
    config = json.loads(dict(words(vllm))["--speculative-config"])
    assert config == Draft(Path(folder), "eagle3", 3).config()
    ours = serve_command("vllm", "eagle3", folder, "target", draft_len=3, dtype="bfloat16")
    assert json.loads(dict(words(ours))["--speculative-config"]) == config
    llama = "meta-llama/Llama-3.1-8B-Instruct"
    [sglang] = [c for c in COMMANDS if "sglang.launch_server" in c]
    folder = "exports/llama31_8b_eagle3-sglang"
    assert words(serve_command("sglang", "eagle3", folder, llama, draft_len=3, dtype="bfloat16")) <= words(sglang)
    [trtllm] = [c for c in COMMANDS if c.startswith("trtllm-serve")]
    folder = "exports/llama31_8b_eagle3-trtllm"
    assert trtllm == serve_command("trtllm", "eagle3", folder, llama, draft_len=3, dtype="bfloat16")
    [printed] = re.findall(r"```yaml\n(.*?)```", DOC, flags=re.S)
    assert printed == trtllm_yaml("eagle3", folder, draft_len=3, captured=None)
