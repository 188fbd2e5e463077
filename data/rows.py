"""Rows: packed token ids with their loss mask, from any mix of sources.

1. Read documents lazily; each belongs to one split by a hash of its content.
2. Tokenise in batches. A text (EOS appended) is cut into windows of max_length tokens without overlap; a chat is one
   row, cut at max_length.
3. Take sources in turn, the one with the fewest tokens first, until they end or the cap on tokens is reached.
"""

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from data.progress import ProgressBar
from data.sources import Document, check_source, estimated_chars, read_source, source_name
from data.tokenise import Batch, tokenise
from models.errors import UserError

BATCH_TOKENS = 250_000  # tokenised at once: large enough for all cores, small enough as Python lists
CHARS_PER_TOKEN = 3.5  # a first guess, for sizes of batches and progress bars; what is seen replaces it


@dataclass(frozen=True, eq=False)
class Rows:
    """Token rows end to end. Row i is input_ids[row_offsets[i]:row_offsets[i + 1]]; mask True on tokens to learn."""

    input_ids: np.ndarray  # (N,) int32
    loss_mask: np.ndarray  # (N,) bool
    row_offsets: np.ndarray  # (R+1,) int64
    row_ids: np.ndarray  # (R,) int64, unique; depend on the document and window only

    def __post_init__(self):
        assert self.row_offsets[0] == 0 and self.row_offsets[-1] == len(self.input_ids) == len(self.loss_mask)
        assert len(self.row_offsets) == len(self.row_ids) + 1

    def __len__(self) -> int:
        return len(self.row_ids)

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (T,) and mask (T,) of row i, as views."""
        begin, end = self.row_offsets[i], self.row_offsets[i + 1]
        return self.input_ids[begin:end], self.loss_mask[begin:end]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        return int(self.loss_mask.sum())

    def fingerprint(self) -> str:
        """XXH3-128 (hex) over every array: equal rows in equal order, equal fingerprint."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for array, dtype in zip(self._arrays().values(), ("<i4", "u1", "<i8", "<i8")):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array, dtype=dtype).data)
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """One safetensors file, under its name only once it is complete."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        save_file(self._arrays(), partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "Rows":
        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise UserError(f"{path}: not a file of rows ({str(error).splitlines()[0]})") from error

    def _arrays(self) -> dict[str, np.ndarray]:
        return {key: getattr(self, key) for key in ("input_ids", "loss_mask", "row_offsets", "row_ids")}


def load_rows(
    sources: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    max_length: int,
    held_out_fraction: float,
    seed: int,
    max_tokens: int | None = None,
) -> Rows:
    """Rows of one split ("train" or "held_out") of the sources (see data/sources.py for their keys).

    A document is held out when a hash of (content, seed) says so, with chance held_out_fraction; `use` gives a source
    to one split alone. Text: every token of a document is in exactly one window of at most max_length; a tokenizer that
    adds BOS adds it to each window (the target has never seen a text without), unsupervised. Chats: longer ones are
    cut, dropped if no supervised token remains, and end at their last supervised token. max_tokens (and each source's
    own) is never exceeded; whole rows only. Raises UserError for bad sources, bad lines, and when nothing is left.
    """
    if split not in ("train", "held_out"):
        raise UserError(f"split={split}: use train or held_out")
    if not sources:
        raise UserError("data.sources is empty: give at least one {path: ...} or {dataset: ...}")
    if not isinstance(max_length, int) or max_length < 2:
        raise UserError(f"data.max_length={max_length}: a row needs at least 2 tokens, one to predict the other")
    if not 0.0 <= held_out_fraction < 1.0:
        raise UserError(f"data.held_out_fraction={held_out_fraction}: must be at least 0 and below 1")
    if max_tokens is not None and max_tokens <= 0:
        raise UserError(f"max_tokens={max_tokens}: must be positive, or null for all")
    pulls = []
    for number, source in enumerate(sources):
        source = check_source(source, where := f"data.sources[{number}]")
        if source["streaming"] and source["max_tokens"] is None and max_tokens is None:
            raise UserError(f"{where}: a streaming source has no known end; give it max_tokens (or cap the whole)")
        if source["use"] in ("all", split):
            pulls.append(_Pull(source, where, split, held_out_fraction, seed))
    rows = _pull_rows(pulls, tokenizer, max_length=max_length, max_tokens=max_tokens, split=split)
    if not len(rows):
        raise UserError(_nothing_left(pulls, split=split, held_out_fraction=held_out_fraction, max_length=max_length))
    for pull in pulls:
        if pull.num_left_out or not pull.num_tokens:
            print(f"{split} rows: {pull.summary()}", file=sys.stderr, flush=True)
    return rows


class _Pull:
    """One source being read: what is left of it, and what came of it so far."""

    def __init__(self, source: dict, where: str, split: str, held_out_fraction: float, seed: int):
        self.source, self.where, self.split = source, where, split
        self.held_out_fraction, self.seed = held_out_fraction, seed
        self.num_read = self.num_documents = 0  # all documents, those of this split
        self.num_tokens = self.num_supervised = 0
        self.num_unanswered = self.num_with_tools = self.num_dropped = 0
        self._documents = self._of_split()

    def _of_split(self) -> Iterator[Document]:
        for document in read_source(self.source, self.where):
            self.num_read += 1
            if self.source["use"] == "all":
                is_held_out = document.is_held_out(fraction=self.held_out_fraction, seed=self.seed)
                if is_held_out != (self.split == "held_out"):
                    continue
            self.num_documents += 1
            yield document

    def take(self, num_chars: float) -> list[Document]:
        """The next documents, at least one, up to num_chars; none at the end."""
        batch, taken = [], 0.0
        for document in self._documents:
            batch.append(document)
            taken += document.num_chars + 16  # short ones cost something too
            if taken >= num_chars:
                break
        return batch

    @property
    def room(self) -> float:
        """Tokens that the source's own cap still allows."""
        return np.inf if self.source["max_tokens"] is None else self.source["max_tokens"] - self.num_tokens

    def expected_tokens(self) -> float:
        """A guess, for the progress bar; 0 when unknown."""
        fraction = self.held_out_fraction if self.split == "held_out" else 1.0 - self.held_out_fraction
        fraction = fraction if self.source["use"] == "all" else 1.0
        guess = estimated_chars(self.source, self.where) / CHARS_PER_TOKEN * fraction
        return min(self.room, guess or (0.0 if self.room == np.inf else self.room))

    def add(self, batch: Batch) -> None:
        self.num_tokens += len(batch.input_ids)
        self.num_supervised += int(batch.loss_mask.sum())
        self.num_unanswered += batch.num_unanswered
        self.num_with_tools += batch.num_with_tools
        self.num_dropped += batch.num_dropped

    @property
    def num_left_out(self) -> int:
        return self.num_unanswered + self.num_with_tools + self.num_dropped

    def summary(self) -> str:
        text = f"{source_name(self.source)}: {self.num_documents:,} documents, {self.num_tokens:,} tokens, "
        text += f"{self.num_supervised:,} of them supervised"
        text += f"; {self.num_unanswered:,} chats without an answer left out" if self.num_unanswered else ""
        text += f"; {self.num_with_tools:,} chats with tools left out" if self.num_with_tools else ""
        return text + (f"; {self.num_dropped:,} with nothing to learn left out" if self.num_dropped else "")


def _pull_rows(
    pulls: list[_Pull], tokenizer: PreTrainedTokenizerBase, *, max_length: int, max_tokens: int | None, split: str
) -> Rows:
    """Batches from the source with the fewest tokens so far, until all end or the cap is reached."""
    limit = np.inf if max_tokens is None else max_tokens
    total = int(min(limit, sum(pull.expected_tokens() for pull in pulls)))
    batches: list[Batch] = []
    num_tokens = num_chars = 0
    active = list(pulls)
    with ProgressBar(f"tokenising {split} rows", max(total, 1), "tokens") as bar:
        while active and num_tokens < limit:
            pull = min(active, key=lambda p: p.num_tokens)
            # Read only what may still be needed, by the characters a token has had so far: a quarter of a fair share
            # of the rest, so that a wrong guess of those costs little and no source crowds out another.
            share = min(pull.room, (limit - num_tokens) / len(active)) / 4
            chars_per_token = num_chars / num_tokens if num_tokens else CHARS_PER_TOKEN
            documents = pull.take(min(BATCH_TOKENS, max(share, max_length)) * chars_per_token)
            batch = tokenise(documents, tokenizer, max_length=max_length)
            ends = np.cumsum(batch.lengths)  # (R,)
            kept = batch.head(int(np.searchsorted(ends, min(pull.room, limit - num_tokens), side="right")))
            if not documents or len(kept.lengths) < len(batch.lengths):
                active.remove(pull)  # it ended, or its next row is more than the cap allows
            batches.append(kept)
            pull.add(kept)
            num_tokens += len(kept.input_ids)
            if len(batch.input_ids):
                read = sum(document.num_chars for document in documents)
                num_chars += int(read * len(kept.input_ids) / len(batch.input_ids))
            bar.total = max(bar.total, bar.done + len(kept.input_ids) + 1)  # the guess may prove low
            bar.advance(len(kept.input_ids))
    batches = batches or [tokenise([], tokenizer, max_length=max_length)]
    lengths = np.concatenate([batch.lengths for batch in batches])  # (R,)
    return Rows(
        input_ids=np.concatenate([batch.input_ids for batch in batches]),
        loss_mask=np.concatenate([batch.loss_mask for batch in batches]),
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        row_ids=_unique_ids(np.concatenate([batch.row_ids for batch in batches])),
    )


def _unique_ids(row_ids: np.ndarray) -> np.ndarray:
    """The ids, where a document came again with its copies' ids moved on; the first keeps its own."""
    row_ids = row_ids.copy()  # (R,)
    while True:
        order = np.argsort(row_ids, kind="stable")
        repeats = order[1:][row_ids[order][1:] == row_ids[order][:-1]]
        if not len(repeats):
            return row_ids
        row_ids[repeats] = (row_ids[repeats] + 0x1E3779B97F4A7C15) & (2**63 - 1)


def _nothing_left(pulls: list[_Pull], *, split: str, held_out_fraction: float, max_length: int) -> str:
    """Why no row came out, and what to do."""
    names = ", ".join(source_name(pull.source) for pull in pulls)
    if not pulls:
        return f"no source serves the {split} split: give one with use: all or use: {split} in data.sources"
    if not any(pull.num_read for pull in pulls):
        return f"data.sources are empty: no document in {names}"
    if not any(pull.num_documents for pull in pulls):
        return (
            f"none of {sum(p.num_read for p in pulls):,} documents falls in the {split} split at "
            f"data.held_out_fraction={held_out_fraction}: change it, give more documents, or a source with use: {split}"
        )
    if any(pull.num_with_tools for pull in pulls) and not any(p.num_unanswered + p.num_dropped for p in pulls):
        return f"{names}: nothing but chats with tools, which are left out: give chats without"
    if any(pull.num_unanswered for pull in pulls):
        return f"no chat of {names} has an assistant turn, so there is nothing to learn: give chats with answers"
    if any(pull.num_dropped for pull in pulls):
        return f"no document of {names} has a token to learn within data.max_length={max_length}"
    return f"no whole row of the {split} split fits in max_tokens: raise it, or lower data.max_length={max_length}"
