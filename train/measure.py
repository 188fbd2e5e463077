"""Measurements of speed and memory that `train.bench` (CPU) and `train.gpu_check` share.

Every ratio comes from one process: the two sides run in turn, several times, and medians are compared. Speed does not
depend on what the tokens say, so rows and prompts are random ids and drafts are untrained.
"""

import copy
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data.rows import Rows
from data.signals import SignalSpec
from eval.loop import speculative_decode
from eval.memory import peak_bytes, reset_peak
from eval.results import Metric
from eval.stats import ratio_ci
from models.packed_linear import unpack_linears
from models.target import Target
from train.cache import CacheStats, build_cache
from train.losses import HiddenSignal, LossSpec, distill_loss


def random_rows(vocab_size: int, *, num_rows: int, length: int, seed: int = 0) -> Rows:
    """Rows of random ids, all supervised."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, num_rows * length)
    return Rows(
        input_ids=ids.astype(np.int32),
        loss_mask=np.ones(len(ids), dtype=bool),
        row_offsets=np.arange(num_rows + 1, dtype=np.int64) * length,
        row_ids=np.arange(num_rows, dtype=np.int64),
    )


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_times(
    sides: Mapping[str, Callable[[], object]], *, repeats: int, device: torch.device, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side, run in turn `repeats` times after `warm_up` unmeasured turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + repeats):
        for name, run in sides.items():
            synchronise(device)
            start = time.perf_counter()
            run()
            synchronise(device)
            if turn >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Metric:
    """median(numerators) / median(denominators) of interleaved repeats, with the bootstrap interval over repeats."""
    tops, bottoms = np.asarray(numerators), np.asarray(denominators)
    draws = np.random.default_rng(0).integers(0, len(tops), (1000, len(tops)))
    ratios = np.median(tops[draws], 1) / np.median(bottoms[draws], 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Metric(float(np.median(tops) / np.median(bottoms)), (float(low), float(high)), len(tops))


def median_rate(count: int, seconds: Sequence[float]) -> Metric:
    """Units a second: count / median(seconds); the interval spans the repeats."""
    return Metric(count / statistics.median(seconds), (count / max(seconds), count / min(seconds)), len(seconds))


def cache_vs_forward(
    target: Target,
    *,
    num_tokens: int,
    work_dir: str | Path,
    length: int = 512,
    batch_tokens: int = 4096,
    repeats: int = 3,
) -> dict[str, Metric]:
    """Speed of writing a top-64 cache to disk against the bare forward `model(input_ids).logits` on the same batches.

    1.0 means that reducing, copying and writing cost nothing. The cache's time runs from the start of its job until the
    last shard is in the ledger, synced to disk. The caches are made and removed under `work_dir`.
    """
    Path(work_dir).mkdir(parents=True, exist_ok=True)
    rows = random_rows(target.vocab_size, num_rows=num_tokens // length, length=length)
    ids = torch.from_numpy(rows.input_ids.astype(np.int64)).view(-1, length)  # (R, T)
    stats: list[CacheStats] = []

    @torch.inference_mode()
    def forward() -> None:
        for batch in ids.split(max(1, batch_tokens // length)):
            target.model(input_ids=batch.to(target.device), use_cache=False).logits  # noqa: B018

    def cache() -> None:
        with tempfile.TemporaryDirectory(dir=work_dir, prefix="bench-") as folder, redirect_stdout(StringIO()):
            build_cache(
                target,
                rows,
                SignalSpec("topk", 64),
                cache_root=folder,
                name="bench",
                batch_tokens=batch_tokens,
                on_stats=stats.append,
            )

    times = interleaved_times({"forward": forward, "cache": cache}, repeats=repeats, device=target.device)
    cache_times = [stat.seconds for stat in stats[1:]]
    return {
        "cache_vs_forward": median_ratio(times["forward"], cache_times),
        "cache_tokens_per_s": median_rate(rows.num_tokens, cache_times),
        "forward_tokens_per_s": median_rate(rows.num_tokens, times["forward"]),
    }


def loop_overhead(
    target: Target,
    draft: nn.Module,
    *,
    draft_len: int = 4,
    num_prompts: int = 4,
    prompt_tokens: int = 64,
    max_new_tokens: int = 48,
) -> dict[str, Metric]:
    """Share of the decode loop's time (its prefill aside) spent outside the forwards of target and draft.

    Greedy, at T = 1, and at T = 1 with top-p 0.9, for plain and speculative decoding in turn; the interval is over
    prompts.
    """
    prompts = random_rows(target.vocab_size, num_rows=num_prompts + 1, length=prompt_tokens, seed=1)
    settings = {
        "greedy": {"temperature": 0.0},
        "T1": {"temperature": 1.0},
        "T1_top_p": {"temperature": 1.0, "top_p": 0.9},
    }
    totals: dict[str, list[tuple[float, float]]] = {}
    for prompt in range(num_prompts + 1):  # the first one warms up
        ids = torch.from_numpy(prompts.row(prompt)[0].astype(np.int64))
        for name, sampling in settings.items():
            for kind, model in (("plain", None), ("chain", draft)):
                result = speculative_decode(
                    target,
                    model,
                    ids,
                    draft_len=draft_len,
                    max_new_tokens=max_new_tokens,
                    eos_token_ids=(),
                    seed=prompt,
                    **sampling,
                )
                if prompt:
                    decoding = result.wall_s - result.prefill_s
                    totals.setdefault(f"{name}/{kind}", []).append((result.overhead_s, decoding))
    metrics = {}
    for name, pairs in totals.items():
        outside, whole = zip(*pairs)
        setting, kind = name.split("/")
        key = f"loop_overhead/{setting}" if kind == "chain" else f"plain_loop_overhead/{setting}"
        metrics[key] = Metric.of(ratio_ci(outside, whole), num_prompts)
    return metrics


def plain_vs_generate(
    target: Target, *, num_prompts: int = 4, prompt_tokens: int = 64, max_new_tokens: int = 48
) -> dict[str, Metric]:
    """Our plain greedy decoding, the base of every speed-up, against transformers' `generate` on the same weights.

    Whole calls, prefill included; the interval is over prompts.
    """
    theirs = unpack_linears(copy.deepcopy(target.model))
    seconds: dict[str, list[float]] = {"ours": [], "generate": []}
    prompts = random_rows(target.vocab_size, num_rows=num_prompts, length=prompt_tokens, seed=2)
    for prompt in range(num_prompts):
        ids = torch.from_numpy(prompts.row(prompt)[0].astype(np.int64)).to(target.device)
        sides = {
            "ours": partial(speculative_decode, target, None, ids, max_new_tokens=max_new_tokens, eos_token_ids=()),
            "generate": partial(
                theirs.generate,
                ids[None],
                attention_mask=torch.ones_like(ids)[None],
                do_sample=False,
                min_new_tokens=max_new_tokens,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
            ),
        }
        times = interleaved_times(sides, repeats=1, device=target.device, warm_up=0 if prompt else 1)
        for name, measured in times.items():
            seconds[name] += measured
    return {
        "plain_vs_generate": median_ratio(seconds["generate"], seconds["ours"]),
        "plain_tokens_per_s": median_rate(max_new_tokens, seconds["ours"]),
    }


# Memory of the fused loss: a process of its own, so that nothing freed earlier hides its peak.


def chunked_loss_peak(
    *, num_tokens: int = 2048, vocab_size: int = 151_936, hidden_size: int = 256, device: str = "cpu"
) -> dict[str, Metric]:
    """Memory above the inputs of the fused loss with both gradients, from exact logits (`signal=hidden`), in fp32.

    Beside it the largest difference to the plain loss: of the loss itself, and of the gradients relative to their
    largest entry.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, num_tokens, vocab_size, hidden_size, device, torch.get_num_threads())
    process = context.Process(target=_chunked_loss_child, args=arguments)
    process.start()
    sender.close()
    try:
        figures = json.loads(receiver.recv())
    except EOFError:
        raise RuntimeError("the process that measures the fused loss died; see its message above") from None
    finally:
        process.join()
    return {f"chunked_loss_{name}": Metric(value) for name, value in figures.items()}


def _chunked_loss_child(sender, num_tokens: int, vocab_size: int, hidden_size: int, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device)

    hidden, weight = normal(num_tokens, hidden_size), normal(vocab_size, hidden_size, std=0.1)  # (N, D), (V, D)
    target_hidden, target_head = normal(num_tokens, hidden_size), normal(vocab_size, hidden_size, std=0.1)
    mask = torch.rand(num_tokens, generator=generator).to(device) < 0.9  # (N,)
    hidden.requires_grad_(), weight.requires_grad_()
    signal = HiddenSignal(target_hidden, lambda states: states @ target_head.T)
    _fused_loss(hidden[:8], weight[:999], HiddenSignal(target_hidden[:8], lambda s: s @ target_head[:999].T), mask[:8])
    hidden.grad = weight.grad = None
    gc.collect()

    before = reset_peak(torch.device(device))
    start = time.perf_counter()
    loss = _fused_loss(hidden, weight, signal, mask)
    synchronise(torch.device(device))
    seconds, peak = time.perf_counter() - start, peak_bytes(torch.device(device)) - before

    plain_loss, plain_hidden, plain_weight = _plain_loss(hidden, weight, signal, mask)
    differences = [
        abs(loss - plain_loss),
        *(
            ((ours - plain).abs().max() / plain.abs().max()).item()
            for ours, plain in ((hidden.grad, plain_hidden), (weight.grad, plain_weight))
        ),
    ]
    figures = {"peak_gb": peak / 1e9, "seconds": seconds, "max_difference": max(differences)}
    sender.send(json.dumps(figures))


def _fused_loss(hidden: Tensor, weight: Tensor, signal: HiddenSignal, mask: Tensor) -> float:
    result = distill_loss(hidden, weight, signal, mask, loss=LossSpec("forward_kl"))
    mean = result.loss_sum / result.num_tokens
    mean.backward()
    return mean.item()


def _plain_loss(
    hidden: Tensor, weight: Tensor, signal: HiddenSignal, mask: Tensor
) -> tuple[float, Tensor, Tensor]:  # mean KL and its two gradients
    """torch's own operations and autograd in fp32, by slices of tokens so that it fits in memory."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    num_tokens, total = int(mask.sum()), 0.0
    for rows in mask.nonzero()[:, 0].split(256):
        target_logprobs = signal.head(signal.final_hidden[rows]).log_softmax(-1)  # (n, V)
        draft_logprobs = (hidden[rows] @ weight.T).log_softmax(-1)  # (n, V)
        kl = nn.functional.kl_div(draft_logprobs, target_logprobs, reduction="sum", log_target=True) / num_tokens
        kl.backward()
        total += kl.item()
    return total, hidden.grad, weight.grad
