"""Reading a cache: shards are mapped into memory, rows come out as packed tensors.

Opening checks the size of every file against the manifest (a cut map would read as zeros); `data.verify` reads all.
A pickled reader is a path and the ledger: a worker process maps the shards it needs, a few at a time.
"""

import json
import mmap
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.cache import DTYPE_NAMES, ROW_COLUMNS, Manifest, shard_name
from models.errors import UserError

MAX_OPEN_SHARDS = 32
# NumPy has no bf16: its columns travel as uint16 and are reinterpreted by torch
NUMPY_DTYPES = {
    "I64": np.int64, "I32": np.int32, "U8": np.uint8, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
}  # fmt: skip


class MappedShard:
    """Arrays over one shard file; nothing is read until it is touched."""

    def __init__(self, path: Path, num_bytes: int):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._map) != num_bytes:
            raise UserError(_wrong_size(path, len(self._map), num_bytes))
        try:
            header_bytes = int.from_bytes(self._map[:8], "little")
            header = json.loads(self._map[8 : 8 + header_bytes])
            header.pop("__metadata__", None)
            self.arrays = {name: self._array(8 + header_bytes, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged header; delete this file and run train.cache again") from error
        self.dtypes = {name: entry["dtype"] for name, entry in header.items()}

    def _array(self, data_start: int, entry: dict) -> np.ndarray:
        dtype, shape = NUMPY_DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        count = int(np.prod(shape, dtype=np.int64))
        if count * np.dtype(dtype).itemsize != end - begin:
            raise ValueError("size of a column")
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=data_start + begin).reshape(shape)


class CacheReader:
    """Rows of a finished cache by their number.

    `reader.rows([5, 2])` gives packed columns (N, ...) of rows 5 and 2, `row_offsets` (R+1,) and `row_ids` (R,).
    Raises UserError when the cache is unfinished or a shard is missing or has the wrong size.
    """

    def __init__(self, folder: str | Path, *, max_open: int = MAX_OPEN_SHARDS):
        self.folder, self.max_open = Path(folder), max_open
        self.manifest = Manifest.open(self.folder)
        self._check()
        records = [record for _, record in sorted(self.manifest.shards.items())]
        self._first_rows = np.cumsum([0] + [record.rows for record in records])  # (S+1,)
        self._bytes = [record.bytes for record in records]
        self._open: OrderedDict[int, MappedShard] = OrderedDict()

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    @property
    def num_tokens(self) -> int:
        return self.manifest.content["num_tokens"]

    @property
    def fingerprint(self) -> str:
        return self.manifest.content["fingerprint"]

    def row_lengths(self) -> np.ndarray:  # (R,) int64
        """Tokens of every row of the cache."""
        return np.concatenate([np.diff(self.shard(i).arrays["row_offsets"]) for i in range(self.manifest.num_shards)])

    def row(self, number: int) -> dict[str, Tensor]:
        """The columns of one row."""
        return self.rows([number])

    def rows(self, numbers: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Packed columns of the given rows, in the given order. Copies: the tensors outlive the maps."""
        numbers = np.asarray(numbers, dtype=np.int64)  # (R,)
        shards = np.searchsorted(self._first_rows, numbers, side="right") - 1
        places = []  # shard, first token, end token
        row_ids = np.empty(len(numbers), dtype=np.int64)
        for i, (number, index) in enumerate(zip(numbers, shards)):
            arrays = self.shard(int(index)).arrays
            local = number - self._first_rows[index]
            places.append((int(index), *map(int, arrays["row_offsets"][local : local + 2])))
            row_ids[i] = arrays["row_ids"][local]
        offsets = np.cumsum([0] + [end - begin for _, begin, end in places])  # (R+1,)
        columns: dict[str, Tensor] = {
            "row_offsets": torch.from_numpy(offsets.astype(np.int64)),
            "row_ids": torch.from_numpy(row_ids),
        }
        for name, (dtype, tail) in self.manifest.columns.items():
            if name in ROW_COLUMNS:
                continue
            packed = np.empty((offsets[-1], *tail), dtype=NUMPY_DTYPES[DTYPE_NAMES[dtype]])
            for (index, begin, end), start in zip(places, offsets):
                packed[start : start + end - begin] = self.shard(index).arrays[name][begin:end]
            tensor = torch.from_numpy(packed)
            columns[name] = tensor.view(torch.bfloat16) if dtype is torch.bfloat16 else tensor
        return columns

    def shard(self, index: int) -> MappedShard:
        """The mapped shard; the least recently used one is closed when too many are open."""
        if index in self._open:
            self._open.move_to_end(index)
        else:
            self._open[index] = MappedShard(self.folder / shard_name(index), self._bytes[index])
            if len(self._open) > self.max_open:
                self._open.popitem(last=False)
        return self._open[index]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}

    def _check(self) -> None:
        for index, record in self.manifest.shards.items():
            path = self.folder / shard_name(index)
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                raise UserError(f"{path}: the file is missing; run train.cache again to rebuild it")
            if size != record.bytes:
                raise UserError(_wrong_size(path, size, record.bytes))
        if not self.manifest.is_complete:
            done, total = len(self.manifest.shards), self.manifest.num_shards
            raise UserError(f"{self.folder}: unfinished, {done} of {total} shards; run train.cache again to continue")


def _wrong_size(path: Path, size: int, expected: int) -> str:
    what = f"{expected - size} bytes are missing" if size < expected else f"{size - expected} bytes too long"
    return f"{path}: {what} ({size} of {expected}); run train.cache again to rebuild it"
