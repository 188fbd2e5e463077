"""The draft-and-verify loop at batch 1; plain decoding is the same loop without a draft.

1. The prompt's prefill emits the first token, the *root*: committed, but not yet read by the target.
2. A drafter proposes a tree of tokens behind the root (a chain is a tree).
3. One target forward reads root and nodes: M + 1 distributions.
4. Verification accepts a path of the tree and adds one token of the target's own; caches keep the path; repeat from 2.

Trees lose levels, and become plain steps at last, where the draft or the target runs out of positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.drafters import DRAFT_SAMPLING, Clock, Drafter, NoDraft, best_token, make_drafter
from eval.fallback import Fallback, make_fallback
from eval.lookahead import LookaheadDrafter
from eval.ngram import NgramDrafter
from eval.tree import Tree, TreeShape, tree_mask
from eval.verification import TreeVerdict, verify_chain, verify_greedy, verify_tree, verify_tree_greedy
from models.eagle import EagleHead, check_fits, check_widths
from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache, rotation_switch
from models.medusa import MedusaHeads
from models.sampling import SamplingParams, filtered_probs, sample
from models.target import Target


@dataclass(frozen=True)
class Round:
    """One draft-and-verify. Tokens behind the end of the text (EOS, length) count nowhere but in `accepted_uncut`."""

    drafted: int  # nodes of the tree; 0: a plain step
    judged: int  # depths the target judged: those of the accepted tokens, and the next where their last has children
    accepted: int
    accepted_uncut: int
    depth: int = 0  # of the deepest node


@dataclass(frozen=True)
class TreeRecord:
    """A round to look at."""

    root: int  # the token it hangs on
    tokens: list[int]  # of the nodes
    parents: list[int]
    path: list[int]  # accepted nodes
    next_token: int
    start: int  # index among the new ids of the first one that this round emitted


@dataclass
class DecodeResult:
    """token_ids: the new ids, an end-of-text id included. emitted = 1 (prefill) + accepted + corrections and bonus."""

    token_ids: list[int]
    token_depth: list[int]  # per emitted token: the depth at which it was drafted; 0: the target's own
    finish_reason: str  # eos, length (max_new_tokens) or positions (the target's limit)
    rounds: list[Round] = field(default_factory=list)
    fallback_steps: int = 0  # rounds in which the draft could not draft (its positions, or the target's, ran out)
    paused_steps: int = 0  # plain steps because speculation gained nothing, or to time them (fallback=auto)
    wall_s: float = 0.0
    prefill_s: float = 0.0  # target and draft
    target_s: float = 0.0  # the rounds' target forwards
    draft_s: float = 0.0  # drafting: forwards and sampling
    draft_forward_s: float = 0.0
    trees: list[TreeRecord] = field(default_factory=list)  # of the first rounds, where asked for

    @property
    def is_accepted(self) -> list[bool]:
        """Per emitted token: a drafted one?"""
        return [depth > 0 for depth in self.token_depth]

    @property
    def overhead_s(self) -> float:
        """Time outside the forwards of target and draft."""
        return self.wall_s - self.prefill_s - self.target_s - self.draft_forward_s

    @property
    def alpha(self) -> float:
        """Accepted tokens over judged depths; nan when none was judged."""
        judged = sum(r.judged for r in self.rounds)
        return sum(r.accepted for r in self.rounds) / judged if judged else float("nan")

    @property
    def tau(self) -> float:
        """Mean tokens a round."""
        return (len(self.token_ids) - 1) / len(self.rounds) if self.rounds else float("nan")


def speculative_decode(
    target: Target | PreTrainedModel,
    draft: nn.Module | Drafter | None,
    prompt_ids: Sequence[int] | Tensor,
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
    fallback: str | Fallback = "never",
    seed: int = 0,
    record_trees: int = 0,
    **unsupported_filters: float,
) -> DecodeResult:
    """Continue a prompt; the text is distributed as the target's own, whatever the draft.

    target: as loaded; a bare causal LM will do where the draft reads no taps.
    draft: a causal LM over the same vocabulary, an EAGLE head, Medusa heads, None for plain decoding, or any Drafter.
    method: shape of the trees, such as static_3x2x1; default: that of a Drafter that has one, else a chain of
        `draft_len` tokens. ngram_n3_k5 and lookahead_w5_n3_g5 run without a draft: a model given is not asked.
    temperature 0 is greedy. top_k, top_p and min_p shape target and draft alike.
    draft_sampling: `probabilistic` or `greedy` (one-hot proposals), for chains at temperature > 0; a tree's children
        are always the draft's best.
    eos_token_ids: default the target's own; () to run to max_new_tokens.
    fallback: `never` or `auto` (eval/fallback.py): plain steps while speculation gains nothing.
    record_trees: so many rounds are kept in `trees`.
    Raises UserError: an unsupported filter, an empty prompt, one longer than the target's positions, or a draft whose
    vocabulary differs.
    """
    params = SamplingParams.of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **unsupported_filters)
    check_options(draft_sampling, draft_len=draft_len, max_new_tokens=max_new_tokens)
    rule = make_fallback(fallback)
    shape = TreeShape.parse(method, key="method") if isinstance(method, str) else method
    shape = shape or getattr(draft, "shape", None) or TreeShape.chain(draft_len)
    vocab_size = real_vocab_size(target)
    if not shape.needs_draft and (draft is None or isinstance(draft, nn.Module)):
        drafter: Drafter = NgramDrafter(shape) if shape.kind == "ngram" else LookaheadDrafter(shape)
    elif draft is None:
        if method is not None:
            raise UserError(f"method={shape}: needs a draft; give one, or use ngram_n3_k5 or lookahead_w5_n3_g5")
        drafter = NoDraft()
    elif isinstance(draft, nn.Module):
        check_draft(target, draft)
        drafter = make_drafter(draft, shape, vocab_size=vocab_size, params=params, draft_sampling=draft_sampling)
    else:
        drafter = draft
    model = target.model if isinstance(target, Target) else target
    if eos_token_ids is None:
        eos_token_ids = target.eos_token_ids if isinstance(target, Target) else _model_eos(model)
    return decode(
        target,
        drafter,
        torch.as_tensor(prompt_ids, dtype=torch.long, device=model.device).reshape(-1),
        params=params,
        vocab_size=vocab_size,
        shape=shape,
        max_new_tokens=max_new_tokens,
        eos_token_ids=frozenset(eos_token_ids),
        fallback=None if isinstance(drafter, NoDraft) else rule,
        generator=torch.Generator(model.device).manual_seed(seed),
        record_trees=record_trees,
    )


@torch.inference_mode()
def decode(
    target: Target | nn.Module,
    drafter: Drafter,
    prompt: Tensor,  # (T,)
    *,
    params: SamplingParams,
    vocab_size: int,
    shape: TreeShape,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    generator: torch.Generator,
    fallback: Fallback | None = None,
    record_trees: int = 0,
) -> DecodeResult:
    """The loop itself; see the top of the file. shape: no tree is deeper, none has more nodes."""
    with capture_features(target, drafter.features) as features_of:
        model = target.model if isinstance(target, Target) else target
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        switch = rotation_switch(model)
        num_tokens = len(prompt)  # committed: prompt and emitted tokens
        if not 0 < num_tokens <= max_positions:
            raise UserError(
                f"prompt of {num_tokens} tokens: the target reads 1 to {max_positions}; "
                "give a prompt within these limits"
            )
        clock = Clock(model.device)
        begin = clock.now()
        longest = min(num_tokens + max_new_tokens, max_positions) + 1
        sequence = torch.empty(longest + shape.depth, dtype=torch.long, device=model.device)
        sequence[:num_tokens] = prompt
        cache = RollbackCache.for_model(model, longest + shape.num_nodes)

        logits = forward_with_cache(model, prompt[None], cache, logits_to_keep=1).logits[0, -1:, :vocab_size]  # (1, V)
        root = best_token(logits) if params.is_greedy else sample(filtered_probs(logits, params), generator)
        sequence[num_tokens] = root[0]
        num_tokens += 1
        result = DecodeResult(root.tolist(), [0], "")
        result.finish_reason = reason_to_stop(
            result.token_ids, eos_token_ids, max_new_tokens, num_tokens, max_positions
        )
        if not result.finish_reason:
            features = features_of(slice(None))
            capacity = longest + shape.depth
            drafter.start(prompt, features=features, capacity=capacity, generator=generator, clock=clock)
        clock.add("prefill", begin)

        while not result.finish_reason:
            # the root stands at position num_tokens - 1, a node of depth d at num_tokens - 1 + d
            round_start = clock.now()
            is_paused = fallback is not None and fallback.wants_plain()
            most = 0 if is_paused else shape.depth
            limit = switch if num_tokens <= switch else max_positions  # no block on both sides of the switch
            depth = max(0, min(most, limit - num_tokens, drafter.max_draft_len(num_tokens)))
            tree = Tree.empty(model.device)
            if depth:
                start = clock.now()
                tree = drafter.propose(sequence[:num_tokens], depth)
                clock.add("draft", start)
            tokens, parents = torch.stack((tree.tokens, tree.parents)).tolist()
            num_nodes = len(tokens)
            is_chain = parents == list(range(-1, num_nodes - 1))

            start = clock.now()
            block = [sequence[num_tokens - 1 : num_tokens], tree.tokens, *(tree.beside[:1] if tree.beside else ())]
            is_causal = is_chain and tree.beside is None
            arguments = {} if is_causal else _tree_arguments(tree, cache, max_positions)
            output = forward_with_cache(model, torch.cat(block)[None], cache, **arguments)
            logits, beside_logits = output.logits[0, :, :vocab_size].tensor_split((num_nodes + 1,))  # (M+1, V), (E, V)
            clock.add("target", start)
            if tree.beside is not None:
                start = clock.now()
                drafter.observe(beside_logits)
                clock.add("draft", start)

            path, next_token = _verify(logits, tree, is_chain, params, generator)
            accepted = len(path)
            block_ids = [*(tokens[node] for node in path), next_token]
            sequence[num_tokens : num_tokens + accepted + 1] = torch.tensor(block_ids, device=model.device)
            path_index = torch.tensor(path, dtype=torch.long, device=model.device)  # (A,)
            in_place = next((i for i, node in enumerate(path) if node != i), accepted)  # leading nodes at their slots
            if in_place == accepted:
                cache.rollback(num_tokens + accepted)
                kept_rows: slice | Tensor = slice(accepted + 1)
            else:
                cache.gather(num_tokens + in_place, num_tokens + path_index[in_place:])
                kept_rows = torch.cat((path_index.new_zeros(1), path_index + 1))
            drafter.accept(path_index, next_token, features_of(kept_rows))

            kept = count_emitted(block_ids, eos_token_ids, max_new_tokens - len(result.token_ids))
            accepted_kept = min(accepted, kept)
            is_rejected = (path[-1] if path else -1) in parents and kept == len(block_ids)
            deepest = num_nodes if is_chain else _deepest(parents)
            result.rounds.append(Round(num_nodes, accepted_kept + is_rejected, accepted_kept, accepted, deepest))
            result.paused_steps += is_paused
            result.fallback_steps += depth == 0 and not is_paused and not isinstance(drafter, NoDraft)
            if len(result.trees) < record_trees:
                root_token, first = result.token_ids[-1], len(result.token_ids)
                result.trees.append(TreeRecord(root_token, tokens, parents, path, next_token, first))
            result.token_ids += block_ids[:kept]
            result.token_depth += [*range(1, accepted + 1), 0][:kept]
            num_tokens += kept
            if fallback is not None:
                fallback.add(len(block_ids), clock.now() - round_start, is_plain=depth == 0)
            result.finish_reason = reason_to_stop(
                result.token_ids, eos_token_ids, max_new_tokens, num_tokens, max_positions
            )
    result.wall_s = clock.now() - begin
    for name in ("prefill", "target", "draft", "draft_forward"):
        setattr(result, f"{name}_s", clock.seconds.get(name, 0.0))
    return result


@contextmanager
def capture_features(target: Target | nn.Module, kind: str | None) -> Iterator[Callable[[slice | Tensor], Any]]:
    """Hooks for a whole text. Gives a function: rows of the target's last forward -> their features, None without
    `kind`; `taps` (A, L, D), `final_hidden` (A, D) post-norm.
    """
    if kind is None:
        yield lambda rows: None
    elif kind == "taps":
        if not isinstance(target, Target):
            raise UserError("target: an EAGLE-3 head reads its taps; give the Target that it was made for")
        with target.capture() as captured:
            yield lambda rows: torch.stack([captured[i].to(target.device)[0, rows] for i in target.tap_ids], dim=1)
    else:
        assert kind == "final_hidden", kind
        last: dict[str, Tensor] = {}
        base_model = (target.model if isinstance(target, Target) else target).base_model
        handle = base_model.register_forward_hook(lambda module, args, output: last.update(state=output[0]))
        try:
            yield lambda rows: last["state"].to(target.device)[0, rows]
        finally:
            handle.remove()


def _tree_arguments(tree: Tree, cache: RollbackCache, max_positions: int) -> dict[str, Tensor]:
    """Positions and mask of root and nodes, and of the tokens beside them."""
    depth, visible = torch.cat((tree.depth.new_zeros(1), tree.depth)), tree_mask(tree)  # (M+1,), (M+1, M+1)
    if tree.beside is not None:
        # a guess may stand beyond the target's last position: a wrong place harms no text
        depth = torch.cat((depth, tree.beside.depth)).clamp_max(max_positions - 1 - cache.length)
        num_verified, visible = len(visible), torch.block_diag(visible, tree.beside.visible)
        visible[num_verified:, 0] = True
    return {"position_ids": (cache.length + depth)[None], "attention_mask": cache.tree_mask(visible)}


def _verify(
    logits: Tensor,  # (M+1, V)
    tree: Tree,
    is_chain: bool,
    params: SamplingParams,
    generator: torch.Generator,
) -> TreeVerdict:
    if tree.probs is not None and tree.probs.shape[-1] < logits.shape[-1]:  # ids the draft does not have
        tree = tree._replace(probs=nn.functional.pad(tree.probs, (0, logits.shape[-1] - tree.probs.shape[-1])))
    if is_chain:
        tokens = tree.tokens[None]  # (1, K)
        if params.is_greedy:
            verdict = verify_greedy(best_token(logits)[None], tokens)
        else:
            draft_probs = None if tree.probs is None else tree.probs[None]
            verdict = verify_chain(filtered_probs(logits, params)[None], tokens, draft_probs, generator=generator)
        accepted, next_token = torch.cat(verdict).tolist()
        return TreeVerdict(list(range(accepted)), next_token)
    if logits.is_cuda:
        if params.is_greedy:
            return verify_tree_greedy(best_token(logits), tree)
        return verify_tree(filtered_probs(logits, params), tree, generator)
    # on a CPU the passes over the vocabulary are made only for the rows that the walk comes by
    if params.is_greedy:
        return verify_tree_greedy(lambda row: int(best_token(logits[row])), tree)
    return verify_tree(lambda row: filtered_probs(logits[row], params), tree, generator)


def _deepest(parents: list[int]) -> int:
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 1)
    return max(depth, default=0)


def count_emitted(ids: list[int], eos_token_ids: frozenset[int], budget: int) -> int:
    """How many of a round's tokens are emitted: nothing stands behind an end-of-text id or beyond the budget."""
    for index, token in enumerate(ids[:budget]):
        if token in eos_token_ids:
            return index + 1
    return min(len(ids), budget)


def reason_to_stop(
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


def check_options(draft_sampling: str, **lengths: int) -> None:
    """Raises UserError, naming the option."""
    if draft_sampling not in DRAFT_SAMPLING:
        raise UserError(f"draft_sampling={draft_sampling}: unknown; use one of {', '.join(DRAFT_SAMPLING)}")
    for name, value in lengths.items():
        if value < 1:
            raise UserError(f"{name}={value}: must be 1 or more")


def check_draft(target: Target | PreTrainedModel, draft: nn.Module) -> None:
    """Raises UserError where a draft was made for another target. What a head needs only a Target tells."""
    if isinstance(draft, PreTrainedModel):
        check_vocabulary(target, draft)
    elif isinstance(target, Target) and isinstance(draft, EagleHead):
        check_fits(draft.config, target, "head")
    elif isinstance(target, Target) and isinstance(draft, MedusaHeads):
        check_widths(draft.config, target, "heads")


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
