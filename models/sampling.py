"""Token filters, sampling and plain generation. Target and draft go through the same `filtered_probs`.

Order, as in transformers: temperature, top-k, top-p, min-p, each on what the one before left. Ties at a boundary are
kept, so that a filter depends on the logits alone.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache

BELOW_ONE = 1 - 2**-52  # keeps u * total below the total after rounding

Generators = torch.Generator | list[torch.Generator] | None  # one of all rows, or one a row


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their filter off.

    top_p: the smallest set of most probable tokens with at least this mass.
    min_p: tokens with at least this share of the most probable one's probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, is_valid, allowed in (
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0 and self.top_k == int(self.top_k), "a whole number, 0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and up to 1 (off)"),
            ("min_p", 0 <= self.min_p < 1, "0 (off) or more and below 1"),
        ):
            if not is_valid:
                raise UserError(f"{name}={getattr(self, name)}: must be {allowed}")

    @classmethod
    def of(cls, **filters: float) -> "SamplingParams":
        """From a user's keywords. Raises UserError for a filter we do not apply (it would make drafting inexact)."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in filters:
            if name not in known:
                raise UserError(f"{name}={filters[name]}: unsupported token filter; use {', '.join(sorted(known))}")
        return cls(**filters)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filter(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def filtered_probs(logits: Tensor, params: SamplingParams) -> Tensor:  # (..., V) -> (..., V) fp32
    """Probabilities after temperature and filters. At temperature 0 a one-hot of the largest logit."""
    logits = logits.float()
    if params.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if params.temperature != 1:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        threshold = logits.topk(params.top_k, dim=-1).values[..., -1:]  # (..., 1)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p >= 1 and params.min_p == 0:
        return probs
    threshold = torch.zeros_like(probs[..., :1])  # (..., 1)
    if params.top_p < 1:
        threshold = _nucleus_threshold(probs, params.top_p)
    if params.min_p > 0:
        threshold = threshold.maximum(params.min_p * probs.amax(-1, keepdim=True))
    probs = probs.masked_fill(probs < threshold, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _nucleus_threshold(probs: Tensor, top_p: float) -> Tensor:  # (..., V) -> (..., 1)
    """Probability of the last token inside the nucleus."""
    if probs.device.type == "cpu":  # numpy sorts values with SIMD: 0.1 ms for 49,152, torch takes 3 ms
        largest = torch.from_numpy(np.sort(probs.detach().numpy(), axis=-1)).flip(-1)  # (..., V) descending
    else:
        largest = probs.sort(dim=-1, descending=True).values
    mass_before = largest.cumsum(-1, dtype=torch.float64) - largest
    num_inside = (mass_before < top_p).sum(-1, keepdim=True)  # (..., 1)
    return largest.gather(-1, num_inside - 1)


def sample(weights: Tensor, generator: Generators = None) -> Tensor:  # (..., V) -> (...)
    """Draw ids in proportion to non-negative weights, which need not sum to one. Never draws a weight of zero.

    Inverse of the distribution function in fp64: one uniform number a draw and one pass over the vocabulary.
    """
    return sample_at(weights, random_numbers((*weights.shape[:-1], 1), weights.device, generator))


def random_numbers(shape: Sequence[int], device: torch.device, generator: Generators) -> Tensor:  # fp64 in [0, 1)
    """Random numbers; of a list of generators each draws one row, so that a row's numbers are its own."""
    options = {"dtype": torch.float64, "device": device}
    if isinstance(generator, list):
        assert len(generator) == shape[0], (len(generator), shape)
        return torch.stack([torch.rand(*shape[1:], generator=each, **options) for each in generator])
    return torch.rand(*shape, generator=generator, **options)


def sample_at(weights: Tensor, uniform: Tensor) -> Tensor:  # (..., V), (..., 1) fp64 in [0, 1) -> (...)
    """The ids at these points of the distribution function: `sample` with random numbers that the caller drew."""
    cdf = weights.cumsum(-1, dtype=torch.float64)  # (..., V)
    return torch.searchsorted(cdf, uniform * BELOW_ONE * cdf[..., -1:], right=True)[..., 0]


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Plain batched generation: new ids of each prompt, the end-of-text id included where one was drawn.

    vocab_size: real ids; wider logits are cut to it, so that a padded id is never drawn.
    """
    device, batch = model.device, len(prompts)
    longest = max(len(prompt) for prompt in prompts)
    total = longest + max_new_tokens
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # (B,) on the left
    input_ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)  # (B, T)
    cache = RollbackCache.for_model(model, total)
    slots = torch.arange(total, device=device)
    is_real = (slots[None] >= pads[:, None]) if bool(pads.any()) else None  # (B, S)
    ends = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
    is_done = torch.zeros(batch, dtype=torch.bool, device=device)
    drawn: list[Tensor] = []
    for _ in range(max_new_tokens):
        start, end = cache.length, cache.length + input_ids.shape[1]
        output = forward_with_cache(
            model,
            input_ids,
            cache,
            position_ids=(slots[None, start:end] - pads[:, None]).clamp_min(0),  # (B, T)
            attention_mask=None if is_real is None else is_real[:, :end],
            logits_to_keep=1,
        )
        logits = output.logits[:, -1, :vocab_size]  # (B, V)
        tokens = logits.argmax(-1) if params.is_greedy else sample(filtered_probs(logits, params), generator)
        drawn.append(tokens)
        is_done |= torch.isin(tokens, ends)
        if bool(is_done.all()):
            break
        input_ids = tokens[:, None]
    rows = torch.stack(drawn, 1).tolist()
    return [_cut_after(row, set(eos_token_ids)) for row in rows]


def _cut_after(ids: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids
