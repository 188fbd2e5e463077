"""The checks of EAGLE heads and trees on one device, called by train/gpu_check.py.

1. the simulated steps and their gradients on the device against those on the CPU
2. greedy decoding with a head's chain and trees, and with a draft model's trees, against plain decoding (fp32)
3. seconds of a training step (bf16)
"""

import numpy as np
import torch
from torch import nn

from data.signals import SignalSpec, target_columns
from eval.loop import speculative_decode
from eval.results import Metric
from models.eagle import EagleHead, build_eagle
from models.simulation import Simulation, simulation_layout
from models.target import Target
from train.eagle_module import Eagle3Distiller
from train.losses import LossSpec
from train.measure import interleaved_times, median_rate, random_rows
from train.module import OptimSpec

METHODS = ("chain_k4", "static_3x2x1", "dynamic_d4_k4_n12")


def tapped_blocks(num_blocks: int) -> list[int]:
    return [2, num_blocks // 2, num_blocks - 3] if num_blocks >= 7 else [0, num_blocks // 2, num_blocks - 1]


def untrained_head(target: Target) -> EagleHead:
    head = build_eagle(target=target, draft_vocab_size=min(8192, target.vocab_size // 2))
    return head.to(target.device)


def check_simulation(target: Target, head: EagleHead, *, num_rows: int = 3, length: int = 64) -> dict[str, Metric]:
    """Largest relative difference to the CPU, of the outputs of all steps and of the weights' gradients, in fp32."""
    rows = random_rows(target.vocab_size, num_rows=num_rows, length=length, seed=5)
    input_ids, offsets = torch.from_numpy(rows.input_ids.astype(np.int64)), torch.from_numpy(rows.row_offsets)
    taps = target_columns(target, input_ids, offsets, SignalSpec("hidden", tap_ids=target.tap_ids))["taps"].cpu()
    results = []
    for device in (torch.device("cpu"), target.device):
        head.to(device)
        layout = simulation_layout(torch.ones(len(input_ids), dtype=torch.bool, device=device), offsets, 7)
        simulation = Simulation(head, layout, dtype=torch.float32)
        with torch.no_grad():
            outputs = simulation.forward(input_ids.to(device), taps.to(device), keep=True)
            counted = layout.num_steps > torch.arange(7, device=device)[:, None]  # (S, n)
            grads = simulation.backward(outputs * counted[..., None])
        results.append([(outputs * counted[..., None]).cpu(), *(g.cpu() for g in grads.values())])
    differences = [((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*results)]
    return {
        "head/output_difference_to_cpu": Metric(differences[0]),
        "head/gradient_difference_to_cpu": Metric(max(differences[1:])),
    }


def check_trees(
    target: Target, head: EagleHead, draft: nn.Module, *, num_prompts: int = 4, num_tokens: int = 32
) -> dict[str, Metric]:
    """How many greedy texts of chains and trees differ from plain ones."""
    prompts = random_rows(target.vocab_size, num_rows=num_prompts, length=48, seed=6)
    options = {"max_new_tokens": num_tokens, "eos_token_ids": ()}
    different = 0
    for i in range(num_prompts):
        prompt = torch.from_numpy(prompts.row(i)[0].astype(np.int64))
        plain = speculative_decode(target, None, prompt, **options).token_ids
        for method in METHODS:
            for model in (head, draft, target.model):
                result = speculative_decode(target, model, prompt, method=method, **options)
                different += result.token_ids != plain
    return {"trees/different_outputs": Metric(different, n=num_prompts * len(METHODS) * 3)}


def head_step_speed(target: Target, *, num_rows: int = 16, length: int = 512) -> dict[str, Metric]:
    """Tokens a second of forward and backward, 7 steps, bf16, every position supervised."""
    head = untrained_head(target).train()
    wiring = {"vocab_size": target.vocab_size, "loss": LossSpec(), "optim": OptimSpec(), "total_steps": 1}
    spec = SignalSpec("hidden", tap_ids=target.tap_ids)
    module = Eagle3Distiller(head, **wiring, signal=spec, target=target, metrics_every=0).to(target.device)
    rows = random_rows(target.vocab_size, num_rows=num_rows, length=length, seed=7)
    input_ids, offsets = torch.from_numpy(rows.input_ids.astype(np.int64)), torch.from_numpy(rows.row_offsets)
    pred_mask = torch.ones(len(input_ids), dtype=torch.bool)
    pred_mask[offsets[1:] - 1] = False
    batch = {"input_ids": input_ids, "row_offsets": offsets, "pred_mask": pred_mask}
    batch = {name: value.to(target.device) for name, value in batch.items()}
    batch |= target_columns(target, input_ids, offsets, spec)

    def step() -> None:
        with torch.autocast(target.device.type, torch.bfloat16):
            module.distill(batch, spec).loss_sum.backward()
        head.zero_grad()

    times = interleaved_times({"step": step}, repeats=3, device=target.device)
    return {"head/step_tokens_per_s": median_rate(num_rows * length, times["step"])}
