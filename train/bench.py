"""Speed and memory as ratios within one run: `python -m train.bench` -> outputs/bench/results.json.

1. cache_vs_forward: writing a cache against the bare target forward
2. loop_overhead: the decode loop outside its forwards
3. plain_vs_generate: our plain decoding, the base of every speed-up, against transformers' `generate`; plain_vs_vllm:
   against vLLM's, where `make setup-vllm` installed it
4. draft_step_vs_plain: the draft's training step against a plain transformers + torch loop, fp32 and bf16
5. chunked_loss_peak_gb: memory of the fused loss, and its difference to the plain one
6. eagle3_step_vs_speculators: the EAGLE-3 training step against that library's, where `make setup-peer` installed it,
   and eagle3_step_matmul_share: how much of ours is matrix products it cannot do without (both on the CPU)
7. resident_gb: largest memory of the quickstart run, copied from its results when there are any
Run it on a quiet machine: another job at the same time makes both sides several times slower, not equally.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from eval.entry import entry
from eval.report import print_metrics
from eval.results import Metric, make_header, merge_results, read_results
from eval.run import draft_fingerprint
from models.drafts import gpt2_draft
from models.target import Target
from train.measure import cache_vs_forward, chunked_loss_peak, loop_overhead, plain_vs_generate
from train.measure_eagle import PEER_PYTHON, PeerError, StepCase, chat_case, eagle_step, peer_versions, supervised_case
from train.measure_step import draft_step_vs_plain
from train.measure_vllm import plain_vs_vllm
from train.serving import VLLM_PYTHON, ServingError
from train.step_flops import HeadShape

GOALS = {  # what `make bench` is expected to show
    "cache_vs_forward": (">=", 0.85),
    "loop_overhead/greedy": ("<=", 0.10),
    "loop_overhead/T1": ("<=", 0.10),
    "plain_vs_generate": (">=", 1.0),
    "plain_vs_vllm": (">=", 1.0),
    "draft_step_vs_plain/fp32": (">=", 1.0),
    "draft_step_vs_plain/bf16": (">=", 1.0),
    "chunked_loss_peak_gb": ("<=", 0.5),
    "chunked_loss_max_difference": ("<=", 1e-5),
    "eagle3_step_vs_speculators/fp32_T512": (">=", 1.2),
    "eagle3_step_vs_speculators/bf16_T512": (">=", 1.8),
    "eagle3_step_vs_speculators/fp32_T2048_packed": (">=", 2.0),
    "eagle3_step_vs_speculators/bf16_T2048_packed": (">=", 2.0),
    "eagle3_step_vs_speculators/bf16_chat": (">=", 2.0),
    "eagle3_step_matmul_share/fp32": (">=", 0.6),
    "eagle3_step_matmul_share/bf16": (">=", 0.45),
}
SMALL_DRAFT = {"n_layer": 2, "n_head": 2, "n_embd": 64}
SMALL_HEAD = {
    "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "draft_vocab_size": 64, "num_steps": 2,
}  # fmt: skip


def run_bench(
    target: Target, *, output_root: str | Path, quick: bool = False
) -> tuple[dict[str, Metric], dict[str, str]]:
    """Every measurement, and the fingerprint of the untrained draft in the loop. quick: tiny sizes, to try the code."""
    shape = SMALL_DRAFT if quick else {}
    draft = gpt2_draft(target.vocab_size, **shape).to(device=target.device, dtype=target.dtype).eval()
    steps = {"num_rows": 2, "length": 64, "vocab_size": 512, **shape} if quick else {}
    loss = {"num_tokens": 64, "vocab_size": 2048, "hidden_size": 32} if quick else {}
    head = head_shape(target, quick=quick)
    work_dir = Path(output_root) / "bench"
    jobs: list[tuple[str, Callable[[], dict[str, Metric]]]] = [
        (
            "cache against forward",
            lambda: cache_vs_forward(
                target, num_tokens=2048 if quick else 16_384, length=128 if quick else 512, work_dir=work_dir
            ),
        ),
        ("decode loop", lambda: loop_overhead(target, draft, max_new_tokens=8 if quick else 48)),
        ("plain decoding", lambda: plain_vs_generate(target, max_new_tokens=8 if quick else 48)),
        *([] if quick else [("plain decoding beside vLLM", lambda: vllm_speed(target, work_dir=work_dir))]),
        *(
            (f"training step, {precision}", lambda p=precision: _step(p, target.device, steps))
            for precision in ("fp32", "bf16")
        ),
        ("memory of the loss", lambda: chunked_loss_peak(**loss)),
        *(
            (f"EAGLE-3 step, {case.name}", lambda case=case: eagle_steps(case, head, quick=quick))
            for case in eagle_cases(target, quick=quick)
        ),
    ]
    metrics: dict[str, Metric] = {}
    for name, job in jobs:
        start = time.perf_counter()
        metrics |= job()
        print(f"bench: {name} measured in {time.perf_counter() - start:.0f} s", flush=True)
    return metrics, draft_fingerprint(draft)


def head_shape(target: Target, *, quick: bool) -> HeadShape:
    return HeadShape(vocab_size=target.vocab_size, **(SMALL_HEAD if quick else {}))


def eagle_cases(target: Target, *, quick: bool) -> list[StepCase]:
    """What both EAGLE-3 steps run on: one row, four packed rows, and real chats where the target's template allows."""
    sizes = {"vocab_size": target.vocab_size, **({"length": 24} if quick else {})}
    chats = {"batch_tokens": 128, "max_length": 64, "repeats": 2} if quick else {}
    cases = [
        supervised_case(f"{precision}_{name}", precision, num_rows=num_rows, repeats=2 if quick else repeats, **sizes)
        for name, num_rows, repeats in (("T512", 1, 7), ("T2048_packed", 4, 5))
        for precision in ("fp32", "bf16")
    ]
    if target.tokenizer.chat_template:
        cases.append(chat_case("bf16_chat", "bf16", target.tokenizer, **chats))
    return cases


def eagle_steps(case: StepCase, shape: HeadShape, *, quick: bool = False) -> dict[str, Metric]:
    """One comparison, without the peer where its environment is missing or fails; the share where rows are single."""
    sizes = ((64, 128) if quick else (2048, 4096)) if case.name.endswith("_T512") else ()
    if PEER_PYTHON.is_file():
        try:
            return eagle_step(case, shape, peer_python=PEER_PYTHON, product_sizes=sizes)
        except PeerError as error:
            print(f"bench: no comparison for {case.name}: {error}", flush=True)
    return eagle_step(case, shape, product_sizes=sizes)


def vllm_speed(target: Target, *, work_dir: Path) -> dict[str, Metric]:
    """Nothing, and one line, without vLLM's environment or where it fails."""
    if not VLLM_PYTHON.is_file():
        print("bench: plain_vs_vllm not measured, vLLM is not installed (make setup-vllm adds it)", flush=True)
        return {}
    try:
        return plain_vs_vllm(target, work_dir=work_dir)
    except ServingError as error:
        print(f"bench: plain_vs_vllm not measured: {error}", flush=True)
        return {}


def _step(precision: str, device: torch.device, sizes: dict[str, int]) -> dict[str, Metric]:
    return draft_step_vs_plain(precision=precision, device=device, **sizes)


def verdict(key: str, value: float) -> str:
    """How a figure stands to its goal: "goal >= 0.85: reached", "... MISSED", or nothing where there is none."""
    if key not in GOALS:
        return ""
    sign, goal = GOALS[key]
    reached = value >= goal if sign == ">=" else value <= goal
    return f"goal {sign} {goal:g}: {'reached' if reached else 'MISSED'}"


def quickstart_memory(output_root: str | Path) -> dict[str, Metric]:
    """`resident_gb` of the last quickstart run, or nothing."""
    path = Path(output_root) / "quickstart" / "results.json"
    if not path.is_file():
        return {}
    metric = read_results(path)["metrics"].get("resident_gb")
    return {"resident_gb": Metric(metric["value"])} if metric else {}


def describe_steps(head: HeadShape) -> str:
    """What the two EAGLE-3 steps are, for the header of the results."""
    versions = peer_versions(PEER_PYTHON)
    peer = f"; peer: {versions}, sdpa, eager loss" if versions else ""
    lm_head = "trained" if head.train_lm_head else "frozen"
    return f"{head.num_steps} simulated steps, lm_head {lm_head}, {torch.get_num_threads()} threads{peer}"


@entry("distill")
def main(cfg: DictConfig) -> None:
    start = time.perf_counter()
    target: Target = instantiate(cfg.target)
    quick = target.vocab_size < 1000
    metrics, fingerprint = run_bench(target, output_root=cfg.output_root, quick=quick)
    metrics |= quickstart_memory(cfg.output_root)
    header = make_header(
        device=target.device,
        dtype=target.dtype,
        target={"name": target.name, **target.fingerprint()},
        draft={"name": "untrained GPT-2", **fingerprint},
        data={"eagle3_step": describe_steps(head_shape(target, quick=quick))},
    )
    path = merge_results(Path(cfg.output_root) / "bench" / "results.json", header, metrics, overwrite=True)
    print_metrics(f"Bench, {time.perf_counter() - start:.0f} s", metrics)
    for key, metric in metrics.items():
        if text := verdict(key, metric.value):
            print(f"{key} {metric.value:.3g}, {text}")
    if not any(key.startswith("eagle3_step_vs_speculators/") for key in metrics):
        print("eagle3_step_vs_speculators/*: not measured, the library is not installed (make setup-peer adds these)")
    if "resident_gb" not in metrics:
        print("resident_gb: not measured, there is no quickstart run yet (make quickstart)")
    print(path)


if __name__ == "__main__":
    main()
