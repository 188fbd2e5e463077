"""The Lightning wiring of EAGLE heads: what differs from a draft model's is the loss of one packed batch.

EAGLE-3: all simulated steps at once (models/simulation.py), loss = sum over steps s of decay^s * mean over the slots
that count at s. The means are over the whole optimiser step (all micro-batches, all ranks): the data module says
beforehand how many slots those are.

EAGLE-1 (arXiv:2401.15077, section 4.1): teacher-forced, no simulation; SmoothL1 between the head's output and the
target's next final state + 0.1 * the distillation loss through the target's frozen head; noise on what it reads.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.datamodule import Batch
from data.signals import SignalSpec
from models.drafts import padded_layout
from models.eagle import EagleHead
from models.simulation import Simulation, simulation_layout, trained_weights
from models.target import Target
from train.losses import DistillLoss, HiddenSignal, LossSpec, distill_loss
from train.module import Distiller, OptimSpec
from train.simulated_loss import StepSums, simulated_loss


@dataclass(frozen=True)
class SimulatedBatch:
    """`loss_sum` is this batch's share of the window's loss; it alone carries gradients."""

    loss_sum: Tensor  # ()
    sums: StepSums


@dataclass
class StepTotals:
    """Sums by step, added up over batches and then over ranks."""

    sums: Tensor  # (5, S) fp64: counted slots, loss, alpha, KL, hits
    step_weights: Tensor  # (S,)
    has_metrics: bool = True

    @classmethod
    def zero(cls, step_weights: Tensor) -> "StepTotals":
        return cls(torch.zeros(5, len(step_weights), dtype=torch.float64, device=step_weights.device), step_weights)

    def add(self, out: SimulatedBatch) -> None:
        self.has_metrics &= out.sums.alpha is not None
        for row, values in enumerate((out.sums.counts, out.sums.loss, out.sums.alpha, out.sums.kl, out.sums.hits)):
            if values is not None:
                self.sums[row] += values

    def all_reduce(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sums)

    def gradient_divisor(self) -> Tensor:
        return torch.ones((), dtype=torch.float64, device=self.sums.device)  # the loss is a mean already

    def means(self) -> dict[str, float]:
        """loss; alpha and kl of step 0, and by step; `hits`: the draft's best token is the row's next one."""
        counts = self.sums[0].clamp(min=1)
        loss, alpha, kl, hits = (self.sums[1:] / counts).unbind()
        means = {"loss": float((loss * self.step_weights).sum())}
        if not self.has_metrics:
            return means
        means |= {"alpha": float(alpha[0]), "kl": float(kl[0]), "hits": float(hits[0])}
        for step in range(1, len(counts)):
            means |= {f"alpha_step{step}": float(alpha[step]), f"hits_step{step}": float(hits[step])}
        return means


class GradientsInForward(torch.autograd.Function):
    """A loss whose gradients were computed along with it: backward only hands them over, scaled."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return None, None, *(g if bool(grad_loss == 1) else g.mul_(grad_loss) for g in grads)


class Eagle3Distiller(Distiller):
    """Trains an EAGLE-3 head by test-time simulation.

    steps: simulated steps S. decay: weight of step s is decay^s.
    metrics_every: optimiser steps between two whose alpha, KL and hits are measured too; 0: never.
    """

    draft: EagleHead

    def __init__(
        self,
        draft: EagleHead,
        *,
        vocab_size: int,
        loss: LossSpec,
        optim: OptimSpec,
        signal: SignalSpec,
        total_steps: int,
        target: Target,
        steps: int = 7,
        decay: float = 0.8,
        metrics_every: int = 10,
    ):
        assert signal.signal == "hidden" and signal.tap_ids is not None
        super().__init__(
            draft, vocab_size=vocab_size, loss=loss, optim=optim, signal=signal, total_steps=total_steps, target=target
        )
        self.steps, self.metrics_every = steps, metrics_every
        self.register_buffer("step_weights", decay ** torch.arange(steps, dtype=torch.float64), persistent=False)
        self._target_rows: Any = None

    @property
    def compute_dtype(self) -> torch.dtype:
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.draft.dtype

    def zero_sums(self) -> StepTotals:
        return StepTotals.zero(self.step_weights)

    def distill(self, batch: Batch, spec: SignalSpec) -> SimulatedBatch:
        batch = self.with_columns(batch, spec)
        dtype = self.compute_dtype
        with_grad = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            supervised = torch.zeros_like(batch["pred_mask"])
            supervised[1:] = batch["pred_mask"][:-1]  # tokens with one before them in their row; none if it counts not
            layout = simulation_layout(supervised, batch["row_offsets"], self.steps)
            window_counts = batch.get("window_counts", layout.counts()).clamp(min=1)
            step_weights = self.step_weights / window_counts
            if not len(layout.slots):
                zero = torch.zeros(self.steps, device=self.device)
                sums, grads = StepSums(layout.counts(), zero, zero, zero, zero), None
            else:
                simulation = Simulation(self.draft, layout, dtype=dtype)
                outputs = simulation.forward(batch["input_ids"], batch["taps"], keep=with_grad)  # (S, n, D)
                sums, grad_outputs, grad_head = simulated_loss(
                    outputs,
                    self.draft.lm_head.weight,
                    layout,
                    batch["input_ids"],
                    batch["final_hidden"].to(self.target.dtype),
                    batch["logsumexp"],
                    self.target_rows(),
                    self.draft.draft_vocab,
                    loss=self.loss,
                    step_weights=step_weights,
                    with_grad=with_grad,
                    train_head=self.draft.lm_head.weight.requires_grad,
                    metrics=not with_grad or self._wants_metrics(),
                )
                grads = simulation.backward(grad_outputs) if with_grad else None
                if grad_head is not None:
                    grads["lm_head"] = grad_head
            loss = (sums.loss.double() * step_weights).sum().float()
        if with_grad:
            weights = trained_weights(self.draft)
            if self.draft.lm_head.weight.requires_grad:
                weights["lm_head"] = self.draft.lm_head.weight
            if grads is None:
                grads = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            loss = GradientsInForward.apply(
                loss, [grads[name].to(w.dtype) for name, w in weights.items()], *weights.values()
            )
        return SimulatedBatch(loss, sums)

    def target_rows(self) -> Any:
        """The target's head on the draft vocabulary, gathered once."""
        if self._target_rows is None:
            self._target_rows = self.target.head_rows(self.draft.draft_vocab)
        return self._target_rows

    def _wants_metrics(self) -> bool:
        if not self.metrics_every:
            return False
        step = self.trainer.global_step + 1
        return step % self.metrics_every == 0 or step in (1, self.total_steps)


NOISE, NOISE_LENGTH = 0.1, 512  # uniform in +-0.1 * 512 / (tokens of the row)
LOGITS_SHARE = 0.1


class Eagle1Distiller(Distiller):
    """Trains an EAGLE-1 head. Slot p reads f[p] and x[p+1]; its output should be f[p+1], which says x[p+2]."""

    draft: EagleHead

    def __init__(self, draft: EagleHead, *, signal: SignalSpec, target: Target, **wiring: Any):
        assert signal.signal == "hidden"
        super().__init__(draft, signal=signal, target=target, **wiring)
        self._head_weight: Tensor | None = None

    def distill(self, batch: Batch, spec: SignalSpec) -> DistillLoss:
        batch = self.with_columns(batch, spec)
        pred_mask, offsets = batch["pred_mask"], batch["row_offsets"]
        is_slot = torch.zeros_like(pred_mask)
        is_slot[:-1] = pred_mask[:-1] & pred_mask[1:]  # x[p+1] and x[p+2] are supervised and in p's row
        features = batch["final_hidden"].float()  # (N, D)
        inputs = features
        if torch.is_grad_enabled():
            lengths = offsets.diff()
            per_row = 2 * NOISE * NOISE_LENGTH / lengths.repeat_interleave(lengths)  # (N,)
            uniform = torch.rand(features.shape, generator=self._generator(batch), device=features.device)
            inputs = features + (uniform - 0.5) * per_row[:, None]
        following = batch["input_ids"].roll(-1)  # (N,) x[p+1]; a row's last slot does not count
        out = packed_outputs(self.draft, following, inputs, batch["position_ids"], offsets)  # (N, D)
        nexts = features.roll(-1, dims=0)  # (N, D) f[p+1]
        through_head = distill_loss(
            out,
            self.head_weight(),
            HiddenSignal(nexts.to(self.target.dtype), self.target.logits),
            is_slot,
            loss=self.loss,
            vocab_size=self.vocab_size,
        )
        regression = nn.functional.smooth_l1_loss(out[is_slot].float(), nexts[is_slot], reduction="none").mean(-1).sum()
        return replace(through_head, loss_sum=regression + LOGITS_SHARE * through_head.loss_sum)

    def head_weight(self) -> Tensor:  # (rows, D)
        """The target's head, fetched once where a target that is spread over GPUs has it elsewhere."""
        if self._head_weight is None:
            self._head_weight = self.target.model.get_output_embeddings().weight.detach().to(self.device)
        return self._head_weight

    def _generator(self, batch: Batch) -> torch.Generator:
        """Noise is a function of step and rows: a resumed run draws what an uninterrupted one did."""
        step = 0 if self._trainer is None else self.trainer.global_step
        return torch.Generator(self.device).manual_seed(hash((step, int(batch["row_ids"][0]))) % 2**63)


def packed_outputs(
    head: EagleHead,
    following: Tensor,  # (N,) the token behind each slot
    features: Tensor,  # (N, D)
    position_ids: Tensor,  # (N,)
    row_offsets: Tensor,  # (R+1,)
) -> Tensor:  # (N, D)
    """The head's outputs on packed rows, each row by itself: rows of similar length become padded batches."""
    layout = padded_layout(row_offsets, features.device)
    columns = (following, features, position_ids)
    if layout.packed is not None:
        padded = [x.new_zeros((layout.num_padded, *x.shape[1:])) for x in columns]
        columns = [new.index_copy(0, layout.padded, x[layout.packed]) for new, x in zip(padded, columns)]
    outputs, start = [], 0
    for rows, length in layout.shapes:
        batch = [x[start : start + rows * length].unflatten(0, (rows, length)) for x in columns]
        outputs.append(head(*batch).flatten(0, 1))  # (B, T, D) -> (B * T, D)
        start += rows * length
    out = torch.cat(outputs)
    if layout.packed is None:
        return out
    return torch.zeros_like(features, dtype=out.dtype).index_copy(0, layout.packed, out[layout.padded])
