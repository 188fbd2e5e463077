"""Our plain greedy decoding against vLLM's on the same target, by turns: is the base of every speed-up a fair one?

vLLM runs in its own environment (`make setup-vllm`) as it comes: compiled where there is a C++ compiler, else eager.
One engine lives through all turns, stopped while ours decodes. Same weights, prompts of random ids, tokens, threads.
"""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch

from eval.loop import speculative_decode
from eval.results import Metric
from models.target import Target
from train.measure import interleaved_times, median_rate, median_ratio, random_rows
from train.serving import engine_turns, target_folder

WARM_UP = 8  # turns before the first one that counts: vLLM's later turns take 0.8 of its first ones


def plain_vs_vllm(
    target: Target,
    *,
    work_dir: str | Path,
    num_prompts: int = 4,
    prompt_tokens: int = 64,
    max_new_tokens: int = 128,
    repeats: int = 3,
) -> dict[str, Metric]:
    """Whole texts, prefill included: median seconds of vLLM over ours, and both speeds; intervals over turns.

    Raises ServingError where vLLM fails.
    """
    rows = random_rows(target.vocab_size, num_rows=num_prompts, length=prompt_tokens, seed=2)
    prompts = [rows.row(number)[0].tolist() for number in range(num_prompts)]
    seconds: dict[str, list[float]] = {"ours": [], "vllm": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_turns(
            target_folder(target, Path(folder)),
            prompts,
            dtype=target.dtype,
            max_model_len=prompt_tokens + max_new_tokens + 1,
            max_new_tokens=max_new_tokens,
            enforce_eager=shutil.which("g++") is None,
            log=Path(work_dir) / "vllm.log",
        ) as turn,
    ):
        for number, ids in enumerate(prompts):
            sides = {
                "ours": partial(speculative_decode, target, None, ids, max_new_tokens=max_new_tokens, eos_token_ids=()),
                "vllm": partial(_vllm_turn, turn, number, max_new_tokens),
            }
            warm_up = 0 if number else WARM_UP
            times = interleaved_times(sides, repeats=repeats, device=torch.device("cpu"), warm_up=warm_up)
            for name, measured in times.items():
                seconds[name] += measured
    return {
        "plain_vs_vllm": median_ratio(seconds["vllm"], seconds["ours"]),
        "vllm_tokens_per_s": median_rate(max_new_tokens, seconds["vllm"]),
    }


def _vllm_turn(turn, number: int, max_new_tokens: int) -> None:
    text = turn(number)["token_ids"]
    assert len(text) == max_new_tokens, len(text)
