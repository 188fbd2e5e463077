"""Reference of filters and of the acceptance rules in numpy and fp64, written for reading, and exact joint
probabilities by enumeration. Tests compare the fast code with it.
"""

from collections.abc import Callable, Sequence

import numpy as np

Probs = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> (V,) probabilities of the next token
# prefix, its depth in the round's tree -> for each child what it is drawn from, and what it is verified against
Children = Callable[[tuple[int, ...], int], Sequence[tuple[np.ndarray, np.ndarray]]]


def reference_probs(
    logits: Sequence[float] | np.ndarray,  # (V,)
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:  # (V,)
    """Softmax after temperature, top-k, top-p and min-p, in this order. Ties at a boundary are kept."""
    logits = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    probs = np.exp((logits - logits.max()) / temperature)
    if top_k > 0:
        probs[probs < np.sort(probs)[::-1][min(top_k, len(probs)) - 1]] = 0
    probs /= probs.sum()
    if top_p < 1:
        descending = np.sort(probs)[::-1]
        mass_before = np.cumsum(descending) - descending
        probs[probs < descending[np.sum(mass_before < top_p) - 1]] = 0
    if min_p > 0:
        probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def reference_residual(target_probs: np.ndarray, draft_probs: np.ndarray) -> np.ndarray:  # (V,), (V,) -> (V,)
    """(p - q)+ renormalised; p itself where nothing is left of it."""
    residual = np.maximum(target_probs - draft_probs, 0)
    return residual / residual.sum() if residual.sum() > 0 else target_probs


def reference_verify(
    target_probs: np.ndarray,  # (K+1, V)
    draft_tokens: Sequence[int],  # (K)
    draft_probs: np.ndarray,  # (K, V)
    uniforms: Sequence[float],  # (K+1) one for each judgement, the last for the token behind them
) -> tuple[int, int]:
    """(accepted tokens, next token) of one chain."""
    for k, token in enumerate(draft_tokens):
        if uniforms[k] * draft_probs[k, token] >= target_probs[k, token]:
            return k, _draw(reference_residual(target_probs[k], draft_probs[k]), uniforms[-1])
    return len(draft_tokens), _draw(target_probs[-1], uniforms[-1])


def joint_probs(probs: Probs, horizon: int, vocab_size: int) -> np.ndarray:  # (V,) * horizon
    """Exact probability of every continuation of `horizon` tokens."""
    joint = np.zeros((vocab_size,) * horizon)
    for tokens in np.ndindex(joint.shape):
        joint[tokens] = np.prod([probs(tokens[:i])[tokens[i]] for i in range(horizon)])
    return joint


def tree_joint_probs(
    target: Probs, children: Children, *, horizon: int, vocab_size: int
) -> np.ndarray:  # (V,) * horizon
    """Exact probability of every continuation when trees are drafted and verified round after round. Equals
    `joint_probs(target, ...)` when every child is verified against what it was drawn from, independently of its
    siblings.
    """
    joint = np.zeros((vocab_size,) * horizon)

    def follow(committed: tuple[int, ...], depth: int, weight: float) -> None:
        """Add up every way to go on behind `committed`, whose last `depth` tokens are accepted nodes of this round."""
        if weight == 0:
            return
        if len(committed) >= horizon:
            joint[committed[:horizon]] += weight
            return
        rest = target(committed)
        for drawn_from, declared in children(committed, depth):
            rejected = 0.0
            for token in np.flatnonzero(drawn_from):
                accept = min(1.0, rest[token] / declared[token]) if declared[token] > 0 else 1.0
                follow((*committed, int(token)), depth + 1, weight * drawn_from[token] * accept)
                rejected += drawn_from[token] * (1 - accept)
            weight *= rejected
            rest = reference_residual(rest, declared)
        for token in range(vocab_size):  # correction or bonus, then a new round
            follow((*committed, token), 0, weight * rest[token])

    follow((), 0, 1.0)
    return joint


def reference_tree_outcomes(
    target_probs: np.ndarray,  # (M+1, V), the root's row first
    tokens: Sequence[int],  # (M)
    parents: Sequence[int],
    probs: np.ndarray | None,  # (M, V) what each was drawn from; None: one-hot
) -> dict[tuple[tuple[int, ...], int], float]:
    """Exact probability of every (accepted path, next token) of one drawn tree."""
    outcomes: dict[tuple[tuple[int, ...], int], float] = {}

    def follow(node: int, path: tuple[int, ...], weight: float) -> None:
        rest = target_probs[node + 1]
        for child in (i for i, parent in enumerate(parents) if parent == node):
            declared = np.eye(len(rest))[tokens[child]] if probs is None else probs[child]
            accept = min(1.0, rest[tokens[child]] / declared[tokens[child]])
            follow(child, (*path, child), weight * accept)
            weight *= 1 - accept
            rest = reference_residual(rest, declared)
        for token in np.flatnonzero(rest):
            if weight > 0:
                outcomes[path, int(token)] = weight * rest[token]

    follow(-1, (), 1.0)
    return outcomes


def _draw(probs: np.ndarray, uniform: float) -> int:
    return int(np.searchsorted(np.cumsum(probs), uniform * probs.sum(), side="right"))
