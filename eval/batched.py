"""The draft-and-verify loop for a batch of prompts: chains, and plain decoding without a draft.

1. Prompts of different lengths are read together, padded on the right; each row's first token is its root.
2. A drafter proposes K tokens for every row.
3. One target forward reads (B, K + 1) tokens; each row accepts its own number of them and adds one of the target's own.
4. A row that has ended leaves, and the last row takes its place; repeat from 2.

Each row has its own length in the caches and its own random numbers, drawn in the order of eval/loop.py: a text does
not depend on its company, but for the last bits of the logits.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eval.batched_drafters import Chains, ChainsDrafter, Draws, Rows, make_chains_drafter
from eval.drafters import Clock, best_token, check_shape
from eval.loop import DecodeResult, Round, check_draft, check_options, count_emitted, reason_to_stop
from eval.tree import TreeShape
from eval.verification import verify_chain, verify_greedy
from models.eagle import TAPS
from models.errors import UserError
from models.kv_cache import forward_with_cache
from models.ragged_cache import RaggedCache, replace_by_last, without_row
from models.sampling import SamplingParams, filtered_probs, sample
from models.target import Target


@dataclass
class BatchResult:
    """results: in the order of the prompts; their seconds are 0 but for `wall_s`, until the row's last token."""

    results: list[DecodeResult]
    wall_s: float = 0.0
    prefill_s: float = 0.0  # target and draft
    target_s: float = 0.0  # the rounds' target forwards
    draft_s: float = 0.0
    draft_forward_s: float = 0.0
    num_rounds: int = 0  # target forwards behind the prefill, each of all rows then left

    @property
    def num_tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        """All new tokens over the time of the whole batch, prefill included."""
        return self.num_tokens / self.wall_s


@dataclass
class _Row:
    """One sequence on its way."""

    result: DecodeResult
    generator: torch.Generator
    num_tokens: int  # committed: prompt and emitted tokens


def speculative_decode_batch(
    target: Target,
    draft: nn.Module | None,
    prompts: Sequence[Sequence[int]],
    *,
    method: str | TreeShape | None = None,
    draft_len: int = 4,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draft_sampling: str = "probabilistic",
    max_new_tokens: int = 128,
    eos_token_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    **unsupported_filters: float,
) -> BatchResult:
    """Continue all prompts at once; each text is distributed as the target's own, as in `speculative_decode`.

    draft: a causal LM over the same vocabulary, an EAGLE head, Medusa heads, or None for plain decoding.
    method: chain_k4 and its like; default: a chain of `draft_len` tokens.
    seeds: one a prompt, default 0, 1, ...; the text of (prompt, seed) does not depend on the batch around it.
    Raises UserError: an unsupported filter or method, no prompt, an empty one or one longer than the target's
    positions, a draft that does not fit, or a model with sliding windows.
    """
    params = SamplingParams.of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **unsupported_filters)
    check_options(draft_sampling, draft_len=draft_len, max_new_tokens=max_new_tokens)
    shape = TreeShape.parse(method, key="method") if isinstance(method, str) else method or TreeShape.chain(draft_len)
    if shape.kind != "chain":
        raise UserError(f"method={shape}: batches decode by chains only; use for example chain_k4")
    seeds = range(len(prompts)) if seeds is None else seeds
    if not prompts or len(seeds) != len(prompts):
        raise UserError(
            f"seeds: {len(seeds)} for {len(prompts)} prompts; give at least one prompt, and a seed for each"
        )
    for prompt in prompts:
        if not 0 < len(prompt) <= target.max_positions:
            raise UserError(
                f"prompt of {len(prompt)} tokens: the target reads 1 to {target.max_positions}; "
                "give prompts within these limits"
            )
    drafter = None
    if draft is not None:
        check_draft(target, draft)
        check_shape(draft, shape, vocab_size=target.vocab_size, key="method")
        drafter = make_chains_drafter(draft, vocab_size=target.vocab_size, params=params, draft_sampling=draft_sampling)
    ends = target.eos_token_ids if eos_token_ids is None else eos_token_ids
    return _Loop(target, drafter, params, shape.depth, max_new_tokens, frozenset(ends)).run(prompts, seeds)


@dataclass
class _Loop:
    """One batch. Rows are numbered as they stand now: `rows[b]` is row b of every tensor and cache."""

    target: Target
    drafter: ChainsDrafter | None
    params: SamplingParams
    draft_len: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> BatchResult:
        device = self.target.device
        self.clock = Clock(device)
        self.begin = self.clock.now()
        longest = min(max(map(len, prompts)) + self.max_new_tokens, self.target.max_positions) + 1
        capacity = longest + self.draft_len
        self.cache = RaggedCache.for_rows(self.target.model, len(prompts), capacity)
        self.sequences = torch.zeros(len(prompts), capacity, dtype=torch.long, device=device)  # (B, S)
        self.rows: list[_Row] = []
        for sequence, prompt, seed in zip(self.sequences, prompts, seeds, strict=True):
            sequence[: len(prompt)] = torch.as_tensor(prompt, device=device)
            generator = torch.Generator(device).manual_seed(seed)
            self.rows.append(_Row(DecodeResult([], [], ""), generator, len(prompt)))
        done = BatchResult([row.result for row in self.rows])
        with self.target.capture() if self._reads_taps else nullcontext() as self.captured:
            self._prefill()
            self.clock.add("prefill", self.begin)
            while self.rows:
                self._round()
                done.num_rounds += 1
        done.wall_s = self.clock.now() - self.begin
        for name in ("prefill", "target", "draft", "draft_forward"):
            setattr(done, f"{name}_s", self.clock.seconds.get(name, 0.0))
        return done

    @property
    def _reads_taps(self) -> bool:
        return self.drafter is not None and self.drafter.features == TAPS

    @property
    def _committed(self) -> Rows:
        return Rows(self.sequences, [row.num_tokens for row in self.rows])

    @property
    def _generators(self) -> list[torch.Generator]:
        return [row.generator for row in self.rows]

    def _prefill(self) -> None:
        """Read the prompts and emit the roots."""
        prompts = self._committed
        lengths = prompts.num_tokens
        hidden = self._forward(self.sequences[:, : max(lengths)])  # (B, T, D)
        self.cache.advance(lengths)
        device = hidden.device
        last = torch.tensor(lengths, device=device) - 1
        logits = self.target.logits(hidden[torch.arange(len(lengths), device=device), last])  # (B, V)
        if self.params.is_greedy:
            roots = best_token(logits)
        else:
            roots = sample(filtered_probs(logits, self.params), self._generators)
        if self.drafter:
            features = self._features(hidden)
            self.drafter.start(prompts, features, capacity=self.cache.capacity, clock=self.clock)
        for row, root in zip(self.rows, roots.tolist()):
            row.num_tokens += 1
            row.result.token_ids.append(root)
            row.result.token_depth.append(0)
        self.sequences[torch.arange(len(lengths), device=device), last + 1] = roots
        self._drop_ended()

    def _round(self) -> None:
        depths = [self._depth(number) for number in range(len(self.rows))]
        block = self._committed.slice([row.num_tokens - 1 for row in self.rows], [1] * len(self.rows))  # (B, 1)
        chains = None
        if max(depths):
            start = self.clock.now()
            chains = self.drafter.propose(self._committed, Draws(depths, self._generators))
            block = torch.cat((block, chains.tokens), 1)  # (B, K+1)
            # a root that the draft cannot read shows only now
            depths = [min(depth, self._depth(number)) for number, depth in enumerate(depths)]
            self.clock.add("draft", start)

        start = self.clock.now()
        hidden = self._forward(block)
        logits = self.target.logits(hidden)  # (B, K+1, V)
        self.clock.add("target", start)

        accepted, next_tokens = self._verify(logits, chains, depths)
        self.cache.advance([count + 1 for count in accepted])
        if chains is not None:
            self.drafter.accept(accepted, self._features(hidden))
        drafted = block[:, 1:].tolist()
        for number, (row, depth) in enumerate(zip(self.rows, depths)):
            count, result = accepted[number], row.result
            block_ids = [*drafted[number][:count], next_tokens[number]]
            kept = count_emitted(block_ids, self.eos_token_ids, self.max_new_tokens - len(result.token_ids))
            new_ids = torch.tensor(block_ids[:kept], device=block.device)
            self.sequences[number, row.num_tokens : row.num_tokens + kept] = new_ids
            row.num_tokens += kept
            accepted_kept = min(count, kept)
            is_rejected = count < depth and kept == len(block_ids)
            result.rounds.append(Round(depth, accepted_kept + is_rejected, accepted_kept, count, depth))
            result.fallback_steps += depth == 0 and self.drafter is not None
            result.token_ids += block_ids[:kept]
            result.token_depth += [*range(1, count + 1), 0][:kept]
        self._drop_ended()

    def _depth(self, number: int) -> int:
        """How many tokens are drafted behind a row: its root stands at position num_tokens - 1."""
        if self.drafter is None:
            return 0
        num_tokens = self.rows[number].num_tokens
        room = self.target.max_positions - num_tokens
        return max(0, min(self.draft_len, room, self.drafter.max_draft_len(number, num_tokens)))

    def _forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, D) post-norm
        positions, mask = self.cache.place(tokens.shape[1], tokens.device)
        output = forward_with_cache(
            self.target.model.base_model,
            tokens,
            self.cache,
            position_ids=positions.clamp_max(self.target.max_positions - 1),  # of pads
            attention_mask=mask,
        )
        return output.last_hidden_state.to(tokens.device)  # from the last GPU of a target that is spread over several

    def _features(self, hidden: Tensor) -> Tensor | None:  # (B, T, L, D) or (B, T, D)
        """What the drafter reads of the last forward."""
        if self._reads_taps:
            return torch.stack([self.captured[i].to(hidden.device) for i in self.target.tap_ids], dim=2)
        return hidden if self.drafter.features else None

    def _verify(self, logits: Tensor, chains: Chains | None, depths: list[int]) -> tuple[list[int], list[int]]:
        """Accepted tokens and next token of each row. Behind its depth a row has drafted nothing."""
        tokens = logits.new_zeros(len(depths), 0, dtype=torch.long) if chains is None else chains.tokens  # (B, K)
        if self.params.is_greedy:
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            is_drafted = steps < torch.tensor(depths, device=tokens.device)[:, None]  # (B, K)
            verdict = verify_greedy(best_token(logits), tokens.where(is_drafted, -1))
            return verdict.num_accepted.tolist(), verdict.next_token.tolist()
        accepted, next_tokens = [0] * len(depths), [0] * len(depths)
        for depth in set(depths):
            numbers = [number for number, own in enumerate(depths) if own == depth]
            of_depth = torch.tensor(numbers, device=tokens.device)
            draft_probs = None
            if chains is not None and chains.probs is not None:
                draft_probs = chains.probs[of_depth, :depth]
                draft_probs = nn.functional.pad(draft_probs, (0, logits.shape[-1] - draft_probs.shape[-1]))
            verdict = verify_chain(
                filtered_probs(logits[of_depth, : depth + 1], self.params),
                tokens[of_depth, :depth],
                draft_probs,
                generator=[self.rows[number].generator for number in numbers],
            )
            for number, count, token in zip(numbers, *(x.tolist() for x in verdict)):
                accepted[number], next_tokens[number] = count, token
        return accepted, next_tokens

    def _drop_ended(self) -> None:
        for number, row in reversed(list(enumerate(self.rows))):
            result = row.result
            result.finish_reason = reason_to_stop(
                result.token_ids, self.eos_token_ids, self.max_new_tokens, row.num_tokens, self.target.max_positions
            )
            if not result.finish_reason:
                continue
            result.wall_s = self.clock.now() - self.begin
            self.cache.drop(number)
            self.sequences = without_row(self.sequences, number)
            if self.drafter:
                self.drafter.drop(number)
            replace_by_last(self.rows, number)
