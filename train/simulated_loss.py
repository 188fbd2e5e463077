"""Distillation loss of all simulated steps of an EAGLE-3 head, or of all Medusa heads, head and loss fused.

Several (slot, step) pairs predict the same token: x[t+1] is what slot p predicts at step t-1-p. So the pairs lie on a
grid of positions t and steps s, and the target's distribution is computed once a position:
1. a chunk of positions: the target's logits over the draft vocabulary, and the draft's for every step
2. in blocks that stay in the processor's cache: fp32 softmax, loss, closed-form gradient over the draft's logits
3. the two products that carry it back to the outputs and to the draft's head
Pairs that do not count stand on the grid with weight 0.

KL compares with the target renormalised over the draft vocabulary; alpha, TV and LK with its full probabilities, so
that mass outside of the draft vocabulary counts as rejected (train/losses.py has the formulas).

Medusa head k stands for step k-1: the same slots, the same targets, but each step has a vocabulary head of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.simulation import Layout
from train.losses import BLOCK_ELEMENTS, LossSpec, dense_terms


@dataclass(frozen=True)
class StepSums:
    """Sums over the counted pairs of each step; alpha, kl and hits only where metrics were asked for."""

    counts: Tensor  # (S,)
    loss: Tensor  # (S,)
    alpha: Tensor | None  # (S,) sum_v min(target_v, draft_v) over the full vocabulary
    kl: Tensor | None  # (S,) over the draft vocabulary
    hits: Tensor | None  # (S,) the draft's best token is the row's next token


@dataclass(frozen=True)
class Grid:
    """positions (m,): target position t of each row of the grid; pairs (m, S): index into the (S * n) outputs, S * n
    where the pair does not count; steps count from 0."""

    positions: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, layout: Layout) -> "Grid":
        steps, num_slots, device = layout.steps, len(layout.slots), layout.slots.device
        step = torch.arange(steps, device=device)[:, None]  # (S, 1)
        target = layout.slots + 1 + step  # (S, n)
        counted = layout.num_steps > step  # (S, n)
        positions = torch.unique(target[counted])  # (m,)
        pairs = torch.full((len(positions), steps), steps * num_slots, device=device)
        index = step * num_slots + torch.arange(num_slots, device=device)  # (S, n)
        place = torch.searchsorted(positions, target[counted])
        pairs[place, step.expand_as(counted)[counted]] = index[counted]
        return cls(positions, pairs)


def simulated_loss(
    outputs: Tensor,  # (S, n, D) normed, in the compute dtype
    head_weight: Tensor,  # (Vd, D); (S, Vd, D) where each step has its own
    layout: Layout,
    input_ids: Tensor,  # (N,)
    final_hidden: Tensor,  # (N, D) of the target, post-norm
    logsumexp: Tensor,  # (N,) of the target's full logits
    target_rows: Callable[[Tensor], Tensor],  # (m, D) -> (m, Vd) the target's logits on the draft vocabulary
    draft_vocab: Tensor,  # (Vd,) target ids
    *,
    loss: LossSpec,
    step_weights: Tensor,  # (S,) factor of each step's sum in the loss
    with_grad: bool,
    train_head: bool,
    metrics: bool,
) -> tuple[StepSums, Tensor | None, Tensor | None]:
    """(sums by step, gradient of the outputs (S, n, D), gradient of the head, as tall as it is, in fp32)."""
    steps, num_slots, size = outputs.shape
    dtype, wide = outputs.dtype, torch.promote_types(outputs.dtype, torch.float32)
    grid = Grid.of(layout)
    flat = torch.cat((outputs.flatten(0, 1), outputs.new_zeros(1, size)))  # (S * n + 1, D)
    head = head_weight.to(dtype)
    width = head.shape[-2]
    grad_flat = torch.zeros_like(flat) if with_grad else None
    grad_head: Tensor | None = None
    sums = {name: torch.zeros(steps, dtype=wide, device=flat.device) for name in ("loss", "alpha", "kl", "hits")}
    is_pair = (grid.pairs < steps * num_slots).to(wide)  # (m, S)
    weights = (is_pair * step_weights.to(wide)).to(dtype)  # (m, S)
    chunk = max(1, loss.chunk_mb * 2**20 // (width * flat.element_size() * (steps + 1)))
    is_cpu = flat.device.type == "cpu"
    block = max(1, BLOCK_ELEMENTS // (4 * width * steps)) if is_cpu else chunk
    for start in range(0, len(grid.positions), chunk):
        part = slice(start, start + chunk)
        positions, pairs = grid.positions[part], grid.pairs[part]
        target_z = target_rows(final_hidden[positions])  # (c, Vd)
        normalisers = logsumexp[positions].to(wide)  # (c,)
        nexts = input_ids[positions + 1]  # (c,)
        x = flat[pairs.flatten()]  # (c * S, D)
        z = _times(x, head.mT).view(len(positions), steps, width)  # (c, S, Vd), its gradient later
        for first in range(0, len(positions), block):
            b = slice(first, first + block)
            terms = _block(z[b], target_z[b].to(wide), normalisers[b], loss, with_grad=with_grad, metrics=metrics)
            real = is_pair[part][b]  # (b, S)
            if metrics:
                hits = draft_vocab[terms["best"]] == nexts[b, None]
                terms["hits"] = hits.to(wide)
            for name in sums.keys() & terms.keys():
                sums[name] += (terms[name] * real).sum(0)
        if not with_grad:
            continue
        z = z.view(-1, width)
        scale = weights[part].reshape(-1, 1)  # (c * S, 1)
        grad_flat[pairs.flatten()] = _times(z, head).mul_(scale)
        if train_head:
            product = _outer(z, x.mul_(scale), head)  # (Vd, D) or (S, Vd, D)
            grad_head = product.to(wide) if grad_head is None else grad_head.add_(product)
    grad_outputs = grad_flat[:-1].view(steps, num_slots, size) if with_grad else None
    return (
        StepSums(layout.counts(), sums["loss"], *(sums[name] if metrics else None for name in ("alpha", "kl", "hits"))),
        grad_outputs,
        grad_head,
    )


def _times(x: Tensor, matrix: Tensor) -> Tensor:  # (c * S, I), (I, O) or (S, I, O) -> (c * S, O)
    """x @ matrix; of several matrices each row takes that of its step."""
    if matrix.dim() == 2:
        return x @ matrix
    x = x.unflatten(0, (-1, len(matrix)))  # (c, S, I)
    return torch.stack([x[:, step] @ each for step, each in enumerate(matrix)], dim=1).flatten(0, 1)


def _outer(z: Tensor, x: Tensor, head: Tensor) -> Tensor:  # (c * S, Vd), (c * S, D) -> as the head
    """z.T @ x, for each step by itself where the head has several matrices."""
    if head.dim() == 2:
        return z.T @ x
    z, x = (each.unflatten(0, (-1, len(head))) for each in (z, x))  # (c, S, Vd), (c, S, D)
    return torch.stack([z[:, step].T @ x[:, step] for step in range(len(head))])


def _block(
    z: Tensor,  # (b, S, Vd) the draft's logits; dL/dz on return
    target_z: Tensor,  # (b, Vd) the target's logits over the draft vocabulary
    normalisers: Tensor,  # (b,) logsumexp of the target's full logits
    loss: LossSpec,
    *,
    with_grad: bool,
    metrics: bool,
) -> dict[str, Tensor]:  # (b, S) each: loss, and with metrics alpha, kl, best (index of the draft's best token)
    terms: dict[str, Tensor] = {}
    if metrics:
        terms["best"] = z.argmax(-1)
    if loss.name == "forward_kl" and loss.temperature == 1:
        log_p = torch.log_softmax(target_z, -1)  # (b, Vd)
        p = log_p.exp()
        entropy = -torch.linalg.vecdot(p, log_p)  # (b,)
        log_q = torch.log_softmax(z.to(target_z.dtype), -1)  # (b, S, Vd)
        terms["loss"] = -entropy[:, None] - (log_q @ p[..., None]).squeeze(-1)
        if metrics:
            terms["kl"] = terms["loss"]
            full = torch.exp(target_z - normalisers[:, None])[:, None]  # (b, 1, Vd)
            terms["alpha"] = torch.minimum(log_q.exp(), full).sum(-1)
        if with_grad:
            z.copy_(log_q.exp_().sub_(p[:, None]))
        return terms
    rows = z.shape[:2]
    target_rows = target_z[:, None].expand(*rows, -1).reshape(-1, z.shape[-1]).clone()  # (b * S, Vd)
    full = normalisers[:, None].expand(rows).reshape(-1, 1)
    dense = dense_terms(z.flatten(0, 1).to(target_z.dtype), target_rows, loss, log_normaliser=full, with_grad=with_grad)
    terms["loss"] = dense.loss.view(rows)
    if metrics:
        terms["alpha"], terms["kl"] = dense.alpha.view(rows), dense.kl.view(rows)
    if with_grad:
        z.copy_(dense.grad.view(z.shape))
    return terms
