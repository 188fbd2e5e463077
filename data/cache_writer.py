"""Writing shards: in a background thread, each token at its place, under the final name only when complete.

1. A shard grows under a temporary name in the cache's folder, which its writer holds locked.
2. When every row is there: fsync, checksum, rename, fsync of the folder.
3. The ledger lists it. Only now does it count.
A process that dies anywhere leaves a temporary file without a lock (removed by the next run) or a shard that the ledger
does not list (written again).
"""

import fcntl
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from data.cache import Manifest, ShardRecord, disk_full, folder_lock, fsync_folder, shard_name
from data.cache_plan import Shard, ShardLayout, shard_layout
from data.rows import Rows
from models.errors import UserError

TEMPORARY = ".{name}.{pid}.tmp"
CHECKSUM_BLOCK = 1 << 24


def remove_stale_files(folder: Path) -> None:
    """Delete temporary files whose writer is dead: nobody holds their lock."""
    with folder_lock(folder):
        for path in folder.glob(".*.tmp"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                path.unlink()


class ShardFile:
    """A shard while it grows. `finish` gives it its name; `abandon` deletes it."""

    def __init__(self, folder: Path, name: str, layout: ShardLayout):
        self.folder, self.name, self.layout = folder, name, layout
        self.temporary = folder / TEMPORARY.format(name=name, pid=os.getpid())
        with folder_lock(folder):  # so that nobody takes the file for stale before it is locked
            self.descriptor = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            self._write(layout.header, 0)
        except UserError:
            self.abandon()
            raise

    def write(self, column: str, first: int, values: Tensor) -> None:  # (n, ...)
        """Entries first .. first + n of a column."""
        shape, dtype = self.layout.shapes[column], self.layout.dtypes[column]
        assert values.dtype == dtype and values.shape[1:] == shape[1:] and first + len(values) <= shape[0], column
        entry_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        content = values.contiguous().view(-1).view(torch.uint8).numpy()
        self._write(memoryview(content), self.layout.starts[column] + first * entry_bytes)

    def finish(self) -> ShardRecord:
        assert os.fstat(self.descriptor).st_size == self.layout.num_bytes, "a shard with holes"
        with disk_full(self.folder):
            os.fsync(self.descriptor)
        checksum = file_checksum(self.temporary)
        os.rename(self.temporary, self.folder / self.name)
        fsync_folder(self.folder)
        os.close(self.descriptor)
        tokens, rows = self.layout.shapes["input_ids"][0], self.layout.shapes["row_ids"][0]
        return ShardRecord(rows=rows, tokens=tokens, bytes=self.layout.num_bytes, checksum=checksum)

    def abandon(self) -> None:
        self.temporary.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _write(self, content: bytes | memoryview, position: int) -> None:
        view = memoryview(content)
        with disk_full(self.folder):
            while len(view):
                written = os.pwrite(self.descriptor, view, position)
                view, position = view[written:], position + written


def file_checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(CHECKSUM_BLOCK)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheBatch:
    """One forward of the target: some rows of one shard. is_last: the shard is complete with it."""

    shard: Shard
    rows: np.ndarray  # numbers in the whole cache, ascending
    is_last: bool


class CacheWriter:
    """Takes batches in the order of their shards and writes them in a thread of its own.

    An error of the thread (a full disk, a value that is not finite) is raised by the next `submit` or by `close`.
    """

    def __init__(self, manifest: Manifest, rows: Rows, *, max_waiting: int = 2):
        self.manifest, self.rows = manifest, rows
        self.bytes_written = self.shards_written = 0
        self._columns = manifest.columns
        self._file: ShardFile | None = None
        self._error: BaseException | None = None
        self._queue: queue.Queue[tuple[CacheBatch, dict[str, Tensor]] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: CacheBatch, columns: dict[str, Tensor]) -> None:
        """Hand over a batch; waits while max_waiting others are unwritten."""
        self._raise_error()
        self._queue.put((batch, columns))

    def close(self) -> None:
        """Wait until everything is written. An unfinished shard is dropped."""
        self.stop()
        self._raise_error()

    def stop(self) -> None:
        """As close, for use while another error is on its way: raises nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue  # drain, so that submit never blocks
            try:
                self._write(*item)
            except BaseException as error:
                self._error = error

    def _write(self, batch: CacheBatch, columns: dict[str, Tensor]) -> None:
        shard = batch.shard
        offsets = self.rows.row_offsets[shard.first_row : shard.end_row + 1] - self.rows.row_offsets[shard.first_row]
        if self._file is None:
            layout = shard_layout(self._columns, tokens=shard.tokens, rows=shard.rows)
            self._file = ShardFile(self.manifest.folder, shard_name(shard.index), layout)
            tokens = slice(self.rows.row_offsets[shard.first_row], self.rows.row_offsets[shard.end_row])
            fixed = {
                "input_ids": self.rows.input_ids[tokens].astype(np.int32),
                "loss_mask": self.rows.loss_mask[tokens].astype(np.uint8),
                "row_offsets": offsets.astype(np.int64),
                "row_ids": self.rows.row_ids[shard.first_row : shard.end_row].astype(np.int64),
            }
            for name, values in fixed.items():
                self._file.write(name, 0, torch.from_numpy(values))
        local = batch.rows - shard.first_row
        columns = {name: values.cpu() for name, values in columns.items()}
        for name, values in columns.items():
            _check_finite(name, values, batch.rows, np.diff(offsets)[local])
        done = 0
        # neighbours in the shard are written in one piece
        for run in np.split(local, np.flatnonzero(np.diff(local) > 1) + 1):
            first, count = int(offsets[run[0]]), int(offsets[run[-1] + 1] - offsets[run[0]])
            for name, values in columns.items():
                self._file.write(name, first, values[done : done + count])
            done += count
        if batch.is_last:
            record = self._file.finish()
            self._file = None
            self.manifest.update_ledger(add={shard.index: record})
            self.bytes_written += record.bytes
            self.shards_written += 1


def _check_finite(name: str, values: Tensor, rows: np.ndarray, lengths: np.ndarray) -> None:
    """A value that is not finite would poison training much later: refuse it with its place."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return
    bad_tokens = (~torch.isfinite(values)).view(len(values), -1).any(1).nonzero()[:, 0]
    row = int(np.searchsorted(np.cumsum(lengths), int(bad_tokens[0]), side="right"))
    bad = values[int(bad_tokens[0])].reshape(-1)
    bad = float(bad[~torch.isfinite(bad)][0])
    finite = values[torch.isfinite(values)].float().abs()
    largest = f"{finite.max().item():.6g}" if len(finite) else "none"
    raise UserError(
        f"dtype: row {int(rows[row])}, column {name}: the target gave {bad} (largest finite value of the batch "
        f"{largest}); load the target with dtype=bf16 or dtype=fp32"
    )
