"""What the target says about each token, as token-major columns: the content of a cache, and of a batch trained online.

1. Packed rows of similar length become right-padded (B, T) batches: attention is causal, so no mask is needed.
2. The target's blocks give the post-norm final state; padding is dropped again.
3. The head runs over chunks of tokens, so that logits never take more than a fixed budget; `topk` keeps the largest
   log-probabilities of the full softmax and the mass of the rest, `hidden` the state and the softmax's normaliser.

Row t describes the target's distribution of token t + 1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.errors import UserError
from models.target import Target

SIGNALS = ("topk", "hidden")
TAIL_FLOOR = -87.0  # log of a tail without mass: exp(-87) is the smallest normal fp32, and the column stays finite
HEAD_CHUNK_BYTES = 1 << 27  # of logits at a time on a CPU: the head's weights are read once for ~1000 tokens
HEAD_CHUNK_BYTES_GPU = 1 << 29
REDUCE_TOKENS = 64  # tokens whose fp32 probabilities are alive at a time on a CPU: they stay in its caches
TOP_K_BLOCKS = 64


@dataclass(frozen=True)
class SignalSpec:
    """Which columns a cache holds.

    signal: `topk` (the top_k largest log-probabilities and the tail) or `hidden` (final state and normaliser).
    tap_ids: residual streams kept as well (EAGLE-3), as the target was loaded with; None for none.
    Raises UserError on an unknown signal or a top_k below 1.
    """

    signal: str = "topk"
    top_k: int = 64
    tap_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise UserError(f"cache.signal={self.signal}: unknown; use one of {', '.join(SIGNALS)}")
        if self.signal == "topk" and self.top_k < 1:
            raise UserError(f"cache.top_k={self.top_k}: must be at least 1")
        if self.tap_ids is not None:
            object.__setattr__(self, "tap_ids", tuple(int(i) for i in self.tap_ids))

    def check(self, target: Target) -> None:
        """Raise UserError where this target cannot give these columns."""
        if self.signal == "topk" and self.top_k > target.vocab_size:
            raise UserError(f"cache.top_k={self.top_k}: the target has only {target.vocab_size} ids; set it to fewer")
        if self.tap_ids is not None and self.tap_ids != target.tap_ids:
            raise UserError(
                f"target.tap_ids: the cache wants {list(self.tap_ids)} and the target was loaded with "
                f"{target.tap_ids and list(target.tap_ids)}; load it with the same ids"
            )

    def columns(self, hidden_size: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> (dtype, shape of one token) of every column of the signal."""
        columns: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if self.signal == "topk":
            columns["topk_ids"] = (torch.int32, (self.top_k,))
            columns["topk_logprobs"] = (torch.float16, (self.top_k,))
            columns["tail_logprob"] = (torch.float32, ())
        else:
            columns["final_hidden"] = (dtype, (hidden_size,))
            columns["logsumexp"] = (torch.float32, ())
        if self.tap_ids is not None:
            columns["taps"] = (torch.bfloat16, (len(self.tap_ids), hidden_size))
        return columns


def split_specs(spec: SignalSpec) -> dict[str, SignalSpec]:
    """Columns of each split's cache. The held-out one always keeps the whole distribution: from a top-k signal alpha is
    only known up to its tail, and `val/alpha` must be no bound."""
    return {"train": spec, "held_out": SignalSpec("hidden", tap_ids=spec.tap_ids)}


@torch.no_grad()
def target_columns(
    target: Target,
    input_ids: Tensor,  # (N,) packed rows
    row_offsets: Tensor,  # (R+1,)
    spec: SignalSpec,
) -> dict[str, Tensor]:  # every value (N, ...), on the target's device
    """The signal's columns of packed rows, in the cache's dtypes (DESIGN section 4).

    Positions restart at each row. Values are those of the target alone on each row, whatever rows come along.
    """
    spec.check(target)
    offsets = np.asarray(row_offsets.cpu(), dtype=np.int64)
    input_ids = input_ids.to(target.device, torch.long)
    groups = length_groups(np.diff(offsets))
    if len(groups) == 1:
        return _group_columns(target, input_ids, offsets, groups[0], spec)[1]
    columns: dict[str, Tensor] = {}
    for rows in groups:
        tokens, values = _group_columns(target, input_ids, offsets, rows, spec)
        for name, value in values.items():
            if name not in columns:
                columns[name] = value.new_empty((len(input_ids), *value.shape[1:]))
            columns[name][tokens] = value
    return columns


def length_groups(lengths: np.ndarray, max_tokens: int | None = None, min_ratio: float = 0.75) -> list[np.ndarray]:
    """Split rows into groups of similar length, longest first, row numbers ascending inside a group.

    In a group no row is shorter than min_ratio of the longest, so padding stays below 1 - min_ratio; max_tokens bounds
    the padded size (a single longer row is a group of its own).
    """
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    groups, start = [], 0
    while start < len(order):
        longest = int(ordered[start])
        end = int(np.searchsorted(-ordered, -min_ratio * longest, side="right"))
        if max_tokens is not None:
            end = min(end, start + max(1, max_tokens // max(longest, 1)))
        groups.append(np.sort(order[start:end]))
        start = end
    return groups


def _group_columns(
    target: Target, input_ids: Tensor, offsets: np.ndarray, rows: np.ndarray, spec: SignalSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """One padded forward. Returns the packed positions (n,) of the group's tokens and their columns."""
    starts = torch.from_numpy(offsets[rows]).to(input_ids.device)  # (B,)
    lengths = torch.from_numpy(offsets[rows + 1] - offsets[rows]).to(input_ids.device)  # (B,)
    steps = torch.arange(int((offsets[rows + 1] - offsets[rows]).max()), device=input_ids.device)  # (T,)
    is_token = steps < lengths[:, None]  # (B, T)
    positions = starts[:, None] + steps  # (B, T) into the packed tokens
    batch = torch.where(is_token, input_ids[positions.clamp(max=len(input_ids) - 1)], 0)  # (B, T)
    states = target.states(batch)
    final_hidden = states.final_hidden[is_token]  # (n, D)
    columns = _topk_columns(target, final_hidden, spec.top_k) if spec.signal == "topk" else None
    if columns is None:
        columns = {"final_hidden": final_hidden, "logsumexp": _logsumexp(target, final_hidden)}
    if spec.tap_ids is not None:
        columns["taps"] = states.taps[is_token].to(torch.bfloat16)  # (n, L, D)
    return positions[is_token], columns


def _topk_columns(target: Target, final_hidden: Tensor, k: int) -> dict[str, Tensor]:  # (n, D)
    n, device = len(final_hidden), final_hidden.device
    ids = torch.empty(n, k, dtype=torch.int32, device=device)
    logprobs = torch.empty(n, k, dtype=torch.float16, device=device)
    tail = torch.empty(n, dtype=torch.float32, device=device)
    for start, logits in _logit_chunks(target, final_hidden):  # (c, V)
        chunk = slice(start, start + len(logits))
        top_logits, top_ids = _top_k(logits, k)  # (c, k) twice
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)  # (c, V)
        top_logits = top_logits.float()
        # log Z from the largest probability, which is at least 1 / V: no log of an underflowed number
        log_z = top_logits[:, :1] - probs.gather(1, top_ids[:, :1]).log()  # (c, 1)
        ids[chunk] = top_ids.to(torch.int32)
        logprobs[chunk] = (top_logits - log_z).clamp(max=0).to(torch.float16)
        probs.scatter_(1, top_ids, 0.0)
        tail[chunk] = probs.sum(1).log().clamp(min=TAIL_FLOOR)  # a NaN stays one: the writer refuses it by name
    return {"topk_ids": ids, "topk_logprobs": logprobs, "tail_logprob": tail}


def _logsumexp(target: Target, final_hidden: Tensor) -> Tensor:  # (n, D) -> (n,)
    result = torch.empty(len(final_hidden), dtype=torch.float32, device=final_hidden.device)
    for start, logits in _logit_chunks(target, final_hidden):  # (c, V)
        top_logits, top_ids = logits.max(dim=-1, keepdim=True)  # (c, 1) twice
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)  # one fused pass, faster than torch.logsumexp
        log_z = top_logits.float() - probs.gather(1, top_ids).log()  # (c, 1)
        result[start : start + len(logits)] = log_z[:, 0]
    return result


def _logit_chunks(target: Target, final_hidden: Tensor):  # (n, D) -> (start, (c, V)) ...
    """Logits of consecutive tokens: a large product for the head, small pieces of it for the reductions."""
    is_cpu = final_hidden.device.type == "cpu"
    budget = HEAD_CHUNK_BYTES if is_cpu else HEAD_CHUNK_BYTES_GPU
    head_tokens = max(REDUCE_TOKENS, budget // (target.vocab_size * final_hidden.element_size()))
    for start in range(0, len(final_hidden), head_tokens):
        logits = target.logits(final_hidden[start : start + head_tokens])  # (h, V)
        for piece in range(0, len(logits), REDUCE_TOKENS if is_cpu else len(logits)):
            yield start + piece, logits[piece : piece + REDUCE_TOKENS] if is_cpu else logits


def _top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (c, V) -> (c, k) values, (c, k) int64 ids, descending
    """Exact top k in two stages: the k largest lie in the k blocks of ids with the largest maxima.

    Block j holds the ids j, j + width, j + 2 width, ...: the maxima are then taken across contiguous memory.
    """
    c, vocab_size = logits.shape
    width = vocab_size // TOP_K_BLOCKS
    if width < 2 * k:
        return logits.topk(k, dim=-1)
    covered = TOP_K_BLOCKS * width
    blocks = logits[:, :covered].view(c, TOP_K_BLOCKS, width)
    best = blocks.amax(1).topk(k, dim=-1, sorted=False).indices  # (c, k) the blocks to look into
    picked = blocks.gather(2, best[:, None].expand(c, TOP_K_BLOCKS, k)).reshape(c, TOP_K_BLOCKS * k)
    values, slots = torch.cat([picked, logits[:, covered:]], dim=1).topk(k, dim=-1)  # (c, k) twice
    from_rest = slots - picked.shape[1] + covered
    from_block = (slots // k) * width + best.gather(1, slots % k)
    return values, torch.where(slots < picked.shape[1], from_block, from_rest)
