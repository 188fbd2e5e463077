"""Distillation losses, from any cached signal, without ever holding the (N, V) logits in fp32.

For a chunk of supervised tokens:
1. logits z = hidden @ head.T in the autocast dtype
2. for blocks of rows small enough to stay in the processor's cache: fp32 softmax q, loss, and its closed-form gradient
   dL/dz, written over z
3. the two products that carry dL/dz back to hidden and head
All in the forward pass, once: nothing is recomputed and no graph over (N, V) exists.

For a loss L(p, q) of target p and draft q = softmax(z / temperature), and h_v = q_v * dL/dq_v:
dL/dz = (h - q * sum(h)) / temperature. Terms of the KL family are scaled by temperature^2 (Hinton et al. 2015,
arXiv:1503.02531): their gradients keep their size. p log(p/q) is 0 where p is 0.

forward_kl  sum p log(p/q)                          h = -p
reverse_kl  sum q log(q/p)                          h = q (log q - log p + 1)
jsd         b KL(p|m) + (1-b) KL(q|m)               h = (1-b) q log(q/m), with m = b p + (1-b) q
            (GKD, arXiv:2306.13649). b = 0 and b = 1 are forward and reverse KL; just inside, it is those times b and
            1-b, so the ends are not continuous.
tv          1 - alpha, alpha = sum min(p, q)        h = -q [q < p]
lk_hybrid   l KL + (1-l) TV, l = exp(-3 alpha)      l per token, detached (arXiv:2602.23881)
lk_log      -log alpha                              h = h_tv / alpha (arXiv:2602.23881)

A top-k signal is a distribution over k + 1 buckets: the k ids, and one tail that sums what is left on either side;
inside the tail h is spread in proportion to q. Every loss is 0 when the models agree. With k = V it is the dense loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.errors import UserError

LOSSES = ("forward_kl", "reverse_kl", "jsd", "tv", "lk_hybrid", "lk_log")
KL_FAMILY = ("forward_kl", "reverse_kl", "jsd")
BLOCK_ELEMENTS = 2**21  # fp32 values a block (8 MB): stays in a CPU's cache between the passes over it
LOWEST = -1e30  # stands for log 0: finite, so that 0 * LOWEST = 0, and exp(LOWEST) = 0


@dataclass(frozen=True)
class LossSpec:
    """Which loss; `beta` only for jsd; `temperature` divides the logits of both sides.

    chunk_mb: MiB of one chunk's logits; the peak above the inputs is about that and the head's fp32 gradient.
    """

    name: str = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5
    chunk_mb: int = 96

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise UserError(f"loss.name={self.name} is unknown: use one of {', '.join(LOSSES)}")
        if not self.temperature > 0:
            raise UserError(f"loss.temperature={self.temperature} must be above 0")
        if not 0 <= self.beta <= 1:
            raise UserError(f"loss.beta={self.beta} must be in [0, 1] (0 forward KL, 1 reverse KL)")
        if self.chunk_mb < 1:
            raise UserError(f"loss.chunk_mb={self.chunk_mb} must be at least 1")


@dataclass(frozen=True)
class TopKSignal:
    """The k largest log-probs of the target's full softmax, and the log of the mass that they leave."""

    ids: Tensor  # (N, k) int
    logprobs: Tensor  # (N, k)
    tail_logprob: Tensor  # (N)


@dataclass(frozen=True)
class HiddenSignal:
    """The target's post-norm final state; its frozen head gives exact logits chunk by chunk."""

    final_hidden: Tensor  # (N, D)
    head: Callable[[Tensor], Tensor]  # (n, D) -> (n, V)
    logsumexp: Tensor | None = None  # (N) of the full logits, if it was stored


@dataclass(frozen=True)
class LogitsSignal:
    """The target's logits, as they are. -inf is probability 0."""

    logits: Tensor  # (N, V)


Signal = TopKSignal | HiddenSignal | LogitsSignal


@dataclass(frozen=True)
class DistillLoss:
    """Sums over the masked tokens: divide by `num_tokens` for means. Only `loss_sum` carries gradients.

    alpha_sum and kl_sum are at temperature 1 whatever the loss: alpha = sum_v min(p_v, q_v), KL(target | draft). From a
    top-k signal alpha is an upper bound and KL a lower bound (the tail counts as one token).
    """

    loss_sum: Tensor  # ()
    num_tokens: int
    alpha_sum: Tensor  # ()
    kl_sum: Tensor  # ()


def distill_loss(
    draft_hidden: Tensor,  # (N, Dd)
    head_weight: Tensor,  # (V, Dd)
    signal: Signal,
    mask: Tensor,  # (N) bool, True where a token counts
    *,
    loss: LossSpec,
    vocab_size: int | None = None,
    chunk_bytes: int | None = None,
) -> DistillLoss:
    """Loss of the draft against the target over the masked tokens, head and loss fused (see the module).

    vocab_size: the real ids; columns beyond it are padding of either head and carry no mass. By default the narrower
    of the two widths: a signal of logits is then renormalised over the shared ids.
    chunk_bytes: of one chunk's logits, instead of loss.chunk_mb.
    Raises UserError for a temperature other than 1 with a top-k signal, whose tail cannot be re-tempered.
    """
    if isinstance(signal, TopKSignal) and loss.temperature != 1:
        raise UserError(
            f"loss.temperature={loss.temperature} needs the whole distribution: use cache.signal=hidden, not topk"
        )
    rows = mask.nonzero().squeeze(1)  # (n)
    chunk_bytes = loss.chunk_mb * 2**20 if chunk_bytes is None else chunk_bytes
    with_grad = torch.is_grad_enabled() and (draft_hidden.requires_grad or head_weight.requires_grad)
    loss_sum, alpha_sum, kl_sum = _FusedHeadLoss.apply(
        draft_hidden, head_weight, rows, signal, loss, vocab_size, chunk_bytes, with_grad
    )
    return DistillLoss(loss_sum, rows.numel(), alpha_sum, kl_sum)


class _FusedHeadLoss(torch.autograd.Function):
    """Head product, loss and both gradients in one pass over chunks; backward only scales what forward has left."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, Dd)
        weight: Tensor,  # (V, Dd)
        rows: Tensor,  # (n) indices of the supervised tokens
        signal: Signal,
        loss: LossSpec,
        vocab_size: int | None,
        chunk_bytes: int,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, kind = hidden.device, hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else torch.promote_types(hidden.dtype, weight.dtype)
        sums = torch.zeros(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
        need_hidden, need_weight = (flag and with_grad for flag in ctx.needs_input_grad[:2])
        with torch.autocast(kind, enabled=False):
            width = weight.shape[0] if vocab_size is None else min(vocab_size, weight.shape[0])
            if isinstance(signal, LogitsSignal):
                width = min(width, signal.logits.shape[1])
            head = weight[:width].to(dtype)  # (V, Dd)
            hidden_rows = hidden.index_select(0, rows).to(dtype)  # (n, Dd)
            grad_rows = torch.empty_like(hidden_rows) if need_hidden else None
            grad_head: Tensor | None = None  # (V, Dd) fp32
            num_buffers = 1 if isinstance(signal, TopKSignal) else 2  # the draft's logits, and the target's
            chunk = max(1, chunk_bytes // (width * head.element_size() * num_buffers))
            for start in range(0, rows.numel(), chunk):
                part = slice(start, start + chunk)
                z = hidden_rows[part] @ head.T  # (c, V)
                _chunk_loss(z, signal, rows[part], loss, sums, need_hidden or need_weight)  # z becomes dL/dz
                if need_hidden:
                    torch.mm(z, head, out=grad_rows[part])  # (c, Dd)
                if need_weight and grad_head is None:
                    grad_head = (z.T @ hidden_rows[part]).to(sums.dtype)  # (V, Dd)
                elif need_weight and dtype == sums.dtype:
                    grad_head.addmm_(z.T, hidden_rows[part])
                elif need_weight:
                    grad_head.add_(z.T @ hidden_rows[part])
            if need_hidden:
                ctx.grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_rows.to(hidden.dtype))
            if need_weight:
                ctx.grad_weight = _full_height(grad_head, weight)
        ctx.needed = (need_hidden, need_weight)
        loss_sum, alpha_sum, kl_sum = sums.unbind()
        loss_sum = loss_sum.clone()
        ctx.mark_non_differentiable(alpha_sum, kl_sum)
        return loss_sum, alpha_sum, kl_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        need_hidden, need_weight = ctx.needed
        grad_hidden = ctx.grad_hidden.mul_(grad_loss) if need_hidden else None
        grad_weight = ctx.grad_weight.mul_(grad_loss) if need_weight else None
        ctx.grad_hidden = ctx.grad_weight = None  # scaled in place, so they serve once
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _full_height(grad_head: Tensor | None, weight: Tensor) -> Tensor:  # (V, Dd)
    """The head's gradient at the head's own height and dtype: zero for padded ids, and where nothing was supervised."""
    if grad_head is not None and grad_head.shape == weight.shape:
        return grad_head.to(weight.dtype)
    full = torch.zeros_like(weight)
    if grad_head is not None:
        full[: grad_head.shape[0]] = grad_head.to(weight.dtype)
    return full


def _chunk_loss(
    z: Tensor,  # (c, V) the draft's logits; dL/dz on return if with_grad
    signal: Signal,
    rows: Tensor,  # (c)
    loss: LossSpec,
    sums: Tensor,  # (3) loss, alpha, KL: added to
    with_grad: bool,
) -> None:
    """Loss and gradient of a chunk, a block of rows at a time."""
    width = z.shape[1]
    if isinstance(signal, TopKSignal):
        ids = signal.ids.index_select(0, rows).long()  # (c, k)
        logprobs = signal.logprobs.index_select(0, rows)  # (c, k)
        tail = signal.tail_logprob.index_select(0, rows)  # (c)
    elif isinstance(signal, HiddenSignal):
        target_z = signal.head(signal.final_hidden.index_select(0, rows))[:, :width]  # (c, V)
    else:
        target_z = signal.logits[rows][:, :width]  # (c, V)
    block = max(1, BLOCK_ELEMENTS // width) if z.device.type == "cpu" else z.shape[0]
    for start in range(0, z.shape[0], block):
        part = slice(start, start + block)
        block_z = z[part].to(sums.dtype)  # a copy, or z itself: overwritten either way
        if isinstance(signal, TopKSignal):
            terms = topk_terms(block_z, ids[part], logprobs[part], tail[part], loss, with_grad=with_grad)
        else:
            terms = dense_terms(block_z, target_z[part].to(sums.dtype), loss, with_grad=with_grad)
        if with_grad and terms.grad.data_ptr() != z[part].data_ptr():
            z[part] = terms.grad
        sums += torch.stack((terms.loss.sum(), terms.alpha.sum(), terms.kl.sum()))


@dataclass(frozen=True)
class Terms:
    """Per token: the loss, alpha and KL(target | draft) at temperature 1, and dL/dz if asked for."""

    loss: Tensor  # (c)
    alpha: Tensor  # (c)
    kl: Tensor  # (c)
    grad: Tensor | None  # (c, V)


def topk_terms(
    z: Tensor,  # (c, V) the draft's logits, overwritten
    ids: Tensor,  # (c, k) int64
    logprobs: Tensor,  # (c, k)
    tail_logprob: Tensor,  # (c)
    loss: LossSpec,
    *,
    with_grad: bool = True,
) -> Terms:
    """Loss over k + 1 buckets. Their target probabilities are renormalised: fp16 leaves a sum of 1 +- 5e-4."""
    log_p = torch.cat((logprobs, tail_logprob[:, None]), 1).to(z.dtype).clamp_(min=LOWEST)  # (c, k + 1)
    log_p = log_p.log_softmax(-1)
    z.sub_(z.amax(-1, keepdim=True))
    top_z = z.gather(1, ids).clamp_(min=LOWEST)  # (c, k)
    z.exp_().scatter_(1, ids, 0.0)
    tail = z.sum(-1, keepdim=True)  # (c, 1): summed, never 1 minus the others
    top = top_z.exp()
    total = tail + top.sum(-1, keepdim=True)  # (c, 1)
    log_q = (torch.cat((top_z, tail.log()), 1) - total.log()).clamp_(min=LOWEST)  # (c, k + 1)
    value, alpha, kl, grad = _divergence(log_p, log_q, loss)
    if not with_grad:
        return Terms(value, alpha, kl, None)
    z.mul_(grad[:, -1:] / tail.clamp(min=1e-30))  # the tail's gradient, spread in proportion to q
    z.scatter_(1, ids, grad[:, :-1])
    return Terms(value, alpha, kl, z)


def dense_terms(
    z: Tensor,  # (c, V) the draft's logits, overwritten
    target_z: Tensor,  # (c, V) the target's logits (any normalisation), overwritten
    loss: LossSpec,
    *,
    log_normaliser: Tensor | None = None,  # (c, 1) of the target's full logits, where z covers a part of its ids
    with_grad: bool = True,
) -> Terms:
    """Loss over the whole vocabulary, or over the draft's part of it. -inf on either side is probability 0.

    log_normaliser: then TV, LK and alpha take the target's full probabilities (what is missing counts as rejected) and
    KL those renormalised over the shared ids.
    """
    if loss.name == "forward_kl" and loss.temperature == 1 and log_normaliser is None:
        return _dense_forward_kl(z, target_z, with_grad)
    z, target_z = z.clamp_(min=LOWEST), target_z.clamp_(min=LOWEST)
    temperature = loss.temperature
    assert log_normaliser is None or temperature == 1, "the mass outside of the shared ids is known at 1 only"
    log_q, log_p = (z / temperature).log_softmax(-1), (target_z / temperature).log_softmax(-1)
    full = None if log_normaliser is None else (target_z - log_normaliser).exp()  # (c, Vd)
    value, alpha, kl, grad = _divergence(log_p, log_q, loss, full)
    if temperature != 1:
        grad = grad / temperature
        _, alpha, kl, _ = _divergence(target_z.log_softmax(-1), z.log_softmax(-1), loss)
    return Terms(value, alpha, kl, grad if with_grad else None)


def _dense_forward_kl(z: Tensor, target_z: Tensor, with_grad: bool) -> Terms:
    """The default loss with few passes: everything in place, sums without temporaries."""
    log_p = target_z.clamp_(min=LOWEST).log_softmax(-1)  # (c, V)
    p = torch.exp(log_p, out=target_z)
    z.clamp_(min=LOWEST).sub_(z.amax(-1, keepdim=True))
    cross = torch.linalg.vecdot(p, log_p.sub_(z))  # (c) = sum p (log p - z)
    total = z.exp_().sum(-1, keepdim=True)  # (c, 1)
    grad = z.mul_(total.reciprocal()).sub_(p)  # (c, V) = q - p
    alpha = 1 - torch.linalg.vector_norm(grad, ord=1, dim=-1) / 2  # 1 - TV = sum min(p, q)
    kl = cross + total.log().squeeze(1)
    return Terms(kl, alpha, kl, grad if with_grad else None)


def _divergence(
    log_p: Tensor,  # (c, b) target, normalised, finite
    log_q: Tensor,  # (c, b) draft
    loss: LossSpec,
    full: Tensor | None = None,  # (c, b) target probabilities that need not sum to 1, for alpha, TV and LK
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (c), (c), (c), (c, b)
    """(loss, alpha, KL(p | q), h - q * sum(h)) of distributions over b outcomes, as the module states them."""
    p, q = log_p.exp(), log_q.exp()
    full = p if full is None else full
    alpha = torch.minimum(full, q).sum(-1)  # (c)
    kl = (p * (log_p - log_q)).sum(-1)  # (c)
    scale = loss.temperature**2  # of KL terms only: alpha and TV are probabilities
    if loss.name == "forward_kl" or (loss.name == "jsd" and loss.beta == 0):
        value, h = scale * kl, -scale * p
    elif loss.name == "reverse_kl" or (loss.name == "jsd" and loss.beta == 1):
        log_ratio = log_q - log_p
        value, h = scale * (q * log_ratio).sum(-1), scale * q * (log_ratio + 1)
    elif loss.name == "jsd":
        beta = loss.beta
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        h = scale * (1 - beta) * q * (log_q - log_m)
        value = scale * beta * (p * (log_p - log_m)).sum(-1) + h.sum(-1)
    else:
        h_tv = -q * (q < full)
        if loss.name == "tv":
            value, h = 1 - alpha, h_tv
        elif loss.name == "lk_log":
            safe = alpha.clamp(min=1e-30)
            value, h = -safe.log(), h_tv / safe[:, None]
        else:
            weight = torch.exp(-3 * alpha)  # (c) large while the draft is poor: KL first, then acceptance itself
            value = weight * scale * kl + (1 - weight) * (1 - alpha)
            h = (weight * scale)[:, None] * -p + (1 - weight)[:, None] * h_tv
    return value, alpha, kl, h - q * h.sum(-1, keepdim=True)
