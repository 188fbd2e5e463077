"""How a cache is cut into shards, how many bytes each takes, and whether the disk holds it: known before any forward.

A shard is a safetensors file whose size follows from its rows and tokens, so the plan is exact, and a writer can put
every token at its place in any order.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.cache import DTYPE_NAMES, ROW_COLUMNS
from models.errors import UserError

Columns = dict[str, tuple[torch.dtype, tuple[int, ...]]]
MANIFEST_BYTES = 3000  # about; plus a ledger line a shard
LEDGER_LINE_BYTES = 150


@dataclass(frozen=True)
class Shard:
    """Rows first_row .. end_row of the whole cache."""

    index: int
    first_row: int
    end_row: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.end_row - self.first_row


@dataclass(frozen=True)
class ShardLayout:
    """The file of one shard: header bytes, and for each column where it starts and what it holds."""

    header: bytes
    starts: dict[str, int]  # from the beginning of the file
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    num_bytes: int


def cut_shards(row_offsets: np.ndarray, shard_tokens: int) -> list[Shard]:
    """Whole rows in order, up to shard_tokens each; a longer row is a shard of its own."""
    shards, first, num_rows = [], 0, len(row_offsets) - 1
    while first < num_rows:
        end = int(np.searchsorted(row_offsets, row_offsets[first] + shard_tokens, side="right")) - 1
        end = min(max(end, first + 1), num_rows)
        shards.append(Shard(len(shards), first, end, int(row_offsets[end] - row_offsets[first])))
        first = end
    return shards


def shard_layout(columns: Columns, *, tokens: int, rows: int) -> ShardLayout:
    """Columns in order of falling element size, so that each is aligned; the format is safetensors' own."""
    order = sorted(columns, key=lambda name: (-columns[name][0].itemsize, name))
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    begin, begins, shapes = 0, {}, {}
    for name in order:
        dtype, tail = columns[name]
        first = {"row_offsets": rows + 1, "row_ids": rows}.get(name, tokens)
        shapes[name] = (first, *tail)
        end = begin + int(np.prod(shapes[name], dtype=np.int64)) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
        begins[name], begin = begin, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + offset for name, offset in begins.items()}
    return ShardLayout(header, starts, shapes, {name: columns[name][0] for name in order}, len(header) + begin)


@dataclass(frozen=True)
class CachePlan:
    """Sizes of a cache that is not written yet."""

    folder: Path
    columns: Columns
    shards: list[Shard]
    vocab_size: int
    hidden_size: int

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def shard_bytes(self, index: int) -> int:
        shard = self.shards[index]
        return shard_layout(self.columns, tokens=shard.tokens, rows=shard.rows).num_bytes

    def num_bytes(self, shards: list[int] | None = None) -> int:
        """Bytes of the given shards (all by default) and the manifest."""
        wanted = range(len(self.shards)) if shards is None else shards
        return sum(map(self.shard_bytes, wanted)) + MANIFEST_BYTES + LEDGER_LINE_BYTES * len(wanted)

    def check_space(self, missing: list[int]) -> None:
        """Raise UserError when the missing shards do not fit on the disk."""
        needed, free = self.num_bytes(missing), free_bytes(self.folder)
        if needed > free:
            raise UserError(
                f"cache_root: {self.folder.name} needs {human(needed)} and its disk has {human(free)} free; free some, "
                f"give another cache_root, or lower data.max_train_tokens or cache.top_k"
            )

    def describe(self, missing: list[int]) -> str:
        """Tokens, bytes a column, free disk, and what other signals would take."""
        lines = [
            f"cache {self.folder}: {self.num_tokens:,} tokens in {self.num_rows:,} rows, {len(self.shards)} shards"
            + (f", {len(self.shards) - len(missing)} of them done" if len(missing) < len(self.shards) else ""),
            f"  {'column':<14} {'bytes/token':>11} {'bytes':>10}",
        ]
        for name, (dtype, shape) in self.columns.items():
            each = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            if name in ROW_COLUMNS:
                lines.append(f"  {name:<14} {'':>11} {human(each * self.num_rows):>10}")
            else:
                lines.append(f"  {name:<14} {each:>11,} {human(each * self.num_tokens):>10}")
        per_token = self.num_bytes() / max(self.num_tokens, 1)
        lines.append(f"  {'all':<14} {per_token:>11,.1f} {human(self.num_bytes()):>10}")
        others = comparison(self.num_tokens, self.vocab_size, self.hidden_size)
        lines.append("  for comparison: " + ", ".join(f"{name} {human(size)}" for name, size in others.items()))
        lines.append(f"  to write: {human(self.num_bytes(missing))}, free on disk: {human(free_bytes(self.folder))}")
        return "\n".join(lines)


def comparison(num_tokens: int, vocab_size: int, hidden_size: int) -> dict[str, int]:
    """Bytes of other ways to keep a target's signal: why logits of the whole vocabulary are not stored."""
    return {
        "all logits in fp16": num_tokens * vocab_size * 2,
        "top 64 (int32 + fp16)": num_tokens * 64 * 6,
        "one 16-bit state": num_tokens * hidden_size * 2,
        "three 16-bit taps": num_tokens * hidden_size * 6,
    }


def free_bytes(folder: Path) -> int:
    """Free space of the disk that will hold the folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def human(num_bytes: float) -> str:
    """Decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.2f} {unit}"
        num_bytes /= 1000
    raise AssertionError
