"""The draft-and-verify loop at batch 1; plain decoding is the same loop without a draft.

1. The prompt's prefill emits the first token, the *root*: committed, but not yet read by the target.
2. A drafter proposes K tokens behind the root.
3. One target forward reads root and draft: K+1 distributions.
4. Verification keeps the first `a` drafted tokens and adds one of the target's own; caches roll back; repeat from 2.

K shrinks to 0, a plain step, where the draft or the target runs out of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.drafters import DRAFT_SAMPLING, Clock, Drafter, DraftModelChain, NoDraft, Proposal
from eval.verification import Verdict, verify_chain, verify_greedy
from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache
from models.sampling import SamplingParams, filtered_probs, sample
from models.target import Target


@dataclass(frozen=True)
class Round:
    """One draft-and-verify. Tokens behind the end of the text (EOS, length) count nowhere but in `accepted_uncut`."""

    drafted: int  # 0: a plain step
    judged: int  # drafted tokens the target judged: the accepted ones and the first rejected one
    accepted: int
    accepted_uncut: int


@dataclass
class DecodeResult:
    """token_ids: the new ids, an end-of-text id included. emitted = 1 (prefill) + accepted + corrections and bonus."""

    token_ids: list[int]
    is_accepted: list[bool]  # per emitted token: a drafted one?
    finish_reason: str  # eos, length (max_new_tokens) or positions (the target's limit)
    rounds: list[Round] = field(default_factory=list)
    fallback_steps: int = 0  # rounds in which the draft could not draft (its positions, or the target's, ran out)
    wall_s: float = 0.0
    prefill_s: float = 0.0  # target and draft
    target_s: float = 0.0  # the rounds' target forwards
    draft_s: float = 0.0  # drafting: forwards and sampling
    draft_forward_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Time outside the forwards of target and draft."""
        return self.wall_s - self.prefill_s - self.target_s - self.draft_forward_s

    @property
    def alpha(self) -> float:
        """Accepted over judged tokens; nan when none was judged."""
        judged = sum(r.judged for r in self.rounds)
        return sum(r.accepted for r in self.rounds) / judged if judged else float("nan")

    @property
    def tau(self) -> float:
        """Mean tokens a round."""
        return (len(self.token_ids) - 1) / len(self.rounds) if self.rounds else float("nan")


def speculative_decode(
    target: Target | PreTrainedModel,
    draft: PreTrainedModel | Drafter | None,
    prompt_ids: Sequence[int] | Tensor,
    *,
    draft_len: int = 4,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    draft_sampling: str = "probabilistic",
    max_new_tokens: int = 128,
    eos_token_ids: Sequence[int] | None = None,
    seed: int = 0,
    **unsupported_filters: float,
) -> DecodeResult:
    """Continue a prompt; the text is distributed as the target's own, whatever the draft.

    draft: a causal LM over the same vocabulary, None for plain decoding, or any Drafter.
    temperature 0 is greedy. top_k, top_p and min_p shape target and draft alike.
    draft_sampling: `probabilistic` or `greedy` (one-hot proposals), for temperature > 0.
    eos_token_ids: default the target's own; () to run to max_new_tokens.
    Raises UserError: an unsupported filter, an empty prompt, one longer than the target's positions, or a draft whose
    vocabulary differs.
    """
    params = SamplingParams.of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **unsupported_filters)
    if draft_sampling not in DRAFT_SAMPLING:
        raise UserError(f"draft_sampling={draft_sampling}: unknown; use one of {', '.join(DRAFT_SAMPLING)}")
    for name, value in (("draft_len", draft_len), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise UserError(f"{name}={value}: must be 1 or more")
    vocab_size = real_vocab_size(target)
    if draft is None:
        drafter: Drafter = NoDraft()
    elif isinstance(draft, nn.Module):
        check_vocabulary(target, draft)
        drafter = DraftModelChain(draft, vocab_size=vocab_size, params=params, draft_sampling=draft_sampling)
    else:
        drafter = draft
    model = target.model if isinstance(target, Target) else target
    if eos_token_ids is None:
        eos_token_ids = target.eos_token_ids if isinstance(target, Target) else _model_eos(model)
    return decode(
        model,
        drafter,
        torch.as_tensor(prompt_ids, dtype=torch.long, device=model.device).reshape(-1),
        params=params,
        vocab_size=vocab_size,
        draft_len=draft_len,
        max_new_tokens=max_new_tokens,
        eos_token_ids=frozenset(eos_token_ids),
        generator=torch.Generator(model.device).manual_seed(seed),
    )


@torch.inference_mode()
def decode(
    model: nn.Module,
    drafter: Drafter,
    prompt: Tensor,  # (T,)
    *,
    params: SamplingParams,
    vocab_size: int,
    draft_len: int,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    generator: torch.Generator,
) -> DecodeResult:
    """The loop itself; see the top of the file."""
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    num_tokens = len(prompt)  # committed: prompt and emitted tokens
    if not 0 < num_tokens <= max_positions:
        raise UserError(
            f"prompt of {num_tokens} tokens: the target reads 1 to {max_positions}; give a prompt within these limits"
        )
    clock = Clock(model.device)
    begin = clock.now()
    capacity = min(num_tokens + max_new_tokens, max_positions) + draft_len + 1
    sequence = torch.empty(capacity, dtype=torch.long, device=model.device)
    sequence[:num_tokens] = prompt
    cache = RollbackCache.for_model(model, capacity)

    logits = forward_with_cache(model, prompt[None], cache, logits_to_keep=1).logits[0, -1:, :vocab_size]  # (1, V)
    root = logits.argmax(-1) if params.is_greedy else sample(filtered_probs(logits, params), generator)
    sequence[num_tokens] = root[0]
    num_tokens += 1
    result = DecodeResult(root.tolist(), [False], "")
    result.finish_reason = _finish(result.token_ids, eos_token_ids, max_new_tokens, num_tokens, max_positions)
    if not result.finish_reason:
        drafter.start(prompt, capacity=capacity, generator=generator, clock=clock)
        drafter.accept(0, result.token_ids[0])
    clock.add("prefill", begin)

    while not result.finish_reason:
        # the root stands at position num_tokens - 1, the last drafted token at num_tokens - 1 + K
        num_drafted = max(0, min(draft_len, max_positions - num_tokens, drafter.max_draft_len(num_tokens)))
        proposal = Proposal(sequence[:0], None)
        if num_drafted:
            start = clock.now()
            proposal = drafter.propose(sequence[:num_tokens], num_drafted)
            sequence[num_tokens : num_tokens + num_drafted] = proposal.tokens
            clock.add("draft", start)

        start = clock.now()
        block = sequence[None, num_tokens - 1 : num_tokens + num_drafted]  # (1, K+1)
        logits = forward_with_cache(model, block, cache).logits[0, :, :vocab_size]  # (K+1, V)
        clock.add("target", start)

        verdict = _verify(logits, proposal, params, generator)
        accepted, next_token, *drafted = torch.cat((*verdict, proposal.tokens)).tolist()
        sequence[num_tokens + accepted] = next_token
        cache.rollback(num_tokens + accepted)
        drafter.accept(accepted, next_token)

        block_ids = [*drafted[:accepted], next_token]
        kept = _cut(block_ids, eos_token_ids, max_new_tokens - len(result.token_ids))
        accepted_kept = min(accepted, kept)
        is_rejected = accepted < num_drafted and kept == len(block_ids)
        result.rounds.append(Round(num_drafted, accepted_kept + is_rejected, accepted_kept, accepted))
        result.fallback_steps += num_drafted == 0 and not isinstance(drafter, NoDraft)
        result.token_ids += block_ids[:kept]
        result.is_accepted += [index < accepted for index in range(kept)]
        num_tokens += kept
        result.finish_reason = _finish(result.token_ids, eos_token_ids, max_new_tokens, num_tokens, max_positions)
    result.wall_s = clock.now() - begin
    for name in ("prefill", "target", "draft", "draft_forward"):
        setattr(result, f"{name}_s", clock.seconds.get(name, 0.0))
    return result


def _verify(
    logits: Tensor,  # (K+1, V)
    proposal: Proposal,
    params: SamplingParams,
    generator: torch.Generator,
) -> Verdict:
    tokens = proposal.tokens[None]  # (1, K)
    if params.is_greedy:
        return verify_greedy(logits.argmax(-1)[None], tokens)
    draft_probs = None if proposal.probs is None else proposal.probs[None]  # (1, K, Vd)
    if draft_probs is not None and draft_probs.shape[-1] < logits.shape[-1]:  # ids the draft does not have
        draft_probs = nn.functional.pad(draft_probs, (0, logits.shape[-1] - draft_probs.shape[-1]))
    return verify_chain(filtered_probs(logits, params)[None], tokens, draft_probs, generator=generator)


def _cut(ids: list[int], eos_token_ids: frozenset[int], budget: int) -> int:
    """How many of a round's tokens are emitted: nothing stands behind an end-of-text id or beyond the budget."""
    for index, token in enumerate(ids[:budget]):
        if token in eos_token_ids:
            return index + 1
    return min(len(ids), budget)


def _finish(
    ids: list[int], eos_token_ids: frozenset[int], max_new_tokens: int, num_tokens: int, max_positions: int
) -> str:
    if ids[-1] in eos_token_ids:
        return "eos"
    if len(ids) >= max_new_tokens:
        return "length"
    return "positions" if num_tokens > max_positions else ""  # the root could not be read


def real_vocab_size(target: Target | PreTrainedModel) -> int:
    """Ids that carry mass. A bare model does not tell its padded ids: all of its head counts."""
    return target.vocab_size if isinstance(target, Target) else target.get_output_embeddings().weight.shape[0]


def check_vocabulary(target: Target | PreTrainedModel, draft: PreTrainedModel) -> None:
    """A draft may be wider than the target's real ids (padding), never narrower.

    Raises UserError with both sizes.
    """
    width = draft.get_input_embeddings().weight.shape[0]
    if isinstance(target, Target) and width < target.vocab_size:
        raise UserError(
            f"draft with {width} ids for a target with {target.vocab_size}: the vocabularies differ; "
            "use a draft made with the target's tokenizer"
        )


def _model_eos(model: PreTrainedModel) -> Sequence[int]:
    ids = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    return () if ids is None else ids if isinstance(ids, list) else (ids,)
