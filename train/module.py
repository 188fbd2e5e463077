"""The Lightning wiring of distillation: packed batch -> draft -> loss; token means; AdamW with its schedule.

Every training step returns a *sum* over its supervised tokens. Just before the optimiser's step the gradients are
divided by the tokens of the whole window (all micro-batches, all ranks): the loss is a mean over tokens, however they
were split.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from data.datamodule import Batch
from data.signals import SignalSpec, split_specs, target_columns
from models.drafts import packed_hidden
from models.eagle import EagleHead
from models.errors import UserError
from models.target import Target
from train.losses import DistillLoss, HiddenSignal, LossSpec, Signal, TopKSignal, distill_loss

NOT_DECAYED = ("embed", "wte", "wpe", "lm_head")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
WSD_DECAY = 0.3  # share of the steps after warm-up in which `wsd` goes down


@dataclass(frozen=True)
class OptimSpec:
    """AdamW, warm-up, decay, clipping. Units: lr a step; fractions of all optimiser steps, and of lr.

    muon_lr: if given, the blocks' matrices are trained by Muon at this rate instead (Jordan et al. 2024; scaled to the
    size of AdamW's steps, arXiv:2502.16982), and AdamW at `lr` keeps gains, embeddings and heads.
    """

    lr: float = 1e-3
    muon_lr: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_fraction: float = 0.05
    schedule: str = "cosine"
    final_lr_fraction: float = 0.1
    clip: float | None = 1.0
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "warmup_fraction", "final_lr_fraction", "clip", "ema_decay",
                     "muon_lr"):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("clip", "ema_decay", "muon_lr"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise UserError(f"optim.{name}={value}: must be a number of at least 0")
        if not self.lr > 0:
            raise UserError(f"optim.lr={self.lr}: must be above 0")
        if not self.warmup_fraction < 1:
            raise UserError(f"optim.warmup_fraction={self.warmup_fraction}: must be below 1, a share of the steps")
        if self.ema_decay is not None and not self.ema_decay < 1:
            raise UserError(f"optim.ema_decay={self.ema_decay}: must be below 1, or null for no average")
        if self.schedule not in SCHEDULES:
            raise UserError(f"optim.schedule={self.schedule}: unknown; use one of {', '.join(SCHEDULES)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas={list(self.betas)}: two numbers of at least 0 and below 1")
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Share of lr at optimiser step `step` (0 the first): linear warm-up, then decay to final_lr_fraction."""
        warmup = round(self.warmup_fraction * total_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        shape["wsd"] = min(1.0, (1 - progress) / WSD_DECAY)
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * shape[self.schedule]


@dataclass
class TokenSums:
    """Loss, alpha, KL and supervised tokens, added up over batches and then over ranks."""

    sums: Tensor  # (4) fp64: loss, alpha, KL, tokens

    @classmethod
    def zero(cls, device: torch.device) -> "TokenSums":
        return cls(torch.zeros(4, dtype=torch.float64, device=device))

    def add(self, out: DistillLoss) -> None:
        self.sums[:3] += torch.stack((out.loss_sum.detach(), out.alpha_sum, out.kl_sum))
        self.sums[3] += out.num_tokens

    def all_reduce(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sums)

    def means(self) -> dict[str, float]:
        loss, alpha, kl, tokens = self.sums.tolist()
        return {name: value / max(tokens, 1) for name, value in (("loss", loss), ("alpha", alpha), ("kl", kl))}

    def gradient_divisor(self) -> Tensor:  # ()
        """What turns the gradients of the window's sum into those of its mean."""
        return self.sums[3].clamp(min=1)


class Distiller(LightningModule):
    """Trains `draft` on what the target says, from cached columns or from the target itself.

    target: needed for validation and for signal `hidden` (its frozen head), and for batches without columns
    (cache.mode=none). It is no submodule: not in the optimiser, not in checkpoints, never in train mode.
    signal: of the training batches; validation has the whole distribution (data/signals.py, split_specs).
    total_steps: optimiser steps of the whole run, the clock of the schedule.
    """

    def __init__(
        self,
        draft: PreTrainedModel | EagleHead,
        *,
        vocab_size: int,
        loss: LossSpec,
        optim: OptimSpec,
        signal: SignalSpec,
        total_steps: int,
        target: Target | None = None,
    ):
        super().__init__()
        if loss.temperature != 1 and signal.signal == "topk":
            raise UserError(f"loss.temperature={loss.temperature}: needs the whole distribution, set cache=hidden")
        assert target is not None or signal.signal == "topk"
        self.draft = draft.train()
        self.__dict__["target"] = target
        self.vocab_size, self.loss, self.optim, self.specs = vocab_size, loss, optim, split_specs(signal)
        self.total_steps = total_steps
        self.window: TokenSums | None = None  # of the optimiser step under way
        self.last_window: TokenSums | None = None  # of the last one done, over all ranks
        self.validation: TokenSums | None = None
        self.grad_norm: Tensor | None = None

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device
        spread = self.target is not None and getattr(self.target.model, "hf_device_map", None)
        if self.target is not None and not spread and self.target.device != device:
            self.target.to(device)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Raises UserError when the checkpoint holds a draft of another shape."""
        shapes = [
            {k: tuple(v.shape) for k, v in state.items()} for state in (checkpoint["state_dict"], self.state_dict())
        ]
        differing = sorted(k for k in shapes[0].keys() | shapes[1].keys() if shapes[0].get(k) != shapes[1].get(k))
        if differing:
            before, now = (shape.get(differing[0], "no such weight") for shape in shapes)
            raise UserError(
                f"resume: the checkpoint holds another draft ({differing[0]} is {before} there and {now} in this one); "
                "set the draft's keys back, or start afresh with another run=NAME"
            )

    def distill(self, batch: Batch, spec: SignalSpec) -> DistillLoss:
        """Loss sums of one packed batch; spec says which columns it holds, or should hold."""
        hidden = packed_hidden(self.draft, batch["input_ids"], batch["position_ids"], batch["row_offsets"])  # (N, Dd)
        return distill_loss(
            hidden,
            self.draft.get_output_embeddings().weight,
            self._signal(batch, spec),
            batch["pred_mask"],
            loss=self.loss,
            vocab_size=self.vocab_size,
        )

    def _signal(self, batch: Batch, spec: SignalSpec) -> Signal:
        batch = self.with_columns(batch, spec)
        if spec.signal == "topk":
            return TopKSignal(batch["topk_ids"], batch["topk_logprobs"], batch["tail_logprob"])
        return HiddenSignal(batch["final_hidden"].to(self.target.dtype), self.target.logits)

    def with_columns(self, batch: Batch, spec: SignalSpec) -> Batch:
        """The batch with the signal's columns: from the cache, or from the target now."""
        if ("topk_ids" if spec.signal == "topk" else "final_hidden") in batch:
            return batch
        assert self.target is not None, "batches without columns need the target"
        with torch.autocast(self.device.type, enabled=False):
            return {**batch, **target_columns(self.target, batch["input_ids"], batch["row_offsets"], spec)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # ()
        out = self.distill(batch, self.specs["train"])
        if self.window is None:
            self.window = self.zero_sums()
        self.window.add(out)
        return out.loss_sum

    def zero_sums(self) -> TokenSums:
        return TokenSums.zero(self.device)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of a sum -> of the mean over the window's tokens, clipped; one pass over them for both.

        Lightning divides each loss by accumulate_grad_batches and DDP averages over ranks: both are undone here.
        """
        self.window.all_reduce()
        self.last_window, self.window = self.window, None
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size
        scale = (factor / self.last_window.gradient_divisor()).float()
        self.grad_norm = scale * nn.utils.get_total_norm(grads)
        if self.optim.clip:
            scale = scale * (self.optim.clip / (self.grad_norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale)

    def on_validation_epoch_start(self) -> None:
        self.validation = self.zero_sums()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation.add(self.distill(batch, self.specs["held_out"]))

    def on_validation_epoch_end(self) -> None:
        self.validation.all_reduce()

    def configure_optimizers(self) -> dict:
        optimizer = make_optimizer(self.draft, self.optim)
        schedule = LambdaLR(optimizer, lambda step: self.optim.lr_factor(step, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_optimizer(draft: nn.Module, optim: OptimSpec) -> Optimizer:
    """AdamW over the draft, or Muon over its blocks' matrices beside it.

    Weight decay only on the blocks' matrices: a gain or a bias has no scale to shrink, and an embedding row of a rare
    token gets decay at every step but a gradient at few. AdamW is fused: one kernel a step, on a CPU too.
    """
    matrices, others = [], []
    for name, parameter in draft.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() >= 2 and not any(part in name for part in NOT_DECAYED)
        (matrices if is_matrix else others).append(parameter)
    decayed = {"params": matrices, "weight_decay": optim.weight_decay}
    plain = {"params": others, "weight_decay": 0.0}
    if optim.muon_lr is None:
        return AdamW([decayed, plain], lr=optim.lr, betas=optim.betas, fused=True)
    return MuonAndAdamW(
        Muon([decayed], lr=optim.muon_lr, adjust_lr_fn="match_rms_adamw"),
        AdamW([plain], lr=optim.lr, betas=optim.betas, fused=True),
    )


class MuonAndAdamW(Optimizer):
    """Two optimisers over disjoint parameters, as one for schedules, checkpoints and Lightning."""

    def __init__(self, muon: Muon, adamw: AdamW):
        self.parts = (muon, adamw)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part, groups in zip(self.parts, ([0], [1])):
            part.param_groups = [self.param_groups[i] for i in groups]  # one list of groups: a schedule sets both
            part.state = self.state

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for part, group in zip(self.parts, self.param_groups):
            part.param_groups, part.state = [group], self.state
