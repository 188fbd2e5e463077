"""A `RollbackCache` whose rows have lengths of their own: batches in which each row keeps another number of tokens.

1. `place(T)` says where the next T tokens of each row stand: their positions, and a mask over the slots they may see.
2. A forward with these writes keys and values behind each row's length; nothing is kept yet.
3. `advance(counts)` keeps the first `counts[b]` of row b; what stands behind is overwritten by the next forward.
   Rolling a row back is setting its integer in `lengths`.
4. `drop(row)` takes a row out: the last row moves into its place, one row's keys and values are copied.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from models.errors import UserError
from models.kv_cache import RollbackCache, RollbackLayer

T = TypeVar("T")


class RaggedLayer(RollbackLayer):
    """Buffers of one block. Zeros at first: masked slots are read, and 0 * garbage may be nan."""

    def __init__(self, capacity: int, static: bool):
        super().__init__(capacity, static=True)

    def update(
        self,
        key_states: Tensor,  # (B, H, T, Dh)
        value_states: Tensor,  # (B, H, T, Dv)
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:  # (B, H, length, Dh), (.., Dv)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_rows = key_states.shape[0]
        rows = torch.arange(num_rows, device=key_states.device)[:, None]  # (B, 1)
        slots = self.slots.to(key_states.device)  # (B, T)
        found = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.transpose(1, 2)[rows, slots] = states.transpose(1, 2)
            found.append(buffer[:num_rows, :, : self.length])
        return found[0], found[1]


class RaggedCache(RollbackCache):
    """See the module. `lengths` are integers on the host: tokens of each row whose keys and values are valid."""

    layer_class = RaggedLayer

    def __init__(self, num_layers: int, capacity: int, *, static: bool = False, window: bool = False):
        super().__init__(num_layers, capacity, static=False, window=window)
        self.lengths: list[int] = []

    @classmethod
    def for_rows(cls, model: nn.Module, num_rows: int, capacity: int) -> "RaggedCache":
        """An empty cache for `num_rows` rows of up to `capacity` tokens. Raises UserError where transformers must build
        the mask itself, or blocks keep no keys and values."""
        cache = cls.for_model(model, capacity)
        if not cache.own_mask:
            raise UserError(
                f"target or draft {type(model).__name__}: batches of ragged rows need full attention by SDPA, and this "
                "model has a sliding window or another attention kernel; decode it at batch size 1"
            )
        cache.lengths = [0] * num_rows
        return cache

    def place(self, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:  # (B, T), (B, 1, T, S) bool
        """Positions of the next `num_tokens` tokens of each row, and their mask: causal, over the row's own tokens."""
        end = max(self.lengths) + num_tokens
        assert end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        if self._positions is None:
            self._positions = torch.arange(self.capacity, device=device)[None]
        starts = torch.tensor(self.lengths, device=device)[:, None]  # (B, 1)
        slots = starts + self._positions[:, :num_tokens]  # (B, T)
        for layer in self.layers:
            layer.slots, layer.length = slots, end
        return slots, (self._positions[:, None, :end] <= slots[:, :, None])[:, None]

    def advance(self, counts: Sequence[int]) -> None:
        """Keep so many of the tokens that the last forward wrote, row by row."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def drop(self, row: int) -> None:
        """Take a row out; the last one has its number from now on."""
        last, length = len(self.lengths) - 1, self.lengths[-1]
        if row != last:
            for layer in self.layers:
                for buffer in (layer.keys, layer.values) if layer.is_initialized else ():
                    buffer[row, :, :length] = buffer[last, :, :length]
        replace_by_last(self.lengths, row)


def replace_by_last(items: list[T], row: int) -> None:
    """Drop an item: the last one takes its place."""
    items[row] = items[-1]
    items.pop()


def without_row(rows: Tensor, row: int) -> Tensor:  # (B, ...) -> (B-1, ...)
    """The same of a tensor, in place, without copying the other rows."""
    if row != len(rows) - 1:
        rows[row] = rows[-1]
    return rows[:-1]
