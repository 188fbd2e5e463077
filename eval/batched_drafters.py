"""Drafters of chains for a batch of rows: a draft model, an EAGLE head, Medusa heads.

The same drafting as in drafters.py and medusa_drafter.py, a row of it for each sequence. Rows differ in how many
committed tokens the draft has not read yet: these are padded on the right, and each row's output is taken behind its
own last one. Every row is drafted to the depth of the deepest; who asked for less is cut by the caller.

Shapes: B rows, T time, K drafted tokens, V vocabulary of the target, Vd of the draft, D hidden size.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from eval.drafters import Clock, best_token
from models.eagle import EagleHead
from models.kv_cache import forward_with_cache
from models.medusa import MedusaHeads
from models.ragged_cache import RaggedCache, replace_by_last, without_row
from models.sampling import SamplingParams, filtered_probs, sample


class Chains(NamedTuple):
    tokens: Tensor  # (B, K) ids of the target
    probs: Tensor | None = None  # (B, K, V) what each token was drawn from; None: each was certain (one-hot)


class Rows(NamedTuple):
    """What is committed: row b holds `num_tokens[b]` tokens, the last of them the root."""

    sequences: Tensor  # (B, S)
    num_tokens: list[int]

    def slice(self, starts: list[int], counts: list[int]) -> Tensor:  # (B, max(counts))
        """`counts[b]` tokens from `starts[b]`; beyond them any token of the row."""
        first = torch.tensor(starts, device=self.sequences.device)[:, None]  # (B, 1)
        index = first + torch.arange(max(counts), device=self.sequences.device)  # (B, n)
        return self.sequences.gather(1, index.clamp_max(self.sequences.shape[1] - 1))


class Draws(NamedTuple):
    """How far each row is drafted, and its random numbers."""

    depths: list[int]
    generators: list[torch.Generator]

    @property
    def depth(self) -> int:
        return max(self.depths)

    def at(self, step: int) -> list[torch.Generator]:
        """For the drafted token `step` = 0, 1, ...: a row that is not drafted so far spends none of its own numbers."""
        return [
            generator if step < depth else torch.Generator(generator.device)
            for depth, generator in zip(self.depths, self.generators)
        ]


class ChainsDrafter(Protocol):
    features: str | None  # what it reads of the target's forwards: taps (L, D), final_hidden (D) a token, or None

    def start(self, prompts: Rows, features: Tensor | None, *, capacity: int, clock: Clock) -> None:
        """Begin a batch. prompts: without the roots; features (B, T, ...) of their tokens; no row exceeds capacity."""

    def max_draft_len(self, row: int, num_tokens: int) -> int:
        """How long a chain behind a row of so many tokens may be; 0 or less: none."""

    def propose(self, rows: Rows, draws: Draws) -> Chains:
        """Draft `draws.depth` tokens behind every row."""

    def accept(self, accepted: list[int], features: Tensor | None) -> None:
        """So many drafted tokens were accepted. features (B, K+1, ...): of the root and all drafted tokens."""

    def drop(self, row: int) -> None:
        """A row has ended; the last one has its number from now on."""


def make_chains_drafter(
    draft: nn.Module, *, vocab_size: int, params: SamplingParams, draft_sampling: str
) -> ChainsDrafter:
    is_one_hot = params.is_greedy or draft_sampling == "greedy"
    if isinstance(draft, EagleHead):
        return EagleChains(draft, vocab_size, params, is_one_hot)
    if isinstance(draft, MedusaHeads):
        return MedusaChains(draft, vocab_size, params, is_one_hot)
    return ModelChains(draft, vocab_size, params, is_one_hot)


class ModelChains:
    """A causal LM over the target's vocabulary. Rows that it cannot read run along and are never asked."""

    features = None

    def __init__(self, model: nn.Module, vocab_size: int, params: SamplingParams, is_one_hot: bool):
        self.model, self.params, self.is_one_hot = model, params, is_one_hot
        self.num_embeddings = model.get_input_embeddings().weight.shape[0]
        self.is_narrow = self.num_embeddings < vocab_size  # a wider target's ids have no embedding here
        self.vocab_size = min(vocab_size, self.num_embeddings)
        self.max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30

    def start(self, prompts: Rows, features: Tensor | None, *, capacity: int, clock: Clock) -> None:
        self.clock, lengths = clock, prompts.num_tokens
        self.can_read = [True] * len(lengths)
        self.cache = RaggedCache.for_rows(self.model, len(lengths), capacity)
        self._forward(self.model.base_model, prompts.slice([0] * len(lengths), lengths), lengths)
        self.cache.advance(lengths)

    def max_draft_len(self, row: int, num_tokens: int) -> int:
        # the last drafted token is not read: those before it stand at positions num_tokens, ...
        return self.max_positions - num_tokens + 1 if self.can_read[row] else 0

    def propose(self, rows: Rows, draws: Draws) -> Chains:
        counts = [n - length for n, length in zip(rows.num_tokens, self.cache.lengths)]
        logits = self._read(rows.slice(self.cache.lengths, counts), counts)  # (B, V)
        self._committed = self.cache.lengths
        tokens: list[Tensor] = []  # each (B,)
        probs: list[Tensor] = []  # each (B, V)
        while True:
            if self.is_one_hot:
                tokens.append(best_token(logits))
            else:
                probs.append(filtered_probs(logits, self.params))
                tokens.append(sample(probs[-1], draws.at(len(tokens))))
            if len(tokens) == draws.depth:
                return Chains(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)
            logits = self._read(tokens[-1][:, None], [1] * len(counts))

    def _read(self, tokens: Tensor, counts: list[int]) -> Tensor:  # (B, n) -> (B, V) behind each row's last token
        start = self.clock.now()
        logits = self._forward(self.model, tokens, counts).logits
        self.cache.advance(counts)
        logits = logits[torch.arange(len(counts)), torch.tensor(counts) - 1, : self.vocab_size]
        self.clock.add("draft_forward", start)
        return logits

    def _forward(self, model: nn.Module, tokens: Tensor, counts: list[int]):
        if self.is_narrow:
            for row, count in enumerate(counts):
                self.can_read[row] &= int(tokens[row, :count].max()) < self.num_embeddings
            tokens = tokens.clamp_max(self.num_embeddings - 1)
        positions, mask = self.cache.place(tokens.shape[1], tokens.device)
        positions = positions.clamp_max(self.max_positions - 1)  # pads, and rows that are no longer asked
        return forward_with_cache(model, tokens, self.cache, position_ids=positions, attention_mask=mask)

    def accept(self, accepted: list[int], features: Tensor | None) -> None:
        # the last drafted token never entered the cache
        kept = [committed + count for committed, count in zip(self._committed, accepted)]
        self.cache.lengths = list(map(min, kept, self.cache.lengths))

    def drop(self, row: int) -> None:
        self.cache.drop(row)
        replace_by_last(self.can_read, row)


class EagleChains:
    """An EAGLE head: slot t reads x[t+1] and the target's features of x[t] (see EagleDrafter)."""

    def __init__(self, head: EagleHead, vocab_size: int, params: SamplingParams, is_one_hot: bool):
        self.head, self.vocab_size, self.params, self.is_one_hot = head, vocab_size, params, is_one_hot
        self.features = head.features
        self.max_positions = head.config.max_position_embeddings

    def start(self, prompts: Rows, features: Tensor, *, capacity: int, clock: Clock) -> None:
        self.clock, device = clock, features.device
        counts = [length - 1 for length in prompts.num_tokens]  # the last slot reads the root as well
        self.cache = RaggedCache(1, capacity)
        self.cache.lengths = [0] * len(counts)
        if max(counts) > 0:
            self._read(prompts.slice([1] * len(counts), counts), self.head.project(features[:, : max(counts)]), counts)
        rows = torch.arange(len(counts), device=device)
        self._pending = features[rows, torch.tensor(counts, device=device)][:, None]  # (B, P, ...) of unread slots

    def max_draft_len(self, row: int, num_tokens: int) -> int:
        # of depth d, the last one read stands at slot num_tokens - 2 + d - 1
        return self.max_positions - num_tokens + 2

    def propose(self, rows: Rows, draws: Draws) -> Chains:
        counts = [n - 1 - length for n, length in zip(rows.num_tokens, self.cache.lengths)]
        unread = rows.slice([length + 1 for length in self.cache.lengths], counts)  # (B, P)
        hidden, logits = self._draft(unread, self.head.project(self._pending[:, : max(counts)]), counts)
        self._committed = self.cache.lengths
        tokens: list[Tensor] = []  # each (B,) of the target
        probs: list[Tensor] = []  # each (B, Vd)
        while True:
            if self.is_one_hot:
                drawn = best_token(logits)
            else:
                probs.append(filtered_probs(logits, self.params))
                drawn = sample(probs[-1], draws.at(len(tokens)))
            tokens.append(self.head.target_ids(drawn))
            if len(tokens) == draws.depth:
                break
            hidden, logits = self._draft(tokens[-1][:, None], hidden[:, None], [1] * len(counts))
        chains = torch.stack(tokens, 1)
        if not probs:
            return Chains(chains)
        return Chains(chains, _widen(torch.stack(probs, 1), self.head.draft_vocab, self.vocab_size))

    def _draft(self, tokens: Tensor, hidden: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:  # (B, D), (B, Vd)
        """Output and logits of each row's last slot."""
        start = self.clock.now()
        output = self._read(tokens, hidden, counts)
        last = output[torch.arange(len(counts)), torch.tensor(counts) - 1]  # (B, D)
        logits = self.head.logits(last)
        self.clock.add("draft_forward", start)
        return last, logits

    def _read(self, tokens: Tensor, hidden: Tensor, counts: list[int]) -> Tensor:  # (B, n), (B, n, D) -> (B, n, D)
        position_ids, mask = self.cache.place(tokens.shape[1], tokens.device)
        output = self.head(tokens, hidden, position_ids, self.cache, attention_mask=mask)
        self.cache.advance(counts)
        return output

    def accept(self, accepted: list[int], features: Tensor) -> None:
        self.cache.lengths = self._committed  # accepted tokens are read again, with the target's features
        self._pending = features

    def drop(self, row: int) -> None:
        self.cache.drop(row)
        self._pending = without_row(self._pending, row)


class MedusaChains:
    """Medusa heads: all depths at once, from the target's final state of the token before the root."""

    features = MedusaHeads.features

    def __init__(self, heads: MedusaHeads, vocab_size: int, params: SamplingParams, is_one_hot: bool):
        self.heads, self.vocab_size, self.params, self.is_one_hot = heads, vocab_size, params, is_one_hot

    def start(self, prompts: Rows, features: Tensor, *, capacity: int, clock: Clock) -> None:
        self.clock = clock
        self.accept([length - 1 for length in prompts.num_tokens], features)

    def max_draft_len(self, row: int, num_tokens: int) -> int:
        return self.heads.config.num_heads

    def propose(self, rows: Rows, draws: Draws) -> Chains:
        start = self.clock.now()
        logits = self.heads.logits(self.heads(self._states, num_heads=draws.depth)).transpose(0, 1)  # (B, K, Vd)
        self.clock.add("draft_forward", start)
        if self.is_one_hot:
            return Chains(self.heads.target_ids(best_token(logits)))
        probs = filtered_probs(logits, self.params)
        drawn = torch.stack([sample(probs[:, step], draws.at(step)) for step in range(draws.depth)], 1)  # (B, K)
        return Chains(self.heads.target_ids(drawn), _widen(probs, self.heads.draft_vocab, self.vocab_size))

    def accept(self, accepted: list[int], features: Tensor) -> None:
        rows, last = torch.arange(len(accepted)), torch.tensor(accepted)
        self._states = features[rows.to(features.device), last.to(features.device)]  # (B, D)

    def drop(self, row: int) -> None:
        self._states = without_row(self._states, row)


def _widen(probs: Tensor, draft_ids: Tensor, vocab_size: int) -> Tensor:  # (B, K, Vd) -> (B, K, V)
    """Probabilities over the target's ids: nothing outside the draft vocabulary."""
    wide = probs.new_zeros(*probs.shape[:-1], vocab_size)
    wide[..., draft_ids] = probs
    return wide
