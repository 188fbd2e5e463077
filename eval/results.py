"""results.json: figures with their intervals, merged by key, so that several evaluations share one file.

    {"command", "git_sha", "device", "dtype", "versions", "target", "draft", "data",
     "metrics": {key: {"value", "ci95": [lo, hi], "n"}}, "merges": [...]}

The header is that of the last merge; "merges" keeps, for every key still in the file, the command, commit,
device and dtype that produced it. A merge takes a lock, reads, writes a temporary file, syncs and renames it.
"""

import fcntl
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from models.errors import UserError

HEADER_KEYS = ("command", "git_sha", "device", "dtype", "versions", "target", "draft", "data")
MADE_BY = ("command", "git_sha", "device", "dtype")
# Files beside results.json that go when it begins anew with another draft; the others are rewritten, or checked.
OF_A_DRAFT = (
    "decode.json", "generations.txt", "generations.html",
    "by_temperature.png", "acceptance_by_depth.png", "alpha_by_depth.png",
)  # fmt: skip
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Metric:
    """One figure: its value, 95 % interval (None where it has none, such as a count) and the number of
    prompts, rows or repeats behind it."""

    value: float
    ci95: tuple[float, float] | None = None
    n: int = 1

    @classmethod
    def of(cls, interval: tuple[float, float, float], n: int) -> "Metric":
        """From `stats.bootstrap_ci` or `stats.ratio_ci`."""
        value, low, high = interval
        return cls(value, (low, high), n)

    def __str__(self) -> str:
        if self.ci95 is None:
            return f"{self.value:.4g}"
        return f"{self.value:.3f} [{self.ci95[0]:.3f}, {self.ci95[1]:.3f}]"


def merge_results(
    path: str | Path,
    header: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    *,
    is_stale: Callable[[str], bool] = lambda key: False,
    overwrite: bool = False,
) -> Path:
    """Merge `metrics` into the file at `path` by key (a new value replaces the old one) and return the path.

    header: HEADER_KEYS (see `make_header`). `data` is merged by key, the rest is replaced.
    is_stale: former figures that go even where there is no new value: those of what is now measured anew as a whole.
    overwrite: start the file afresh where it belongs to another target or draft.
    Raises UserError when the file holds another target's or draft's figures, or is no results file.
    """
    path = Path(path)
    missing = [key for key in HEADER_KEYS if key not in header]
    assert not missing, f"header lacks {missing}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent / f".{path.name}.lock"):
        old = _former(path, header, overwrite=overwrite)
        if not old:  # a former draft's texts, counts and plots are none of this one's
            for name in OF_A_DRAFT:
                (path.parent / name).unlink(missing_ok=True)
        merged = {key: _plain(header[key]) for key in HEADER_KEYS}
        merged["data"] = {**old.get("data", {}), **merged["data"]}
        before = {key: value for key, value in old.get("metrics", {}).items() if not is_stale(key)}
        new = {key: {"value": m.value, "ci95": m.ci95, "n": m.n} for key, m in metrics.items()}
        merged["metrics"] = dict(sorted({**before, **_plain(new)}.items()))
        merged["merges"] = [
            {**merge, "keys": kept}
            for merge in old.get("merges", [])
            if (kept := [key for key in merge["keys"] if key in before and key not in metrics])
        ]
        made_by = {key: merged[key] for key in MADE_BY}
        merged["merges"].append({**made_by, "keys": sorted(metrics)})
        write_atomic(path, json.dumps(merged, indent=1, allow_nan=False) + "\n")
    return path


def check_place(path: Path, header: Mapping[str, Any], *, overwrite: bool) -> None:
    """Before long measuring: raises what `merge_results` would raise behind it, and makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _former(path, header, overwrite=overwrite)


def _former(path: Path, header: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any]:
    """What is merged into: nothing where the file is to be started afresh."""
    old = _read(path, overwrite=overwrite)
    for side in ("target", "draft"):
        if old and old[side] != _plain(header[side]):
            if not overwrite:
                raise UserError(
                    f"{path} holds results of {side} {_short(old[side])}, "
                    f"this is {_short(header[side])}: choose another output_root, "
                    "or overwrite=true to replace the file"
                )
            old = {}
    return old


def read_results(path: str | Path) -> dict[str, Any]:
    """The file as a dict. UserError when it is missing or no results file."""
    results = _read(Path(path), overwrite=False)
    if not results:
        raise UserError(f"{path}: no results there; run eval.alpha or eval.decode first")
    return results


def makers(results: Mapping[str, Any], keys: Collection[str]) -> list[dict[str, str]]:
    """Command, commit, device and dtype of the merges that made any of `keys`; of the header where none is recorded."""
    merges = [merge for merge in results.get("merges", []) if not set(keys).isdisjoint(merge["keys"])]
    return [{key: merge[key] for key in MADE_BY} for merge in merges or [results]]


def make_header(
    *,
    device: torch.device,
    dtype: torch.dtype,
    target: Mapping[str, str],
    draft: Mapping[str, str],
    data: Mapping[str, str],
) -> dict[str, Any]:
    """The header of results measured now, by this process."""
    return {
        **run_info(),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "target": dict(target),
        "draft": dict(draft),
        "data": dict(data),
    }


def run_info() -> dict[str, Any]:
    """`command`, `git_sha` and `versions` of this process."""
    packages = ("torch", "transformers", "lightning", "draftsmith")
    versions = {name: version for name in packages if (version := _version(name))}
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "git_sha": git_sha(),
        "versions": {"python": platform.python_version(), **versions},
    }


def git_sha(repository: Path = _REPOSITORY) -> str:
    """Commit of the code, with "-dirty" where tracked files differ; "unknown" outside a git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=repository, check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != repository.resolve():
            return "unknown"  # installed below somebody else's repository
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def device_name(device: torch.device) -> str:
    """What a reader calls it: "NVIDIA H200" or "Intel(R) Xeon(R) ..., 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} ({platform.processor() or platform.machine()})"
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # no such file on macOS
    return f"{name}, {torch.get_num_threads()} threads"


def write_atomic(path: Path, text: str) -> None:
    """`text` at `path`, whole or not at all: temporary file in the same folder, fsync, rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide results from the group
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, even if the process dies
        yield


def _read(path: Path, *, overwrite: bool) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text())
        if not (isinstance(results, dict) and {*HEADER_KEYS, "metrics"} <= results.keys()):
            raise ValueError
        if not all(isinstance(results[key], dict) for key in ("target", "draft", "data", "metrics")):
            raise ValueError
    except ValueError:
        if overwrite:
            return {}
        raise UserError(f"{path} is no results file: move it away, or overwrite=true to replace it") from None
    return results


def _plain(value: Any) -> Any:
    """As JSON gives it back; nan and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, str, type(None))):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _short(fingerprint: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key} {str(value)[:16]}" for key, value in fingerprint.items()) + "}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
