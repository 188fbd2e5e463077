"""Drafters: what proposes tokens for the loop to verify. A draft model's chain, or nothing (plain decoding).

The loop calls, for every sequence: `start(prompt)`, then in turn `propose(sequence, draft_len)` and
`accept(num_accepted, next_token)`. A drafter keeps its own cache and catches up with the sequence in `propose`: it
feeds every committed token that its cache lacks, the last drafted one after a full acceptance included.
"""

import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models.kv_cache import RollbackCache, forward_with_cache
from models.sampling import SamplingParams, filtered_probs, sample

DRAFT_SAMPLING = ("probabilistic", "greedy")


class Proposal(NamedTuple):
    tokens: Tensor  # (K,)
    probs: Tensor | None  # (K, V) fp32, the distribution each token was drawn from; None: it was certain (one-hot)


class Clock:
    """Seconds spent under each name. Waits for the GPU at both ends, so that the time lands where the work is."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def add(self, name: str, since: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - since


class Drafter(Protocol):
    def start(self, prompt: Tensor, *, capacity: int, generator: torch.Generator, clock: Clock) -> None:
        """Begin a sequence of at most `capacity` tokens. prompt (T,)."""

    def max_draft_len(self, num_tokens: int) -> int:
        """How many tokens can follow a sequence of `num_tokens`; 0 or less: a plain step."""

    def propose(self, sequence: Tensor, draft_len: int) -> Proposal:
        """Draft `draft_len` tokens behind the committed `sequence` (T,)."""

    def accept(self, num_accepted: int, next_token: int) -> None:
        """The target kept so many of the proposed tokens and put `next_token` behind them."""


class NoDraft:
    """Plain decoding by the same loop."""

    def start(self, prompt: Tensor, *, capacity: int, generator: torch.Generator, clock: Clock) -> None:
        pass

    def max_draft_len(self, num_tokens: int) -> int:
        return 0

    def propose(self, sequence: Tensor, draft_len: int) -> Proposal:
        raise AssertionError("nothing to propose")

    def accept(self, num_accepted: int, next_token: int) -> None:
        pass


class DraftModelChain:
    """A causal LM drafts one token after another.

    vocab_size: ids the target knows; the draft's padded ids beyond are never proposed.
    draft_sampling: `probabilistic` draws from the draft's filtered softmax and declares it; `greedy` takes the argmax
        and declares a one-hot. Both leave the target's distribution exact.
    """

    def __init__(
        self, model: nn.Module, *, vocab_size: int, params: SamplingParams, draft_sampling: str = "probabilistic"
    ):
        assert draft_sampling in DRAFT_SAMPLING
        config = model.config.get_text_config()
        self.model, self.params = model, params
        self.is_one_hot = params.is_greedy or draft_sampling == "greedy"
        self.num_embeddings = model.get_input_embeddings().weight.shape[0]
        self.vocab_size = min(vocab_size, self.num_embeddings)
        self.max_positions = getattr(config, "max_position_embeddings", None) or 1 << 30

    def start(self, prompt: Tensor, *, capacity: int, generator: torch.Generator, clock: Clock) -> None:
        self.generator, self.clock = generator, clock
        self.can_draft = len(prompt) <= self.max_positions and int(prompt.max()) < self.num_embeddings
        if self.can_draft:
            self.cache = RollbackCache.for_model(self.model, min(capacity, self.max_positions))
            forward_with_cache(self.model, prompt[None], self.cache, logits_to_keep=1)

    def max_draft_len(self, num_tokens: int) -> int:
        # the last drafted token is not read: the first `draft_len - 1` stand at positions num_tokens, ...
        return self.max_positions - num_tokens + 1 if self.can_draft else 0

    def propose(self, sequence: Tensor, draft_len: int) -> Proposal:
        self._num_committed, self._num_drafted = len(sequence), draft_len
        input_ids = sequence[None, self.cache.length :]  # (1, 1 or more)
        tokens: list[Tensor] = []  # each (1,)
        probs: list[Tensor] = []  # each (1, V)
        for _ in range(draft_len):
            start = self.clock.now()
            output = forward_with_cache(self.model, input_ids, self.cache, logits_to_keep=1)
            self.clock.add("draft_forward", start)
            logits = output.logits[0, -1:, : self.vocab_size]  # (1, V)
            if self.is_one_hot:
                tokens.append(logits.argmax(-1))
            else:
                probs.append(filtered_probs(logits, self.params))
                tokens.append(sample(probs[-1], self.generator))
            input_ids = tokens[-1][None]  # (1, 1)
        return Proposal(torch.cat(tokens), torch.cat(probs) if probs else None)

    def accept(self, num_accepted: int, next_token: int) -> None:
        if not self.can_draft:
            return
        if self._num_drafted:  # the last drafted token never entered the cache
            self.cache.rollback(self._num_committed + min(num_accepted, self._num_drafted - 1))
        self._num_drafted = 0
        self.can_draft = next_token < self.num_embeddings  # a padded id of a wider target: nothing to embed

    _num_committed = _num_drafted = 0
