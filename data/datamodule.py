"""Packed batches for training, from a cache or from rows, in an order that a resumed run continues exactly.

1. Each epoch's rows are shuffled by (seed, epoch) and cut into batches of whole rows, up to batch_tokens.
2. The epochs follow one another as one long stream of batches; position in it = batches consumed by the trainer.
3. With several ranks, rank r takes batches r, r + W, ...: all ranks take the same number of steps.
The stream is a function of seed, data and batch_tokens alone, so the position is all that has to be saved.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.reader import CacheReader
from data.rows import Rows
from models.errors import UserError
from models.simulation import steps_of_slots

Batch = dict[str, Tensor]


class Item(NamedTuple):
    """What makes one batch."""

    rows: np.ndarray  # (R,) row numbers
    counts: bool = True  # False: its pred_mask is empty
    window_counts: np.ndarray | None = None  # (S,) slots that count at each step, in all batches of an optimiser step


class PackedRows(Dataset):
    """Row numbers -> one packed batch.

    input_ids (N,) int64; position_ids (N,) int64, restarting at each row; row_offsets (R+1,) int32; row_ids (R,) int64;
    loss_mask (N,) bool; pred_mask (N,) bool: True at t where x[t+1] is in the same row and its loss_mask is True; and
    the signal's columns (N, ...) when the source is a cache. window_counts (S,) where an item has them.
    """

    def __init__(self, source: Rows | str | Path):
        self.source: Rows | CacheReader = source if isinstance(source, Rows) else CacheReader(source)

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint() if isinstance(self.source, Rows) else self.source.fingerprint

    def row_lengths(self) -> np.ndarray:  # (R,)
        if isinstance(self.source, Rows):
            return np.diff(self.source.row_offsets)
        return self.source.row_lengths()

    def slot_counts(self, steps: int) -> np.ndarray:  # (R, S)
        """How many slots of each row a simulation of `steps` steps counts at each of them."""
        if isinstance(self.source, Rows):
            parts = [(self.source.loss_mask, self.source.row_offsets)]
        else:
            shards = (self.source.shard(i).arrays for i in range(self.source.manifest.num_shards))
            # one after another: a large cache has more of them than a process may hold open
            parts = ((arrays["loss_mask"], arrays["row_offsets"]) for arrays in shards)
        counts = []
        for mask, offsets in parts:
            supervised = torch.from_numpy(mask.astype(bool))  # (N,)
            starts = torch.from_numpy(np.array(offsets, dtype=np.int64))  # (R+1,)
            slots = steps_of_slots(supervised, starts, steps).numpy()  # (N,)
            # one step after another: rows in memory may be 100M tokens
            by_step = [np.add.reduceat(slots > step, starts[:-1].numpy(), dtype=np.int64) for step in range(steps)]
            counts.append(np.stack(by_step, axis=1))
        return np.concatenate(counts)

    def __getitem__(self, item: Item) -> Batch:
        numbers, counts = item.rows, item.counts
        batch = _packed_rows(self.source, numbers) if isinstance(self.source, Rows) else self.source.rows(numbers)
        offsets = batch["row_offsets"]
        lengths = offsets.diff()  # (R,)
        loss_mask = batch["loss_mask"].bool()  # (N,)
        num_tokens = len(loss_mask)
        batch["input_ids"] = batch["input_ids"].long()
        batch["position_ids"] = torch.arange(num_tokens) - offsets[:-1].repeat_interleave(lengths)
        pred_mask = torch.zeros(num_tokens, dtype=torch.bool)
        if counts:
            pred_mask[:-1] = loss_mask[1:]
            pred_mask[offsets[1:] - 1] = False  # a row's last token predicts nothing
        batch["loss_mask"], batch["pred_mask"] = loss_mask, pred_mask
        batch["row_offsets"] = offsets.to(torch.int32)
        if item.window_counts is not None:
            batch["window_counts"] = torch.from_numpy(item.window_counts)
        return batch


def _packed_rows(rows: Rows, numbers: np.ndarray) -> Batch:
    pieces = [rows.row(int(number)) for number in numbers]
    offsets = np.cumsum([0] + [len(ids) for ids, _ in pieces])
    return {
        "input_ids": torch.from_numpy(np.concatenate([ids for ids, _ in pieces])),
        "loss_mask": torch.from_numpy(np.concatenate([mask for _, mask in pieces])),
        "row_offsets": torch.from_numpy(offsets.astype(np.int64)),
        "row_ids": torch.from_numpy(rows.row_ids[numbers]),
    }


class BatchStream:
    """Number -> rows of the batch, through all epochs. Never ends."""

    def __init__(self, lengths: np.ndarray, *, batch_tokens: int, seed: int, shuffle: bool):
        longest = int(lengths.max())
        if longest > batch_tokens:
            raise UserError(
                f"trainer.batch_tokens={batch_tokens}: the longest row has {longest} tokens; set at least that many, "
                f"or lower data.max_length"
            )
        self.lengths, self.batch_tokens, self.seed, self.shuffle = lengths, batch_tokens, seed, shuffle

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Row numbers of each batch of an epoch; every row is in exactly one."""
        num_rows = len(self.lengths)
        order = np.arange(num_rows)
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(num_rows)
        ends = np.cumsum(self.lengths[order])
        batches, first = [], 0
        while first < num_rows:
            before = int(ends[first - 1]) if first else 0
            end = int(np.searchsorted(ends, before + self.batch_tokens, side="right"))
            batches.append(order[first:end])
            first = end
        return batches

    def num_batches(self, num_epochs: int) -> int:
        return sum(len(self.epoch(epoch)) for epoch in range(num_epochs))

    def start_at(self, number: int) -> Iterator[np.ndarray]:
        """Batches number, number + 1, ..."""
        epoch = 0
        while number >= len(batches := self.epoch(epoch)):
            number, epoch = number - len(batches), epoch + 1
        while True:
            yield from batches[number:]
            number, epoch = 0, epoch + 1
            batches = self.epoch(epoch)


class PackedLoader:
    """One rank's share of a stream: `num_steps` batches in all, of which the first `start` are skipped.

    Its length counts the skipped ones too: Lightning adds what it restored to what it fetches. The two state functions
    tell Lightning that it can be resumed; the position itself is the data module's.
    """

    def __init__(
        self,
        dataset: PackedRows,
        stream: BatchStream,
        *,
        num_real: int | None,
        num_steps: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        accumulate: int = 1,
        slot_counts: np.ndarray | None = None,  # (R, S)
    ):
        self.dataset, self.stream = dataset, stream
        self.accumulate, self.slot_counts = accumulate, slot_counts
        self.num_real, self.num_steps, self.start = num_real, num_steps, start
        self.rank, self.world_size = rank, world_size
        self.num_workers, self.pin_memory = num_workers, pin_memory

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Batch]:
        yield from DataLoader(
            self.dataset,
            batch_size=None,
            sampler=_Items(self),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class _Items:
    """The sampler of a PackedLoader: row numbers go to the workers, which so hold no order of their own."""

    def __init__(self, loader: PackedLoader):
        self.loader = loader

    def __len__(self) -> int:
        return max(self.loader.num_steps - self.loader.start, 0)

    def __iter__(self) -> Iterator[Item]:
        loader = self.loader
        first = loader.start * loader.world_size
        end = loader.num_steps * loader.world_size
        window = loader.accumulate * loader.world_size  # batches of an optimiser step; a run resumes between steps
        batches = loader.stream.start_at(first)
        for begin in range(first, end, window):
            rows = [next(batches) for _ in range(min(window, end - begin))]
            counts = [loader.num_real is None or number < loader.num_real for number in range(begin, begin + len(rows))]
            totals = None
            if loader.slot_counts is not None:
                real = [loader.slot_counts[each].sum(0) for each, is_real in zip(rows, counts) if is_real]
                totals = np.sum(real, axis=0)
            for i in range(len(rows)):
                if (begin + i) % loader.world_size == loader.rank:
                    yield Item(rows[i], counts[i], totals)


class PackedDataModule(LightningDataModule):
    """Train and validation batches; see PackedRows for what a batch holds.

    train, val: folder of a cache, or Rows (then without signal columns: online training). val may be None.
    num_epochs, max_steps: the shorter one ends training; max_steps counts optimiser steps of `accumulate` batches on
        each rank. The last window and the last step are filled up with batches that do not count (empty pred_mask), so
        every row of the epochs is used once and no gradient is scaled by a short window. A finished run that is made
        longer goes on behind them: the few rows that filled its last window are not seen in that epoch.
    simulated_steps: S of an EAGLE head; training batches then say how many slots count at each step in their window.
    Lightning sees one epoch (Trainer(max_epochs=1)) of `num_batches` batches.
    """

    def __init__(
        self,
        train: Rows | str | Path,
        val: Rows | str | Path | None = None,
        *,
        batch_tokens: int,
        val_batch_tokens: int | None = None,
        seed: int = 0,
        num_epochs: int | None = 1,
        max_steps: int | None = None,
        accumulate: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        simulated_steps: int = 0,
    ):
        super().__init__()
        if num_epochs is None and max_steps is None:
            raise UserError("trainer.max_epochs, trainer.max_steps: set at least one of the two")
        self.train_set = PackedRows(train)
        self.val_set = None if val is None else PackedRows(val)
        self.num_epochs, self.max_steps, self.accumulate = num_epochs, max_steps, accumulate
        self.num_workers, self.pin_memory, self.simulated_steps = num_workers, pin_memory, simulated_steps
        self.stream = BatchStream(self.train_set.row_lengths(), batch_tokens=batch_tokens, seed=seed, shuffle=True)
        self._val_batch_tokens = val_batch_tokens or batch_tokens
        self._restored = 0  # batches of all ranks that earlier runs consumed

    def num_steps(self, world_size: int | None = None) -> int:
        """Optimiser steps of the whole training: what a schedule needs to know."""
        window = self.accumulate * (self._world_size if world_size is None else world_size)
        if self.num_epochs is None:
            return self.max_steps
        steps = -(-self.stream.num_batches(self.num_epochs) // window)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def num_batches(self, world_size: int | None = None) -> int:
        """Batches of the whole training on one rank."""
        return self.num_steps(world_size) * self.accumulate

    def train_dataloader(self) -> PackedLoader:
        return PackedLoader(
            self.train_set,
            self.stream,
            num_real=None if self.num_epochs is None else self.stream.num_batches(self.num_epochs),
            num_steps=self.num_batches(),
            start=self._restored // self._world_size,
            # rows in memory are sliced faster than a worker could send them
            num_workers=0 if isinstance(self.train_set.source, Rows) else self.num_workers,
            accumulate=self.accumulate,
            slot_counts=self.train_set.slot_counts(self.simulated_steps) if self.simulated_steps else None,
            **self._loader_options(),
        )

    def val_dataloader(self) -> PackedLoader | list:
        if self.val_set is None:
            return []
        stream = BatchStream(self.val_set.row_lengths(), batch_tokens=self._val_batch_tokens, seed=0, shuffle=False)
        num_real = stream.num_batches(1)
        return PackedLoader(
            self.val_set,
            stream,
            num_real=num_real,
            num_steps=-(-num_real // self._world_size),
            **self._loader_options(),  # no workers: to start them at each validation costs more than they save
        )

    def state_dict(self) -> dict:
        """Batches whose training step is done: those that a worker prepared ahead are not among them."""
        done = self._restored
        if self.trainer is not None:
            done = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed * self._world_size
        return {"batches_consumed": done, **self._stream_identity()}

    def load_state_dict(self, state: dict) -> None:
        """Raises UserError when the checkpoint's stream was another one: its position would mean other rows."""
        for key, value in self._stream_identity().items():
            if state.get(key) != value:
                raise UserError(
                    f"{key}: the checkpoint was made with {state.get(key)} and this run has {value}; set it back, or "
                    f"start afresh with another run=NAME"
                )
        self._restored = int(state["batches_consumed"])

    def _stream_identity(self) -> dict:
        return {
            "data": self.train_set.fingerprint,
            "trainer.batch_tokens": self.stream.batch_tokens,
            "seed": self.stream.seed,
            "number of devices": self._world_size,
        }

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    def _loader_options(self) -> dict:
        return {
            "rank": 0 if self.trainer is None else self.trainer.global_rank,
            "world_size": self._world_size,
            "pin_memory": self.pin_memory,
        }
