"""Answers to many prompts in one batch that is kept full, each drawn by a seed of its own.

1. Waiting prompts are read together, padded on the left; the last token of each stays out.
2. A step feeds every row its last token. All land in the same slot of the cache; a mask hides the pads before them.
3. Once an eighth of the batch has ended, ended rows leave, waiting ones join, and all are aligned at their ends anew.
A row's n-th token takes the n-th random number of its own seed, so company, order and interruptions do not matter,
but for the last bits of the logits: in bf16 a near tie may fall otherwise in other company.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from models.kv_cache import RollbackCache, forward_with_cache
from models.sampling import SamplingParams, filtered_probs, sample_at

PREFILL_TOKENS = 8192  # padded tokens of one forward over prompts: bounds its memory


@dataclass(frozen=True)
class Request:
    key: Hashable  # the caller's name for it
    prompt_ids: Sequence[int]  # at least one
    max_new_tokens: int
    seed: int | Sequence[int] = 0  # of numpy.random.default_rng


@dataclass(frozen=True)
class Answer:
    key: Hashable
    token_ids: list[int]  # the end-of-text id included where one was drawn
    finish_reason: str  # stop | length


@dataclass
class _Row:
    request: Request
    rng: np.random.Generator
    new_ids: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def num_cached(self) -> int:
        """Tokens with keys and values: all but the last."""
        return len(self.request.prompt_ids) + len(self.new_ids) - 1

    @property
    def last_id(self) -> int:
        return self.new_ids[-1] if self.new_ids else self.request.prompt_ids[-1]


@torch.inference_mode()
def generate_rows(
    model: nn.Module,
    waiting: list[Request],
    params: SamplingParams,
    *,
    batch_size: int,
    eos_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
) -> Iterator[Answer]:
    """Answers as they finish. Requests are taken from the end of `waiting`, so sorted by length the longest come first
    and rows of a batch need few pads; a caller may add to it between answers (the next turn of a chat).

    vocab_size: real ids; wider logits are cut to it, so that a padded id is never drawn.
    """
    ends, device = set(eos_token_ids), model.device
    rows: list[_Row] = []
    cache = is_real = None
    while True:
        num_ended = sum(row.is_done for row in rows)
        room = batch_size - len(rows) + num_ended
        if 8 * num_ended >= len(rows) or (waiting and 8 * room >= batch_size):
            parts = [(cache, [i for i, row in enumerate(rows) if not row.is_done])] if num_ended < len(rows) else []
            rows = [row for row in rows if not row.is_done]
            while waiting and len(rows) < batch_size:
                group = _take(waiting, batch_size - len(rows))
                parts.append((_prefill(model, group), list(range(len(group)))))
                rows += [_Row(request, np.random.default_rng(request.seed)) for request in group]
            if not rows:
                return
            cache, is_real = _align(model, parts, rows)
        is_real[:, cache.length] = True
        logits = _step(model, cache, rows, is_real)[:, :vocab_size]  # (B, V)
        if params.is_greedy:
            tokens = logits.argmax(-1)  # (B,)
        else:
            uniform = [[0.0 if row.is_done else row.rng.random()] for row in rows]
            uniform = torch.tensor(uniform, dtype=torch.float64, device=device)  # (B, 1)
            tokens = sample_at(filtered_probs(logits, params), uniform)  # (B,)
        for row, token in zip(rows, tokens.tolist()):
            if row.is_done:
                continue
            row.new_ids.append(token)
            if token in ends or len(row.new_ids) == row.request.max_new_tokens:
                row.is_done = True
                yield Answer(row.request.key, row.new_ids, "stop" if token in ends else "length")


def _take(waiting: list[Request], room: int) -> list[Request]:
    """The next prompts to read together, at least one."""
    group = [waiting.pop()]
    longest = len(group[0].prompt_ids)
    while waiting and len(group) < room:
        longest = max(longest, len(waiting[-1].prompt_ids))
        if longest * (len(group) + 1) > PREFILL_TOKENS:
            break
        group.append(waiting.pop())
    return group


def _prefill(model: nn.Module, group: Sequence[Request]) -> RollbackCache:
    """Keys and values of each prompt but its last token, padded on the left."""
    prompts = [request.prompt_ids[:-1] for request in group]
    width = max(1, max(map(len, prompts)))
    pads = [width - len(prompt) for prompt in prompts]
    input_ids = torch.tensor([[0] * pad + list(p) for pad, p in zip(pads, prompts)], device=model.device)  # (B, T)
    slots = torch.arange(width, device=model.device)
    is_after_pads = slots[None] >= torch.tensor(pads, device=model.device)[:, None]  # (B, T)
    position_ids = (is_after_pads.cumsum(-1) - 1).clamp_min(0)  # (B, T)
    cache = RollbackCache.for_model(model, width)
    mask = is_after_pads if any(pads) else None
    forward_with_cache(model.base_model, input_ids, cache, position_ids=position_ids, attention_mask=mask)
    return cache


def _align(
    model: nn.Module, parts: Sequence[tuple[RollbackCache, list[int]]], rows: Sequence[_Row]
) -> tuple[RollbackCache, Tensor]:
    """One cache of the rows, all ending at the same slot, and which of its slots hold a token (B, S)."""
    lengths = torch.tensor([row.num_cached for row in rows], device=model.device)  # (B,)
    length = max(1, int(lengths.max()))
    steps = max(row.request.max_new_tokens - len(row.new_ids) for row in rows)
    cache = RollbackCache.for_model(model, length + steps)
    cache.join([(part, torch.tensor(kept, device=model.device)) for part, kept in parts], length)
    slots = torch.arange(cache.capacity, device=model.device)
    return cache, (slots >= length - lengths[:, None]) & (slots < length)


def _step(model: nn.Module, cache: RollbackCache, rows: Sequence[_Row], is_real: Tensor) -> Tensor:  # (B, V)
    """Logits behind each row's last token, which goes into the cache's next slot."""
    end = cache.length + 1
    if cache.own_mask:  # always a mask, also without pads: on CPUs SDPA's grouped heads without one are slower
        mask = is_real[:, None, None, : cache.capacity if cache.static else end]  # (B, 1, 1, S)
    else:
        mask = is_real[:, :end]  # (B, S)
    output = forward_with_cache(
        model,
        torch.tensor([[row.last_id] for row in rows], device=is_real.device),  # (B, 1)
        cache,
        position_ids=torch.tensor([[row.num_cached] for row in rows], device=is_real.device),  # (B, 1)
        attention_mask=mask,
        logits_to_keep=1,
    )
    return output.logits[:, -1]
