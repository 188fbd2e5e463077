"""Peak memory: of this process, and of one way of decoding in a fresh process.

A process that has loaded several drafts says nothing about one of them, so each row of a comparison has its own child:
`python -m eval.memory` reads a job from stdin, decodes a few prompts and prints the largest memory while it did.
"""

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch


def reset_peak(device: torch.device) -> int:
    """Bytes in use now; the peak counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from VmRSS
    return status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status_bytes("VmHWM")


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_resident_gb() -> float:
    """Largest resident memory of this process so far, in GB (1e9 bytes)."""
    try:
        return status_bytes("VmHWM") / 1e9
    except OSError:  # no /proc: macOS counts in bytes
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def peak_of_row(
    row: str,
    *,
    target: dict[str, Any],  # the config that the target is made from
    draft: dict[str, Any] | None,  # slug, name, source and tap_ids of the row's own draft
    methods: Sequence[str],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
) -> float:
    """GB (1e9 bytes) that a fresh process has at most while it decodes these prompts at these temperatures.

    On a CPU its resident memory: Python and its libraries, weights, caches. On a GPU what torch allocated there.
    Without /proc the loading counts too.
    """
    job = {
        "row": row, "target": target, "draft": draft, "methods": list(methods), "temperatures": list(temperatures),
        "prompts": [list(ids) for ids in prompts], "max_new_tokens": max_new_tokens, "threads": torch.get_num_threads(),
    }  # fmt: skip
    command = [sys.executable, "-m", "eval.memory"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the process that measures the memory of {row} died: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])["peak_bytes"] / 1e9


def main() -> None:
    from hydra.utils import instantiate

    from eval.compare_rows import is_generate, load_entrant, make_rows
    from eval.entry import keep_freed_memory
    from eval.tree import TreeShape
    from models.packed_linear import unpack_linears
    from models.sampling import SamplingParams

    job = json.loads(sys.stdin.read())
    torch.set_num_threads(job["threads"])
    target = instantiate(job["target"])
    entrants = []
    if draft := job["draft"]:
        slug = draft.pop("slug")
        entrants = [replace(load_entrant(target, **draft), slug=slug)]
    is_theirs = is_generate(job["row"])
    if is_theirs:  # their user has no packed weights
        unpack_linears(target.model)
        for entrant in entrants:
            unpack_linears(entrant.draft)
    else:
        keep_freed_memory()
    rows = make_rows(target, entrants, [TreeShape.parse(name) for name in job["methods"]], generate=is_theirs)
    row = next(row for row in rows if row.key == job["row"])
    gc.collect()
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what loading took and gave back
    with suppress(OSError):
        reset_peak(target.device)
    for temperature in job["temperatures"]:
        for number, prompt in enumerate(job["prompts"]):
            row.decode(prompt, SamplingParams(temperature=temperature), job["max_new_tokens"], number)
    peak = peak_bytes(target.device) if target.device.type == "cuda" else int(peak_resident_gb() * 1e9)
    print(json.dumps({"peak_bytes": peak}))


if __name__ == "__main__":
    main()
