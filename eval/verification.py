"""The rule that keeps the target's distribution: which drafted tokens survive, and the token behind them.

For a drafted chain x_1 .. x_K, draft probabilities q_k (those x_k was *drawn from*) and target probabilities p_k:

1. accept x_k with min(1, p_k(x_k) / q_k(x_k)), in order; the first rejection ends the chain;
2. after a rejection at k the next token comes from (p_k - q_k)+ renormalised;
3. after none, a bonus token comes from p_{K+1}.

Every emitted token is then distributed as the target's own (Leviathan et al. 2023, arXiv:2211.17192, theorem 1).
Vectorised over rows, so that tests can draw millions; the decode loop uses one row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.sampling import sample


class Verdict(NamedTuple):
    num_accepted: Tensor  # (B,) drafted tokens kept, 0 .. K
    next_token: Tensor  # (B,) the correction after a rejection, the bonus token after none


def verify_chain(
    target_probs: Tensor,  # (B, K+1, V) fp32
    draft_tokens: Tensor,  # (B, K)
    draft_probs: Tensor | None,  # (B, K, V) what the tokens were drawn from; None: each was certain (one-hot)
    *,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,  # (B, K) in [0, 1), given by tests only
) -> Verdict:
    """Sampled verification. Exact for any draft, provided `draft_probs` are those the tokens were drawn from.

    Where rounding leaves nothing of (p - q)+ (p equals q and the uniform number came out as 1), the correction is
    drawn from p.
    """
    batch, num_drafted = draft_tokens.shape
    if uniforms is None:
        uniforms = torch.rand(batch, num_drafted, dtype=torch.float64, device=draft_tokens.device, generator=generator)
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
