"""The rule that keeps the target's distribution: which drafted tokens survive, and the token behind them.

For a drafted chain x_1 .. x_K, draft probabilities q_k (those x_k was *drawn from*) and target probabilities p_k:

1. accept x_k with min(1, p_k(x_k) / q_k(x_k)), in order; the first rejection ends the chain;
2. after a rejection at k the next token comes from (p_k - q_k)+ renormalised;
3. after none, a bonus token comes from p_{K+1}.

Every emitted token is then distributed as the target's own (Leviathan et al. 2023, arXiv:2211.17192, theorem 1).
Vectorised over rows, so that tests can draw millions; the decode loop uses one row.

In a tree a node's children are tried in order, each against what the rejected ones left of p: accept x with
min(1, p(x) / q(x)) and go on behind it, else p <- (p - q)+ renormalised. After the last child the next token comes from
what is left; a node without children gives a token of its p (Miao et al. 2023, arXiv:2305.09781, with siblings drawn
independently of one another).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eval.tree import Tree
from models.sampling import Generators, random_numbers, sample


class Verdict(NamedTuple):
    num_accepted: Tensor  # (B,) drafted tokens kept, 0 .. K
    next_token: Tensor  # (B,) the correction after a rejection, the bonus token after none


class TreeVerdict(NamedTuple):
    path: list[int]  # accepted nodes, each a child of the one before
    next_token: int


def verify_chain(
    target_probs: Tensor,  # (B, K+1, V) fp32
    draft_tokens: Tensor,  # (B, K)
    draft_probs: Tensor | None,  # (B, K, V) what the tokens were drawn from; None: each was certain (one-hot)
    *,
    generator: Generators = None,
    uniforms: Tensor | None = None,  # (B, K) in [0, 1), given by tests only
) -> Verdict:
    """Sampled verification. Exact for any draft, provided `draft_probs` are those the tokens were drawn from.

    Where rounding leaves nothing of (p - q)+ (p equals q and the uniform number came out as 1), the correction is
    drawn from p.
    """
    batch, num_drafted = draft_tokens.shape
    if uniforms is None:
        uniforms = random_numbers((batch, num_drafted), draft_tokens.device, generator)
    chosen = draft_tokens[..., None]  # (B, K, 1)
    target_chosen = target_probs[:, :num_drafted].gather(-1, chosen)[..., 0]  # (B, K)
    draft_chosen = 1.0 if draft_probs is None else draft_probs.gather(-1, chosen)[..., 0]
    accepted = uniforms * draft_chosen < target_chosen  # (B, K); u < p/q without the division
    num_accepted = accepted.long().cumprod(-1).sum(-1)  # (B,)

    rows = torch.arange(batch, device=draft_tokens.device)
    target_last = target_probs[rows, num_accepted]  # (B, V)
    if num_drafted == 0:
        return Verdict(num_accepted, sample(target_last, generator))
    rejected_at = num_accepted.clamp_max(num_drafted - 1)
    is_rejected = (num_accepted < num_drafted)[:, None]  # (B, 1)
    if draft_probs is None:  # (p - onehot)+ is p without the rejected token
        kept = target_last.gather(-1, draft_tokens[rows, rejected_at][:, None]).masked_fill(is_rejected, 0.0)
        residual = target_last.scatter(-1, draft_tokens[rows, rejected_at][:, None], kept)  # (B, V)
    else:
        residual = (target_last - draft_probs[rows, rejected_at] * is_rejected).clamp_min_(0.0)  # (B, V)
    is_empty = residual.sum(-1, keepdim=True) <= 0
    return Verdict(num_accepted, sample(torch.where(is_empty, target_last, residual), generator))


def verify_greedy(target_tokens: Tensor, draft_tokens: Tensor) -> Verdict:  # (B, K+1), (B, K)
    """Greedy verification: drafted tokens are kept while they equal the target's argmax, then comes the argmax."""
    num_accepted = (target_tokens[:, :-1] == draft_tokens).long().cumprod(-1).sum(-1)  # (B,)
    return Verdict(num_accepted, target_tokens.gather(-1, num_accepted[:, None])[:, 0])


def verify_tree(
    target_probs: Tensor | Callable[[int], Tensor],  # (M+1, V) fp32, the root's row first, or row -> (V,)
    tree: Tree,
    generator: torch.Generator | None = None,
) -> TreeVerdict:
    """Sampled verification of a tree. Given as a function, rows are asked for only where the walk comes by.

    Children that are certain (one-hot) need one draw a node: x ~ p, accepted where it is one of them. Trying them in
    turn comes to the same: with r = 1 - p_1 - .. - p_{i-1}, the i-th is reached with probability r and then accepted
    with p_i / r; and what is left of p behind the last child is p given that x is none of them.
    """
    row = target_probs if callable(target_probs) else target_probs.__getitem__
    if tree.probs is not None:
        return _verify_drawn_tree(row, tree, generator)
    if isinstance(target_probs, Tensor) and target_probs.is_cuda:  # wait for the device once, not at every node
        return verify_tree_greedy(sample(target_probs, generator), tree)
    return _walk(tree, lambda index: int(sample(row(index), generator)))


def verify_tree_greedy(
    target_tokens: Tensor | Callable[[int], int],  # (M+1,) the root's first, or row -> token
    tree: Tree,
) -> TreeVerdict:
    """Greedy verification: from the root, on to the child that equals the target's argmax while there is one."""
    return _walk(tree, target_tokens if callable(target_tokens) else target_tokens.tolist().__getitem__)


def _walk(tree: Tree, target_token: Callable[[int], int]) -> TreeVerdict:
    """target_token: row -> the target's token behind it."""
    node_of: dict[tuple[int, int], int] = {}  # parent, token -> node; of equal siblings the first
    for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist())):
        node_of.setdefault(edge, node)
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        token = target_token(node + 1)
        node = node_of.get((node, token))
        if node is not None:
            path.append(node)
    return TreeVerdict(path, token)


def _verify_drawn_tree(
    row: Callable[[int], Tensor],  # -> (V,)
    tree: Tree,
    generator: torch.Generator | None,
) -> TreeVerdict:
    """The rule as it is written above. One pass: siblings stand in order, and behind their parent."""
    path: list[int] = []
    current, rest = -1, row(0)  # rest (V,): what is left of the current node's p
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist())):
        if parent != current:
            continue
        uniform = torch.rand((), dtype=torch.float64, device=rest.device, generator=generator)
        drawn_from = tree.probs[node]  # (V,)
        if bool(uniform * drawn_from[token] < rest[token]):
            path.append(node)
            current, rest = node, row(node + 1)
            continue
        residual = (rest - drawn_from).clamp_min(0.0)
        total = residual.sum()
        if bool(total > 0):  # else rounding left nothing: stay with what was there
            rest = residual / total
    return TreeVerdict(path, int(sample(rest, generator)))
