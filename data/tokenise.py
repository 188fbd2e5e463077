"""Documents become token rows: texts in windows, chats with their masks; in batches, as numpy arrays."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from data.masks import chat_row, chat_rows
from data.sources import Document
from models.errors import UserError


class Batch(NamedTuple):
    """Rows end to end, before they are put together."""

    input_ids: np.ndarray  # (N,) int32
    loss_mask: np.ndarray  # (N,) bool
    lengths: np.ndarray  # (R,) int64
    row_ids: np.ndarray  # (R,) int64
    num_unanswered: int = 0  # chats without an assistant turn
    num_with_tools: int = 0  # chats with tools: templates write their calls beside the content
    num_dropped: int = 0  # documents with no token to learn, or none within max_length

    def head(self, num_rows: int) -> "Batch":
        num_tokens = int(self.lengths[:num_rows].sum())
        return self._replace(
            input_ids=self.input_ids[:num_tokens],
            loss_mask=self.loss_mask[:num_tokens],
            lengths=self.lengths[:num_rows],
            row_ids=self.row_ids[:num_rows],
        )


def tokenise(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> Batch:
    """Rows of at most max_length tokens, in the documents' order; a row has at least two tokens, and a masked one that
    another precedes. What load_rows says about texts and chats happens here."""
    ids, masks, row_ids, num_unanswered, num_with_tools, num_dropped = [], [], [], 0, 0, 0
    for is_chat, group in itertools.groupby(documents, key=lambda d: d.messages is not None):
        group = list(group)
        if is_chat:
            without_tools = [d for d in group if not d.has_tools]
            num_with_tools += len(group) - len(without_tools)
            answered = [d for d in without_tools if any(m["role"] == "assistant" for m in d.messages)]
            num_unanswered += len(without_tools) - len(answered)
            group, made = answered, _chat_windows(answered, tokenizer, max_length)
        else:
            made = _text_windows(group, tokenizer, max_length)
        for document, rows in zip(group, made):
            num_dropped += not rows
            document_hash = document.hash().to_bytes(8, "little")
            for number, (row, mask) in enumerate(rows):
                ids.append(row)
                masks.append(mask)
                # 63 bits: safetensors, torch and numpy agree on int64
                row_ids.append(xxhash.xxh3_64_intdigest(document_hash + number.to_bytes(4, "little")) >> 1)
    return Batch(
        input_ids=np.concatenate(ids, dtype=np.int32) if ids else np.zeros(0, np.int32),
        loss_mask=np.concatenate(masks) if masks else np.zeros(0, bool),
        lengths=np.array([len(row) for row in ids], dtype=np.int64),
        row_ids=np.array(row_ids, dtype=np.int64),
        num_unanswered=num_unanswered,
        num_with_tools=num_with_tools,
        num_dropped=num_dropped,
    )


def window_bounds(length: int, size: int) -> list[tuple[int, int]]:
    """Cuts `length` tokens into windows of `size`. One token alone predicts nothing, so where one would be left over,
    the window before it gives it a companion."""
    starts = list(range(0, length, size))
    if length % size == 1 and len(starts) > 1 and size > 2:
        starts[-1] -= 1
    return list(zip(starts, [*starts[1:], length]))


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts BOS before a text by itself, as its model saw in training."""
    bos, ids = tokenizer.bos_token_id, tokenizer("a")["input_ids"]
    return bos is not None and ids[:1] == [bos]


def _text_windows(documents: list[Document], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[list[tuple]]:
    """Windows (ids, mask) of each text."""
    encoded = tokenizer(
        [d.text for d in documents], add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    bos, eos = tokenizer.bos_token_id if adds_bos(tokenizer) else None, tokenizer.eos_token_id
    size = max_length if bos is None else max_length - 1
    windows = []
    for document, ids in zip(documents, encoded):
        if bos is not None and ids[:1] == [bos]:
            ids = ids[1:]  # the text spells it out; each window gets its own
        if ids and eos is not None and document.is_complete and ids[-1] != eos:
            ids.append(eos)
        row = np.array(ids, dtype=np.int32)  # (T,)
        parts = [row[begin:end] for begin, end in window_bounds(len(row), size)]
        if bos is not None:
            parts = [np.concatenate([[bos], part]).astype(np.int32) for part in parts]
        windows.append([(part, _text_mask(part, bos)) for part in parts if len(part) > 1])
    return windows


def _text_mask(ids: np.ndarray, bos: int | None) -> np.ndarray:
    mask = np.ones(len(ids), dtype=bool)  # (T,)
    mask[0] = bos is None
    return mask


def _chat_windows(documents: list[Document], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[list[tuple]]:
    """At most one (ids, mask) of each chat: cut at max_length, and after the last supervised token."""
    chats = [(d.messages, d.finish_reason) for d in documents]
    try:
        made = chat_rows(chats, tokenizer)
    except UserError:
        for document, chat in zip(documents, chats):  # again one by one, to name the line
            try:
                chat_row(chat[0], tokenizer, chat[1])
            except UserError as error:
                raise UserError(f"{document.origin}: {error}") from error
        raise
    windows = []
    for ids, mask in made:
        supervised = np.flatnonzero(mask[:max_length])
        end = int(supervised[-1]) + 1 if len(supervised) else 0
        windows.append([(ids[:end], mask[:end])] if end > 1 else [])
    return windows
