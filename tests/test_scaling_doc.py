"""The sizes that docs/scaling.md and the experiments' headers tell are those of the cache's columns."""

import math
import re

import pytest
import torch
from cache_helpers import FakeTarget
from omegaconf import OmegaConf

from data.cache import cache_columns
from data.signals import SignalSpec
from eval.entry import CONF_DIR

DOC = (CONF_DIR.parent / "docs" / "scaling.md").read_text()
ROW_COLUMNS = ("row_offsets", "row_ids")


def bytes_a_token(spec: SignalSpec, hidden_size: int) -> int:
    target = FakeTarget(vocab_size=10, dtype=torch.bfloat16)
    target.hidden_size = hidden_size
    columns = cache_columns(spec, target)
    return sum(dtype.itemsize * math.prod(shape) for name, (dtype, shape) in columns.items() if name not in ROW_COLUMNS)


@pytest.mark.parametrize(
    ("row", "spec"),
    [
        ("`cache=topk`", SignalSpec()),
        ("`cache=hidden`, Medusa", SignalSpec("hidden")),
        ("`cache=hidden` with three taps", SignalSpec("hidden", tap_ids=(1, 2, 3))),
    ],
)
def test_bytes_a_token(row: str, spec: SignalSpec):
    [told] = [line.split("|")[2] for line in DOC.splitlines() if line.startswith(f"| {row}")]
    channels, constant = re.fullmatch(r" (?:(\d) D \+ )?(\d+).*", told).groups()
    for hidden_size in (576, 4096):
        assert bytes_a_token(spec, hidden_size) == int(channels or 0) * hidden_size + int(constant)


@pytest.mark.parametrize(
    ("experiment", "spec", "hidden_size"),
    [
        ("gpt2_30m", SignalSpec(), 768),
        ("qwen3_32b_small", SignalSpec(), 5120),
        ("llama33_70b_small", SignalSpec(), 8192),
        ("gpt2_eagle3", SignalSpec("hidden", tap_ids=(2, 6, 9)), 768),
        ("llama31_8b_eagle3", SignalSpec("hidden", tap_ids=(2, 16, 29)), 4096),
    ],
)
def test_headers_and_the_table_tell_the_same(experiment: str, spec: SignalSpec, hidden_size: int):
    path = CONF_DIR / "experiment" / f"{experiment}.yaml"
    each = bytes_a_token(spec, hidden_size)
    header = " ".join(line.strip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"{each:,} bytes a token" in header
    total = each * OmegaConf.load(path).data.max_train_tokens
    told = {f"{total / 1e9:.0f} GB", f"{total / 1e9:.1f} GB", f"{total / 1e12:.1f} TB"}
    lines = [line for line in DOC.splitlines() if line.startswith("|") and f"`{experiment}`" in line]
    assert any(size in lines[0].split("|")[3] for size in told), lines
