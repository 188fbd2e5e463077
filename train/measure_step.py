"""The draft's training step against a plain transformers + torch loop doing the same work.

Both read the same rows of one length (no padding on either side), learn from the same top-64 signal with its tail, and
end with gradient clipping and fused AdamW. The plain loop is what one would write first: `draft(input_ids).logits`, a
log-softmax over the vocabulary in fp32, autograd.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.signals import SignalSpec
from eval.results import Metric
from models.drafts import gpt2_draft
from train.losses import LossSpec
from train.measure import interleaved_times, median_rate, median_ratio
from train.module import Distiller, OptimSpec, make_optimizer

CLIP, LR = 1.0, 1e-4


def draft_step_vs_plain(
    *,
    precision: str,
    device: torch.device,
    vocab_size: int = 50_257,
    num_rows: int = 4,
    length: int = 512,
    repeats: int = 3,
    **shape: int,
) -> dict[str, Metric]:
    """Speed of one step of ours over that of the plain loop (1.0: equal, above: ours is faster), and both in tokens/s.

    precision: `fp32` or `bf16` (autocast over fp32 weights, both sides). shape: keywords of `gpt2_draft`, by default
    of the 30M draft. `draft_step_loss_difference` is that of the first step's mean loss: the work is the same.
    """
    batch = _random_batch(vocab_size, num_rows=num_rows, length=length, device=device)
    steps, first_losses = {}, {}
    for name, make in (("plain", _plain_step), ("ours", _our_step)):
        draft = gpt2_draft(vocab_size, **shape).to(device).train()
        steps[name] = make(draft, batch, precision)
        first_losses[name] = steps[name]()
    times = interleaved_times(steps, repeats=repeats, device=device)
    tokens = num_rows * length
    return {
        f"draft_step_vs_plain/{precision}": median_ratio(times["plain"], times["ours"]),
        f"draft_step_tokens_per_s/{precision}": median_rate(tokens, times["ours"]),
        f"plain_step_tokens_per_s/{precision}": median_rate(tokens, times["plain"]),
        f"draft_step_loss_difference/{precision}": Metric(abs(first_losses["ours"] - first_losses["plain"])),
    }


def _random_batch(
    vocab_size: int, *, num_rows: int, length: int, device: torch.device, k: int = 64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_tokens = num_rows * length
    first = torch.randint(0, vocab_size, (num_tokens, 1), generator=generator)  # (N, 1)
    ids = (first + torch.arange(k) * (vocab_size // k)) % vocab_size  # (N, k) without repeats
    logprobs = (torch.randn(num_tokens, k + 1, generator=generator) * 2).log_softmax(-1)  # (N, k+1)
    mask = torch.ones(num_rows, length, dtype=torch.bool)  # (B, T)
    mask[:, -1] = False  # the last token of a row has no next one
    batch = {
        "input_ids": torch.randint(0, vocab_size, (num_tokens,), generator=generator),  # (N,)
        "position_ids": torch.arange(length).repeat(num_rows),  # (N,)
        "row_offsets": torch.arange(num_rows + 1, dtype=torch.int32) * length,  # (R+1,)
        "pred_mask": mask.flatten(),  # (N,)
        "topk_ids": ids.int(),
        "topk_logprobs": logprobs[:, :k].half(),
        "tail_logprob": logprobs[:, k],
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _our_step(draft: PreTrainedModel, batch: dict[str, Tensor], precision: str) -> Callable[[], float]:
    """What Lightning calls in a training step, in its order, without Lightning."""
    device = batch["input_ids"].device
    module = Distiller(
        draft,
        vocab_size=draft.config.vocab_size,
        loss=LossSpec("forward_kl"),
        optim=OptimSpec(lr=LR, clip=CLIP),
        signal=SignalSpec("topk", batch["topk_ids"].shape[1]),
        total_steps=1000,
    ).to(device)
    module._trainer = SimpleNamespace(accumulate_grad_batches=1, world_size=1)  # all that the hook asks it
    optimizer = make_optimizer(draft, module.optim)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss_sum = module.training_step(batch, 0)
        loss_sum.backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss_sum.item() / int(module.last_window.sums[3])

    return step


def _plain_step(draft: PreTrainedModel, batch: dict[str, Tensor], precision: str) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=LR, fused=True)
    num_rows = len(batch["row_offsets"]) - 1
    input_ids = batch["input_ids"].view(num_rows, -1)  # (B, T)
    ids = batch["topk_ids"].long().view(*input_ids.shape, -1)  # (B, T, k)
    target = torch.cat([batch["topk_logprobs"].float(), batch["tail_logprob"][:, None]], 1).log_softmax(-1)
    target = target.view(*input_ids.shape, -1)  # (B, T, k+1)
    mask = batch["pred_mask"].view_as(input_ids)  # (B, T)

    def step() -> float:
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = draft(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
        log_q = logits.float().log_softmax(-1)  # (B, T, V)
        top = log_q.gather(-1, ids)  # (B, T, k)
        tail = torch.log1p(-top.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))  # (B, T, 1)
        kl = (target.exp() * (target - torch.cat([top, tail], -1))).sum(-1)  # (B, T)
        loss = kl[mask].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
