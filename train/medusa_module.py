"""The Lightning wiring of Medusa heads (arXiv:2401.10774, section 2.2): all heads at every slot of a packed batch.

Slot p reads f[p]; head k predicts x[p+1+k] and is compared with what the target says there, from f[p+k].
It counts where x[p+1] .. x[p+1+k] are all supervised and in p's row: what the decode loop drafts, in which x[p+1] is
the target's own. loss = sum over heads k of decay^(k-1) * mean over the slots that count, over the whole optimiser
step. These are the slots and targets of an EAGLE-3 head's simulated steps (models/simulation.py): the loss is theirs.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from data.datamodule import Batch
from data.signals import SignalSpec
from models.medusa import MedusaHeads
from models.simulation import simulation_layout
from train.eagle_module import GradientsInForward, SimulatedBatch, StepTotals
from train.module import Distiller
from train.simulated_loss import StepSums, simulated_loss


class MedusaDistiller(Distiller):
    """Trains Medusa heads. val/alpha and train/alpha are those of head 1, alpha_step1 of head 2, and so on.

    decay: weight of head k is decay^(k-1).
    metrics_every: optimiser steps between two whose alpha, KL and hits are measured too; 0: never.
    """

    draft: MedusaHeads

    def __init__(
        self,
        draft: MedusaHeads,
        *,
        signal: SignalSpec,
        decay: float = 0.8,
        metrics_every: int = 10,
        **wiring: Any,
    ):
        assert signal.signal == "hidden"
        super().__init__(draft, signal=signal, **wiring)
        self.metrics_every = metrics_every
        weights = decay ** torch.arange(draft.config.num_heads, dtype=torch.float64)
        self.register_buffer("head_weights", weights, persistent=False)

    def zero_sums(self) -> StepTotals:
        return StepTotals.zero(self.head_weights)

    def distill(self, batch: Batch, spec: SignalSpec) -> SimulatedBatch:
        batch = self.with_columns(batch, spec)
        with_grad = torch.is_grad_enabled()
        supervised = torch.zeros_like(batch["pred_mask"])
        supervised[1:] = batch["pred_mask"][:-1]
        layout = simulation_layout(supervised, batch["row_offsets"], len(self.head_weights))
        weights = self.head_weights / batch.get("window_counts", layout.counts()).clamp(min=1)  # (K,)
        trained = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        if not len(layout.slots):
            zero = torch.zeros(layout.steps, device=self.device)
            sums, loss = StepSums(layout.counts(), zero, zero, zero, zero), zero.sum()
            if with_grad:
                loss = GradientsInForward.apply(loss, [torch.zeros_like(p) for p in trained], *trained)
            return SimulatedBatch(loss, sums)
        states = self.draft(batch["final_hidden"][layout.slots]).to(self.compute_dtype)  # (K, n, D)
        heads = [lm_head.weight for lm_head in self.draft.lm_heads]
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            sums, grad_states, grad_heads = simulated_loss(
                states.detach(),
                torch.stack([head.to(states.dtype) for head in heads]),
                layout,
                batch["input_ids"],
                batch["final_hidden"].to(self.target.dtype),
                batch["logsumexp"],
                self.target_rows,
                self.draft.draft_vocab,
                loss=self.loss,
                step_weights=weights,
                with_grad=with_grad,
                train_head=True,
                metrics=not with_grad or self._wants_metrics(),
            )
            loss = (sums.loss.double() * weights).sum().float()
        if with_grad:
            grads = [grad_states, *(grad.to(head.dtype) for grad, head in zip(grad_heads, heads))]
            loss = GradientsInForward.apply(loss, grads, states, *heads)
        return SimulatedBatch(loss, sums)

    @property
    def compute_dtype(self) -> torch.dtype:
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.draft.dtype

    @cached_property
    def target_rows(self) -> Callable[[Tensor], Tensor]:  # (m, D) -> (m, Vd)
        """The target's head on the draft vocabulary, gathered once."""
        return self.target.head_rows(self.draft.draft_vocab)

    def _wants_metrics(self) -> bool:
        if not self.metrics_every:
            return False
        step = self.trainer.global_step + 1
        return step % self.metrics_every == 0 or step in (1, self.total_steps)
