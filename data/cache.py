"""The cache on disk, format version 1: `<cache_root>/<name>-<fingerprint>/manifest.json` and its shards.

The manifest says what the cache is (fingerprints, columns) and holds the ledger: which shards are complete, with size
and checksum. A shard counts only once the ledger lists it. The manifest changes under a file lock and by atomic
replacement, so that several processes may write shards of one cache, and so that a crash leaves the old or the new one.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import xxhash

from data.rows import Rows
from data.signals import SignalSpec
from models.errors import UserError
from models.target import Target

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TAP_CONVENTION = "tap i is the residual stream entering block i: hidden_states[i] of transformers, 0 the embedding"
DTYPE_NAMES = {  # torch -> safetensors
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16",
    torch.bfloat16: "BF16",
}  # fmt: skip
ROW_COLUMNS = ("row_offsets", "row_ids")  # every other column has one entry a token


@dataclass(frozen=True)
class ShardRecord:
    """A line of the ledger. checksum: xxh3 (64 bits) of the whole file."""

    rows: int
    tokens: int
    bytes: int
    checksum: str


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def cache_columns(spec: SignalSpec, target: Target) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape behind the first dimension) of all columns of a shard."""
    return {
        "input_ids": (torch.int32, ()),
        "loss_mask": (torch.uint8, ()),
        "row_offsets": (torch.int64, ()),
        "row_ids": (torch.int64, ()),
        **spec.columns(target.hidden_size, target.dtype),
    }


def fingerprint_fields(target: Target, rows: Rows, spec: SignalSpec) -> dict[str, str]:
    """Everything that decides a cache's content, by name: what differs is told by these names."""
    fields = {
        "format_version": str(FORMAT_VERSION),
        "signal": spec.signal,
        "tap_ids": json.dumps(spec.tap_ids),
        "vocab_size": str(target.vocab_size),
        "rows": rows.fingerprint(),
        "longest_row": str(int(np.diff(rows.row_offsets).max())),
        "num_tokens": str(len(rows.input_ids)),
        **target.fingerprint(),
    }
    if spec.signal == "topk":
        fields["top_k"] = str(spec.top_k)
    return fields


def fingerprint(fields: dict[str, str]) -> str:
    return xxhash.xxh3_64(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def changed_fields(cache_root: Path, name: str, fields: dict[str, str]) -> tuple[Path, list[str]] | None:
    """The existing cache of that name that differs in the fewest fields, and those fields as `field: old -> new`."""
    nearest: tuple[Path, list[str]] | None = None
    for path in sorted(cache_root.glob(f"{name}-*/{MANIFEST}")):
        if path.parent.name[: -len("-" + fingerprint(fields))] != name:
            continue
        with suppress(UserError):
            old = Manifest.open(path.parent).fields
            different = [
                f"{key}: {old.get(key)} -> {fields.get(key)}"
                for key in sorted({*old, *fields})
                if old.get(key) != fields.get(key)
            ]
            if nearest is None or len(different) < len(nearest[1]):
                nearest = (path.parent, different)
    return nearest


class Manifest:
    """`manifest.json` of one cache folder. `content` is what the file holds."""

    def __init__(self, folder: Path, content: dict):
        self.folder, self.content = folder, content

    @classmethod
    def new(
        cls, folder: Path, target: Target, rows: Rows, spec: SignalSpec, *, shard_tokens: int, num_shards: int
    ) -> "Manifest":
        fields = fingerprint_fields(target, rows, spec)
        columns = {
            name: {"dtype": DTYPE_NAMES[dtype], "shape": list(shape)}
            for name, (dtype, shape) in cache_columns(spec, target).items()
        }
        content = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint(fields),
            "fields": fields,
            "target": {
                "name": target.name,
                "vocab_size": target.vocab_size,
                "hidden_size": target.hidden_size,
                "num_blocks": target.num_blocks,
            },
            "signal": {"signal": spec.signal, "top_k": spec.top_k if spec.signal == "topk" else None},
            "taps": None if spec.tap_ids is None else {"ids": list(spec.tap_ids), "convention": TAP_CONVENTION},
            "columns": columns,
            "num_rows": len(rows.row_ids),
            "num_tokens": len(rows.input_ids),
            "num_supervised": int(rows.loss_mask.sum()),
            "num_shards": num_shards,
            "shard_tokens": shard_tokens,
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")},
            "shards": {},
        }
        return cls(folder, content)

    @classmethod
    def open(cls, folder: Path) -> "Manifest":
        """Raises UserError when there is no manifest, or one of another format version."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{folder}: no {MANIFEST}, so no cache; give the folder that train.cache printed")
        try:
            content = json.loads(path.read_text())
            found = content["format_version"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path}: damaged ({type(error).__name__}); delete the folder and cache again") from error
        if found != FORMAT_VERSION:
            raise UserError(f"{path}: format version {found}, this program reads {FORMAT_VERSION}; cache again")
        return cls(folder, content)

    @property
    def fields(self) -> dict[str, str]:
        return self.content["fields"]

    @property
    def num_shards(self) -> int:
        return self.content["num_shards"]

    @property
    def spec(self) -> SignalSpec:
        signal, taps = self.content["signal"], self.content["taps"]
        return SignalSpec(signal["signal"], signal["top_k"] or 64, None if taps is None else tuple(taps["ids"]))

    @property
    def columns(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        return {k: (dtypes[v["dtype"]], tuple(v["shape"])) for k, v in self.content["columns"].items()}

    @property
    def shards(self) -> dict[int, ShardRecord]:
        """The ledger: complete shards by number."""
        return {int(name[6:-12]): ShardRecord(**record) for name, record in sorted(self.content["shards"].items())}

    @property
    def is_complete(self) -> bool:
        return len(self.content["shards"]) == self.num_shards

    def damaged_shards(self) -> dict[int, str]:
        """Shards of the ledger whose file is missing or has another size, with what is wrong. Reads no content."""
        damaged = {}
        for index, record in self.shards.items():
            try:
                size = (self.folder / shard_name(index)).stat().st_size
            except FileNotFoundError:
                damaged[index] = "the file is missing"
                continue
            if size != record.bytes:
                kind = f"{record.bytes - size} bytes are missing" if size < record.bytes else "it is too long"
                damaged[index] = f"{kind} ({size} of {record.bytes})"
        return damaged

    def save(self) -> None:
        """Replace the file at once. The caller holds the folder's lock."""
        replace_file(self.folder / MANIFEST, (json.dumps(self.content, indent=1, sort_keys=True) + "\n").encode())

    def update_ledger(self, *, add: dict[int, ShardRecord] | None = None, drop: Sequence[int] = ()) -> None:
        """Add or drop shards in the file as other processes left it, and here."""
        with folder_lock(self.folder):
            self.content = Manifest.open(self.folder).content
            for index in drop:
                self.content["shards"].pop(shard_name(index), None)
            for index, record in (add or {}).items():
                self.content["shards"][shard_name(index)] = asdict(record)
            self.save()


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Exclusive between processes; a dead process' lock is gone with it."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_file(path: Path, content: bytes) -> None:
    """Write under a temporary name, fsync, rename, fsync the folder: readers see the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_full(path.parent), temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_folder(path.parent)


@contextmanager
def disk_full(folder: Path) -> Iterator[None]:
    """Tell a full disk or an exhausted quota in one line; what the ledger lists stays good."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"cache_root: the disk of {folder} is full ({error.strerror}); free some space and run the same command "
            f"again: it continues after the last complete shard"
        ) from error


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
