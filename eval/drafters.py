"""Drafters: what proposes trees for the loop to verify. A draft model, an EAGLE head, or nothing (plain decoding).

The loop calls, for every sequence: `start(prompt)`, then in turn `propose(sequence, depth)` and
`accept(path, next_token)`. A drafter keeps its own cache and catches up with the sequence in `propose`: it reads every
committed token that its cache lacks, the last drafted one after a full acceptance included.
"""

import time
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.tree import Candidates, Level, Tree, TreeShape, grow
from models.eagle import EagleHead
from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache, has_own_mask, rotation_switch
from models.medusa import MedusaHeads
from models.sampling import SamplingParams, filtered_probs, sample
from models.target import Target

DRAFT_SAMPLING = ("probabilistic", "greedy")


class Clock:
    """Seconds spent under each name. Waits for the GPU at both ends, so that the time lands where the work is."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def add(self, name: str, since: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - since


class Drafter(Protocol):
    features: str | None  # what it reads of the target's forwards: taps (L, D), final_hidden (D) a token, or None

    def start(
        self, prompt: Tensor, *, features: Tensor | None, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        """Begin a sequence of at most `capacity` tokens, a drafted path included. prompt (T,), features (T, ...)."""

    def max_draft_len(self, num_tokens: int) -> int:
        """How deep a tree behind a sequence of `num_tokens` may be; 0 or less: a plain step."""

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        """Draft a tree of at most `depth` levels behind the committed `sequence` (T,), whose last token is the root."""

    def accept(self, path: Tensor, next_token: int, features: Tensor | None) -> None:
        """The target accepted these nodes (A,) and put `next_token` behind them. Also called after a plain step.

        features (A+1, ...): of the root and the accepted nodes, which the target has now read for good.
        A drafter whose trees have tokens beside them also has `observe(logits)`, called before: (E, V) behind those.
        """


class NoDraft:
    """Plain decoding by the same loop."""

    features = None

    def start(
        self, prompt: Tensor, *, features: Tensor | None, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        pass

    def max_draft_len(self, num_tokens: int) -> int:
        return 0

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        raise AssertionError("nothing to propose")

    def accept(self, path: Tensor, next_token: int, features: Tensor | None) -> None:
        pass


def make_drafter(
    draft: nn.Module, shape: TreeShape, *, vocab_size: int, params: SamplingParams, draft_sampling: str
) -> Drafter:
    """The drafter that draws trees of this shape from a causal LM, an EAGLE head or Medusa heads.

    Raises UserError for a shape that this draft cannot grow.
    """
    check_shape(draft, shape, vocab_size=vocab_size)
    options = {"vocab_size": vocab_size, "params": params}
    if isinstance(draft, MedusaHeads):
        from eval.medusa_drafter import MedusaDrafter  # it builds on this module

        return MedusaDrafter(draft, shape, draft_sampling=draft_sampling, **options)
    if isinstance(draft, EagleHead):
        return EagleDrafter(draft, shape, draft_sampling=draft_sampling, **options)
    if shape.kind == "chain":
        return DraftModelChain(draft, draft_sampling=draft_sampling, **options)
    return DraftModelTree(draft, shape, **options)


def check_shape(draft: nn.Module, shape: TreeShape, *, vocab_size: int, key: str = "decode.methods") -> None:
    """Raises UserError, blaming the setting `key`: more levels than Medusa heads, or more children than draft ids."""
    if isinstance(draft, MedusaHeads):
        num_heads, num_ids = draft.config.num_heads, draft.config.truncated_vocab_size
        if shape.depth > num_heads:
            raise UserError(
                f"{key}={shape}: {shape.depth} levels for a draft of {num_heads} Medusa heads; use at most "
                f"{num_heads} levels, for example chain_k{num_heads}"
            )
    elif isinstance(draft, EagleHead):
        num_ids = draft.config.draft_vocab_size
    else:
        num_ids = min(vocab_size, draft.get_input_embeddings().weight.shape[0])
    widest = max((*shape.children, shape.top_k))
    if widest > num_ids:
        raise UserError(f"{key}={shape}: {widest} children for a draft of {num_ids} ids; use fewer")


def masked_models(target: Target, *drafts: nn.Module | None) -> list[nn.Module]:
    """Those that a mask of ours must reach: the target and draft models. Heads are made to take it."""
    return [target.model, *(draft for draft in drafts if isinstance(draft, PreTrainedModel))]


def check_attention(models: Iterable[nn.Module], shapes: Iterable[TreeShape], *, key: str) -> None:
    """Raises UserError, blaming the setting `key`: trees or lookahead where a model cannot be given their mask."""
    if all(map(has_own_mask, models)):
        return
    for shape in shapes:
        if shape.kind not in ("chain", "ngram"):
            raise UserError(
                f"{key}={shape}: needs full attention by SDPA, and the target or a draft has a sliding window or "
                "another attention kernel; use chains such as chain_k4, and n-grams"
            )


def check_ragged(models: Iterable[nn.Module], *, setting: str) -> None:
    """Raises UserError, blaming `setting`: batches where a model cannot be given the mask of ragged rows, or rotates
    them by the longest of them."""
    models = list(models)
    if not all(map(has_own_mask, models)):
        raise UserError(
            f"{setting}: batches of ragged rows need full attention by SDPA, and the target or a draft has a sliding "
            "window or another attention kernel; leave them out"
        )
    if any(rotation_switch(model) for model in models):
        raise UserError(
            f"{setting}: the rotations of longrope depend on the longest row of a batch, so a text would depend on the "
            "others; leave them out"
        )


class DraftModelChain:
    """A causal LM drafts one token after another.

    vocab_size: ids the target knows; the draft's padded ids beyond are never proposed.
    draft_sampling: `probabilistic` draws from the draft's filtered softmax and declares it; `greedy` takes the argmax
        and declares a one-hot. Both leave the target's distribution exact.
    """

    features = None

    def __init__(
        self, model: nn.Module, *, vocab_size: int, params: SamplingParams, draft_sampling: str = "probabilistic"
    ):
        assert draft_sampling in DRAFT_SAMPLING
        config = model.config.get_text_config()
        self.model, self.params = model, params
        self.is_one_hot = params.is_greedy or draft_sampling == "greedy"
        self.num_embeddings = model.get_input_embeddings().weight.shape[0]
        self.is_narrow = self.num_embeddings < vocab_size
        self.vocab_size = min(vocab_size, self.num_embeddings)
        self.max_positions = getattr(config, "max_position_embeddings", None) or 1 << 30

    def start(
        self, prompt: Tensor, *, features: Tensor | None, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        self.generator, self.clock = generator, clock
        self._num_committed = 0  # tokens of the sequence that the last proposal was made for
        self.can_draft = len(prompt) <= self.max_positions and self._can_read(prompt)
        if self.can_draft:
            self.cache = self._make_cache(min(capacity, self.max_positions))
            forward_with_cache(self.model, prompt[None], self.cache, logits_to_keep=1)

    def _make_cache(self, capacity: int) -> RollbackCache:
        return RollbackCache.for_model(self.model, capacity)

    def _can_read(self, tokens: Tensor) -> bool:
        """Ids of a wider target have no embedding here."""
        return not self.is_narrow or int(tokens.max()) < self.num_embeddings

    def max_draft_len(self, num_tokens: int) -> int:
        # the deepest level is not read: those before it stand at positions num_tokens, ...
        return self.max_positions - num_tokens + 1 if self.can_draft else 0

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        logits = self._read_committed(sequence)
        tokens: list[Tensor] = []  # each (1,)
        probs: list[Tensor] = []  # each (1, V)
        while logits is not None:
            if self.is_one_hot:
                tokens.append(best_token(logits))
            else:
                probs.append(filtered_probs(logits, self.params))
                tokens.append(sample(probs[-1], self.generator))
            logits = self._read(tokens[-1]) if len(tokens) < depth else None
        if not tokens:
            return Tree.empty(sequence.device)
        return Tree.chain(torch.cat(tokens), torch.cat(probs) if probs else None)

    def _read_committed(self, sequence: Tensor) -> Tensor | None:
        """Catch up; logits (1, V) behind the root. None where an id cannot be read."""
        self._num_committed = len(sequence)
        tokens = sequence[self.cache.length :]  # 1 or more
        self.can_draft = self._can_read(tokens)
        return self._read(tokens)[-1:] if self.can_draft else None

    def _read(
        self,
        tokens: Tensor,  # (n,)
        *,
        position_ids: Tensor | None = None,  # (1, n)
        attention_mask: Tensor | None = None,  # (1, 1, n, S)
    ) -> Tensor:  # (n, V), (1, V) for the last one of a chain
        start = self.clock.now()
        output = forward_with_cache(
            self.model,
            tokens[None],
            self.cache,
            position_ids=position_ids,
            attention_mask=attention_mask,
            logits_to_keep=1 if attention_mask is None else 0,
        )
        self.clock.add("draft_forward", start)
        return output.logits[0, :, : self.vocab_size]

    def accept(self, path: Tensor, next_token: int, features: Tensor | None) -> None:
        # the last drafted token never entered the cache
        if self.can_draft and self._num_committed:
            self.cache.rollback(min(self._num_committed + len(path), self.cache.length))


class DraftModelTree(DraftModelChain):
    """A causal LM drafts a tree, one forward a level; its nodes see their ancestors in the draft's own cache.

    Children are the draft's most probable tokens: they are certain (one-hot), whatever the temperature. A dynamic
    tree weighs them by the draft's softmax at the target's temperature, at 1 when that is greedy.
    """

    def __init__(self, model: nn.Module, shape: TreeShape, *, vocab_size: int, params: SamplingParams):
        super().__init__(model, vocab_size=vocab_size, params=params, draft_sampling="greedy")
        self.shape = shape

    def _make_cache(self, capacity: int) -> RollbackCache:
        return RollbackCache.for_model(self.model, capacity + self.shape.num_expanded)

    def start(self, prompt: Tensor, **options) -> None:
        super().start(prompt, **options)
        self._read_index: Tensor | None = None  # (M,) of the last tree

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        logits = self._read_committed(sequence)
        if logits is None:
            return Tree.empty(sequence.device)
        temperature = self.params.temperature or 1.0

        def expand(level: Level, num_children: int) -> Candidates:
            position = self._num_committed - 1 + level.depth
            logits = self._read(
                level.tokens,
                position_ids=level.tokens.new_full((1, len(level.tokens)), position),
                attention_mask=self.cache.tree_mask(level.mask),
            )
            return best_tokens(logits, num_children, temperature)

        tree, self._read_index = grow(
            lambda num_children: best_tokens(logits, num_children, temperature), expand, self.shape.cut(depth)
        )
        return tree

    def accept(self, path: Tensor, next_token: int, features: Tensor | None) -> None:
        """The cache keeps the accepted nodes that it has read; the rest is read again."""
        if not self.can_draft or self._read_index is None:
            return
        indices = self._read_index[path]
        self.cache.gather(self._num_committed, self._num_committed + indices[indices >= 0])
        self._read_index = None


class EagleDrafter:
    """An EAGLE head drafts chains and trees, one forward of its block a level, from the target's hidden states.

    Slot t of the head reads x[t+1] and the target's features of x[t], and gives the candidates of x[t+2]. Behind a
    sequence x[0 .. n-1] it reads the committed slots up to n-2 from fresh features; a node of depth d then stands at
    slot n-2+d with its own token, and its parent's *output* in place of features. After `accept` only committed slots
    stay: the accepted tokens are read again, with the target's features.

    draft_sampling: for chains at temperature > 0, as in DraftModelChain; the distribution declared is that over the
        draft vocabulary, nothing elsewhere. Trees are grown as in DraftModelTree.
    """

    def __init__(
        self,
        head: EagleHead,
        shape: TreeShape,
        *,
        vocab_size: int,
        params: SamplingParams,
        draft_sampling: str = "probabilistic",
    ):
        assert draft_sampling in DRAFT_SAMPLING
        self.head, self.shape, self.params, self.vocab_size = head, shape, params, vocab_size
        self.features = head.features
        self.is_one_hot = params.is_greedy or draft_sampling == "greedy" or shape.kind != "chain"
        self.max_positions = head.config.max_position_embeddings

    def start(
        self, prompt: Tensor, *, features: Tensor, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        self.generator, self.clock = generator, clock
        self._num_slots = 0  # committed slots in the cache
        self._pending = features  # (P, ...) of the slots behind those
        self.cache = RollbackCache(1, capacity + self.shape.num_expanded, static=False)
        if 1 < len(prompt) <= self.max_positions:  # the last slot reads the root as well
            self._read_slots(prompt[1:])

    def max_draft_len(self, num_tokens: int) -> int:
        # of depth d, the last one read stands at slot num_tokens - 2 + d - 1
        return self.max_positions - num_tokens + 2

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        start = self.clock.now()
        hidden = self._read_slots(sequence[self._num_slots + 1 :])  # (1, D)
        logits = self.head.logits(hidden)  # (1, Vd)
        self.clock.add("draft_forward", start)
        if self.shape.kind == "chain":
            return self._propose_chain(hidden, logits, depth)
        temperature = self.params.temperature or 1.0

        def candidates(logits: Tensor, num_children: int) -> Candidates:
            draft_ids, logprobs = best_tokens(logits, num_children, temperature)
            return Candidates(self.head.target_ids(draft_ids), logprobs)

        def expand(level: Level, num_children: int) -> Candidates:
            nonlocal hidden
            hidden, logits = self._read_nodes(level.tokens, hidden[level.parent_rows], level.depth, level.mask)
            return candidates(logits, num_children)

        return grow(lambda num_children: candidates(logits, num_children), expand, self.shape.cut(depth)).tree

    def _propose_chain(self, hidden: Tensor, logits: Tensor, depth: int) -> Tree:  # (1, D), (1, Vd)
        tokens: list[Tensor] = []  # each (1,) of the target
        probs: list[Tensor] = []  # each (1, Vd)
        while True:
            if self.is_one_hot:
                drawn = best_token(logits)
            else:
                probs.append(filtered_probs(logits, self.params))
                drawn = sample(probs[-1], self.generator)
            tokens.append(self.head.target_ids(drawn))
            if len(tokens) == depth:
                break
            hidden, logits = self._read_nodes(tokens[-1], hidden, len(tokens))
        if not probs:
            return Tree.chain(torch.cat(tokens))
        drawn_from = probs[0].new_zeros(depth, self.vocab_size)  # (K, V)
        drawn_from[:, self.head.draft_vocab] = torch.cat(probs)
        return Tree.chain(torch.cat(tokens), drawn_from)

    def _read_slots(self, tokens: Tensor) -> Tensor:  # (P,) -> (1, D) output of the last one
        """Read committed slots: each a token and the pending features of the token before."""
        count = len(tokens)
        hidden, self._pending = self.head.project(self._pending[:count]), self._pending[count:]
        position_ids = self.cache.positions(count, tokens.device)
        mask = self.cache.causal_mask(count, tokens.device)
        output = self.head(tokens[None], hidden[None], position_ids, self.cache, attention_mask=mask)
        self._num_slots += count
        return output[0, -1:]

    def _read_nodes(
        self,
        tokens: Tensor,  # (n,)
        hidden: Tensor,  # (n, D) outputs of their parents
        depth: int,
        visible: Tensor | None = None,  # (n, R), None for a chain
    ) -> tuple[Tensor, Tensor]:  # (n, D), (n, Vd)
        """Read nodes of one depth."""
        start = self.clock.now()
        position_ids = tokens.new_full((1, len(tokens)), self._num_slots - 1 + depth)
        mask = None if visible is None else self.cache.tree_mask(visible)
        output = self.head(tokens[None], hidden[None], position_ids, self.cache, attention_mask=mask)[0]
        logits = self.head.logits(output)
        self.clock.add("draft_forward", start)
        return output, logits

    def accept(self, path: Tensor, next_token: int, features: Tensor) -> None:
        self.cache.rollback(self._num_slots)
        self._pending = torch.cat((self._pending, features))


def best_token(logits: Tensor) -> Tensor:  # (..., V) -> (...)
    """The most probable id, the first of equals. `max` does it in bf16 on a CPU in a fifth of argmax's time."""
    return logits.max(-1).indices


def best_tokens(logits: Tensor, k: int, temperature: float) -> Candidates:  # (n, V) -> (n, k) twice
    """The k most probable ids and their log-probabilities in fp32."""
    logits = logits.float()
    logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
    best = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    return Candidates(best.indices, best.values)
