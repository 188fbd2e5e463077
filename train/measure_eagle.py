"""The EAGLE-3 head's training step against that of the `speculators` library, on the CPU, in one run.

1. Rows are packed into batches; ours reads them packed, the peer packs and pads the same rows in its own way.
2. The peer's step runs in a process of its own environment (train/peer_step.py), one step at each request, so the two
   sides take turns. Each is timed inside its process: forward of all simulated steps, backward, clipping, AdamW.
3. Tokens/s counts the tokens of the rows, padding left out. Medians are compared; intervals resample whole turns.

Both run as they come: ours with the allocator setting of the entry points (eval/entry.py), theirs with its defaults.
Speed does not depend on what the target's states say, so they are random.
"""

import itertools
import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data.datamodule import BatchStream, Item, PackedRows
from data.rows import Rows, load_rows
from data.signals import SignalSpec
from eval.results import Metric
from models.eagle import EagleConfig, EagleHead
from train.eagle_module import Eagle3Distiller
from train.losses import LossSpec
from train.measure import interleaved_times, median_ratio, random_rows
from train.module import OptimSpec, make_optimizer
from train.step_flops import HeadShape, count_slots, matmul_share, necessary_flops

REPOSITORY = Path(__file__).parents[1]
PEER_PYTHON = REPOSITORY / ".venv-speculators" / "bin" / "python"
CHATS = REPOSITORY / "data" / "sample" / "smollm2_chat.jsonl.gz"
TAP_IDS = (2, 15, 27)
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepCase:
    """What one comparison runs on: `batches` are row numbers, each of at most batch_tokens tokens."""

    name: str  # last part of the keys
    precision: str  # fp32, or bf16: autocast over fp32 weights, on both sides
    rows: Rows
    batches: list[np.ndarray]
    batch_tokens: int  # the peer pads to this length
    repeats: int

    def num_tokens(self, turn: int) -> int:
        lengths = np.diff(self.rows.row_offsets)
        return int(lengths[self.batch(turn)].sum())

    def batch(self, turn: int) -> np.ndarray:  # (R,)
        return self.batches[turn % len(self.batches)]


def supervised_case(
    name: str, precision: str, *, vocab_size: int, num_rows: int, length: int = 512, repeats: int
) -> StepCase:
    """One batch of rows of one length, every token supervised: no padding on either side, nothing to leave out."""
    rows = random_rows(vocab_size, num_rows=num_rows, length=length)
    return StepCase(name, precision, rows, [np.arange(num_rows)], num_rows * length, repeats)


def chat_case(
    name: str,
    precision: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_tokens: int = 2048,
    max_length: int = 512,
    repeats: int = 7,
) -> StepCase:
    """Packed rows of the target's own answers in the repository, another batch at each turn."""
    rows = load_rows(
        [{"path": str(CHATS), "kind": "chat"}],
        tokenizer,
        split="train",
        max_length=max_length,
        held_out_fraction=0.0,
        seed=0,
        max_tokens=(repeats + 3) * batch_tokens,
    )
    stream = BatchStream(np.diff(rows.row_offsets), batch_tokens=batch_tokens, seed=0, shuffle=True)
    batches = stream.epoch(0)[: repeats + 1]  # one more to warm up; the epoch's last one is short
    return StepCase(name, precision, rows, batches, batch_tokens, repeats)


# Our side


class RandomTarget:
    """What the step asks of a target whose states come from a cache: its head on the draft vocabulary."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype):
        self.dtype = dtype
        self._weight = (torch.randn(shape.draft_vocab_size, shape.hidden_size) * 0.02).to(dtype)  # (Vd, D)

    def head_rows(self, ids: Tensor) -> Callable[[Tensor], Tensor]:  # (Vd,) -> ((..., D) -> (..., Vd))
        return lambda final_hidden: final_hidden @ self._weight.T


def our_step(case: StepCase, shape: HeadShape) -> Callable[[int], float]:
    """Turn -> loss: what Lightning calls in a training step, in its order, without Lightning.

    As in training, alpha and the other metrics are measured at the first step and at every tenth only (the peer does so
    at each); of the turns that count, none is among them.
    """
    config = EagleConfig(
        version=3,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        max_position_embeddings=8192,
        tap_ids=TAP_IDS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head, target = EagleHead(config), RandomTarget(shape, DTYPES[case.precision])
        for module in head.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
    head.set_draft_vocab(torch.arange(shape.draft_vocab_size))
    head.lm_head.weight.requires_grad_(shape.train_lm_head)
    module = Eagle3Distiller(
        head,
        vocab_size=shape.vocab_size,
        loss=LossSpec("forward_kl"),
        optim=OptimSpec(lr=LR, weight_decay=WEIGHT_DECAY, clip=CLIP),
        signal=SignalSpec("hidden", tap_ids=TAP_IDS),
        total_steps=1000,
        target=target,
        steps=shape.num_steps,
        decay=1.0,  # as the peer's default
    )
    trainer = SimpleNamespace(accumulate_grad_batches=1, world_size=1, global_step=0)  # all that the module asks it
    module._trainer = trainer
    optimizer = make_optimizer(head, module.optim)
    batches = [packed_batch(case, turn, shape) for turn in range(len(case.batches))]

    def step(turn: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss_sum = module.training_step(batches[turn % len(batches)], 0)
        loss_sum.backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trainer.global_step += 1
        return loss_sum.item()

    return step


def packed_batch(case: StepCase, turn: int, shape: HeadShape) -> dict[str, Tensor]:
    """A training batch as our reader gives it, with random states of the target."""
    batch = PackedRows(case.rows)[Item(case.batch(turn))]
    num_tokens, size = len(batch["input_ids"]), shape.hidden_size
    generator = torch.Generator().manual_seed(turn)
    batch["taps"] = torch.randn(num_tokens, len(TAP_IDS), size, generator=generator).bfloat16()  # (N, L, D)
    batch["final_hidden"] = torch.randn(num_tokens, size, generator=generator).to(DTYPES[case.precision])  # (N, D)
    batch["logsumexp"] = torch.full((num_tokens,), math.log(shape.vocab_size))  # (N,)
    return batch


# The peer's side


class PeerError(RuntimeError):
    """The peer's process could not do its part; one line says why."""


class Peer:
    """A process that runs one step at each request: `with Peer(...) as peer: seconds = peer.step(batch_number)`."""

    def __init__(self, command: Sequence[str], log: Path):
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __enter__(self) -> "Peer":
        try:
            assert self._answer()["ready"]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def step(self, batch: int) -> float:
        """Seconds that step number `batch` took there. Raises PeerError when the process died."""
        with suppress(BrokenPipeError):  # the missing answer says it better
            print(batch, file=self._process.stdin, flush=True)
        return self._answer()["seconds"]

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text().strip().splitlines() or [f"exit code {self._process.wait()}"]
            raise PeerError(f"the peer's step ended: {lines[-1]}")
        return json.loads(line)

    def _stop(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        self._process.kill()
        self._process.wait()


def peer_command(python: str | Path, case: StepCase, shape: HeadShape, rows_file: Path) -> list[str]:
    """-I: neither our folder nor PYTHONPATH is on the peer's path, where `train/losses.py` could pass for another."""
    numbers = {
        "total-length": case.batch_tokens,
        "hidden-size": shape.hidden_size,
        "intermediate-size": shape.intermediate_size,
        "num-heads": shape.num_heads,
        "num-kv-heads": shape.num_kv_heads,
        "head-dim": shape.head_dim,
        "vocab-size": shape.vocab_size,
        "draft-vocab-size": shape.draft_vocab_size,
        "num-steps": shape.num_steps,
        "threads": torch.get_num_threads(),
        "lr": LR,
        "weight-decay": WEIGHT_DECAY,
        "clip": CLIP,
    }
    command = [str(python), "-I", str(REPOSITORY / "train" / "peer_step.py"), "--rows", str(rows_file)]
    command += ["--dtype", str(DTYPES[case.precision]).removeprefix("torch.")]
    command += [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    return command + ["--train-lm-head"] * shape.train_lm_head


def save_peer_rows(path: Path, case: StepCase) -> None:
    """The rows of every batch in order, with the offsets of batches among them (see train/peer_step.py)."""
    pieces = [case.rows.row(int(number)) for batch in case.batches for number in batch]
    np.savez(
        path,
        input_ids=np.concatenate([ids for ids, _ in pieces]),
        loss_mask=np.concatenate([mask for _, mask in pieces]),
        row_offsets=np.cumsum([0] + [len(ids) for ids, _ in pieces]),
        batch_offsets=np.cumsum([0] + [len(batch) for batch in case.batches]),
    )


@contextmanager
def start_peer(python: str | Path, case: StepCase, shape: HeadShape) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="peer-step-") as folder:
        rows_file = Path(folder) / "rows.npz"
        save_peer_rows(rows_file, case)
        with Peer(peer_command(python, case, shape, rows_file), Path(folder) / "stderr.txt") as peer:
            yield peer


def peer_versions(python: str | Path) -> str:
    """What the comparison is with: "speculators 0.9.0, torch 2.13.0+cpu, transformers 5.19.0"; "" where that
    environment is not whole."""
    code = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    command = [str(python), "-I", "-c", code, "speculators", "torch", "transformers"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# The comparison


def eagle_step(
    case: StepCase,
    shape: HeadShape,
    *,
    peer_python: str | Path | None = None,
    product_sizes: Sequence[int] = (),
) -> dict[str, Metric]:
    """`compare_steps` on a fresh head, with the peer where the interpreter of its environment is given."""
    ours = our_step(case, shape)
    if peer_python is None:
        return compare_steps(case, ours, None, shape=shape, product_sizes=product_sizes)
    with start_peer(peer_python, case, shape) as peer:
        return compare_steps(case, ours, peer, shape=shape, product_sizes=product_sizes)


def case_flops(case: StepCase, turn: int, shape: HeadShape) -> int:
    batch = PackedRows(case.rows)[Item(case.batch(turn))]
    mask, offsets = batch["loss_mask"].numpy(), batch["row_offsets"].numpy()
    return necessary_flops(shape, count_slots(mask, offsets, num_steps=shape.num_steps))


def product_side(size: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A square matrix product, the yardstick of speed."""
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    return lambda: left @ right


def compare_steps(
    case: StepCase,
    ours: Callable[[int], object],  # one step on the batch of a turn
    peer: Peer | None,
    *,
    shape: HeadShape,
    product_sizes: Sequence[int] = (),
) -> dict[str, Metric]:
    """Our tokens/s, and with a peer its tokens/s and the ratio; with product_sizes also the share (`matmul_share`)."""
    our_turns, peer_turns = itertools.count(), itertools.count()
    peer_seconds: list[float] = []
    sides: dict[str, Callable[[], object]] = {"ours": lambda: ours(next(our_turns))}
    if peer:
        sides["peer"] = lambda: peer_seconds.append(peer.step(next(peer_turns) % len(case.batches)))
    sides |= {str(size): product_side(size, DTYPES[case.precision]) for size in product_sizes}
    times = interleaved_times(sides, repeats=case.repeats, device=torch.device("cpu"), warm_up=1)

    tokens = [case.num_tokens(turn) for turn in range(1, case.repeats + 1)]  # turn 0 warmed up
    rates = [count / seconds for count, seconds in zip(tokens, times["ours"])]
    metrics = {f"eagle3_step_tokens_per_s/{case.name}": _middle(rates)}
    if peer:
        peer_rates = [count / seconds for count, seconds in zip(tokens, peer_seconds[1:])]
        metrics[f"speculators_step_tokens_per_s/{case.name}"] = _middle(peer_rates)
        metrics[f"eagle3_step_vs_speculators/{case.name}"] = median_ratio(rates, peer_rates)
    if product_sizes:
        assert len(case.batches) == 1, "the share is of one batch"
        seconds = {size: times[str(size)] for size in product_sizes}
        share = matmul_share(case_flops(case, 0, shape), times["ours"], seconds)
        best = max(2 * size**3 / statistics.median(each) / 1e9 for size, each in seconds.items())
        metrics |= {
            f"eagle3_step_matmul_share/{case.precision}": share,
            f"matmul_gflops/{case.precision}": Metric(best, n=case.repeats),
        }
    return metrics


def _middle(rates: Sequence[float]) -> Metric:
    """The median; the interval spans the repeats."""
    return Metric(statistics.median(rates), (min(rates), max(rates)), len(rates))
