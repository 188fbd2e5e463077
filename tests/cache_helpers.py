"""Rows and a fake target for the tests of cache and reader."""

from types import SimpleNamespace

import numpy as np
import torch

from data.rows import Rows


def make_rows(lengths, *, vocab_size: int = 259, seed: int = 0) -> Rows:
    """Random rows of the given lengths; ids of rows are shuffled and far from 0."""
    generator = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Rows(
        input_ids=generator.integers(0, vocab_size, offsets[-1]).astype(np.int32),
        loss_mask=generator.random(offsets[-1]) < 0.7,
        row_offsets=offsets,
        row_ids=generator.permutation(10 * len(lengths))[: len(lengths)].astype(np.int64) + 1000,
    )


def numbered_rows(lengths) -> Rows:
    """Rows whose every token is the row's own number, which is its id too."""
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    numbers = np.arange(len(lengths))
    return Rows(
        input_ids=np.repeat(numbers, lengths).astype(np.int32),
        loss_mask=np.ones(offsets[-1], dtype=bool),
        row_offsets=offsets,
        row_ids=numbers.astype(np.int64),
    )


class FakeTarget:
    """Final state and taps hold the token's id times `scale`; the largest logits are `favourites`', in order."""

    def __init__(self, *, vocab_size: int, dtype=torch.float32, scale: float = 1.0, favourites=(), tap_ids=None):
        self.vocab_size = self.head_width = vocab_size
        self.hidden_size, self.num_blocks, self.max_positions = 4, 8, 4096
        self.name, self.tap_ids, self.dtype, self.device = "fake", tap_ids, dtype, torch.device("cpu")
        self.scale, self.favourites = scale, favourites
        self.num_padded = self.num_forwards = 0

    def parameters(self):
        return iter([torch.zeros(1)])

    def fingerprint(self) -> dict[str, str]:
        return {"target_weights": f"fake {self.scale} {self.favourites}", "target_dtype": str(self.dtype)}

    def states(self, input_ids, **_):
        self.num_forwards += 1
        self.num_padded += input_ids.numel()
        state = (input_ids[..., None].float() * self.scale).expand(*input_ids.shape, self.hidden_size).to(self.dtype)
        taps = None if self.tap_ids is None else state[:, :, None].expand(-1, -1, len(self.tap_ids), -1)
        return SimpleNamespace(final_hidden=state, taps=taps)

    def logits(self, final_hidden):
        logits = torch.zeros(*final_hidden.shape[:-1], self.vocab_size) + final_hidden[..., :1].float() * 0
        for rank, token in enumerate(self.favourites):
            logits[..., token] = 20.0 - rank
        return logits
