"""Script of test_cache.py: cache jobs in forked children that are killed, then a clean run; prints what it saw as JSON.

One process imports everything, so that a job starts in milliseconds and a kill can hit any part of it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from cache_helpers import make_rows

from data.cache import Manifest
from data.signals import SignalSpec
from models.target import load_target
from train.cache import build_cache

torch.set_num_threads(1)  # before any parallel region: threads do not survive a fork
target = load_target("random:tiny_llama", dtype="fp32", device="cpu")
generator = random.Random(int(sys.argv[2]))
rows = make_rows([generator.randint(2, 120) for _ in range(700)])


def build(root: Path) -> Path:
    return build_cache(target, rows, SignalSpec(), cache_root=root, name="x", shard_tokens=1500, batch_tokens=512)


def start(root: Path, prepare=None) -> int:
    child = os.fork()
    if child == 0:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        if prepare is not None:
            os.dup2(devnull, 2)
            prepare()
        build(root)
        os._exit(0)
    return child


def finish(child: int) -> int:
    return os.waitpid(child, 0)[1]


def die_at(function: str, call: int, before: bool):
    """Replace an operating-system call by one that kills the process at its n-th use."""

    def prepare() -> None:
        original, calls = getattr(os, function), [0]

        def wrapped(*args):
            calls[0] += 1
            if before and calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args)
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, function, wrapped)

    return prepare


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


root = Path(sys.argv[1])
began = time.monotonic()
assert finish(start(root / "whole")) == 0
whole_s = time.monotonic() - began
expected = contents(root / "whole")

done_at_kill, untrusted = [], 0
for _ in range(10):
    child = start(root / "killed")
    time.sleep(generator.uniform(0.02, 0.25) * whole_s)
    os.kill(child, signal.SIGKILL)
    finish(child)
    folders = list((root / "killed").glob("x-*"))
    if folders and (folders[0] / "manifest.json").is_file():
        manifest = Manifest.open(folders[0])
        done_at_kill.append(len(manifest.shards))
        untrusted += len(manifest.damaged_shards())
assert finish(start(root / "killed")) == 0

points = [(f, n, b) for f in ("pwrite", "rename", "fsync") for n in (1, 2, 5) for b in (True, False)]
died = sum(os.WIFSIGNALED(finish(start(root / "points", die_at(*point)))) for point in points)
assert finish(start(root / "points")) == 0

print(
    json.dumps(
        {
            "shards": Manifest.open(next((root / "whole").glob("x-*"))).num_shards,
            "done_at_kill": done_at_kill,
            "untrusted": untrusted,
            "killed_equal": contents(root / "killed") == expected,
            "points": len(points),
            "died": died,
            "points_equal": contents(root / "points") == expected,
        }
    )
)
