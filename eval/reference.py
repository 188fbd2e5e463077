"""Reference of filters and of the acceptance rule in numpy and fp64, written for reading, and exact joint
probabilities by enumeration. Tests compare the fast code with it.
"""

from collections.abc import Callable, Sequence

import numpy as np

Probs = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> (V,) probabilities of the next token


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


def speculative_joint_probs(
    target: Probs, drawn_from: Probs, declared: Probs, *, draft_len: int, horizon: int, vocab_size: int
) -> np.ndarray:  # (V,) * horizon
    """Exact probability of every continuation when tokens are drafted from `drawn_from` and verified as if they came
    from `declared`. Equals `joint_probs(target, ...)` exactly when the two are the same.
    """
    joint = np.zeros((vocab_size,) * horizon)

    def follow(committed: tuple[int, ...], num_drafted: int, weight: float) -> None:
        """Add up every way to go on after `committed`, whose last `num_drafted` tokens this round drafted."""
        if weight == 0:
            return
        if len(committed) >= horizon:
            joint[committed[:horizon]] += weight
            return
        target_probs = target(committed)
        if num_drafted == draft_len:  # bonus token, then a new round
            for token in range(vocab_size):
                follow((*committed, token), 0, weight * target_probs[token])
            return
        draft_probs, proposal = declared(committed), drawn_from(committed)
        residual = reference_residual(target_probs, draft_probs)
        for drafted in range(vocab_size):
            if proposal[drafted] == 0:
                continue
            ratio = target_probs[drafted] / draft_probs[drafted] if draft_probs[drafted] > 0 else np.inf
            accept = min(1.0, ratio)
            follow((*committed, drafted), num_drafted + 1, weight * proposal[drafted] * accept)
            for token in range(vocab_size):
                follow((*committed, token), 0, weight * proposal[drafted] * (1 - accept) * residual[token])

    follow((), 0, 1.0)
    return joint


def _draw(probs: np.ndarray, uniform: float) -> int:
    return int(np.searchsorted(np.cumsum(probs), uniform * probs.sum(), side="right"))
