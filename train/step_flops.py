"""How much work an EAGLE-3 training step cannot do without, and what share of its time that explains.

1. Count the slots that matter, from the loss mask alone.
2. Floating point operations of the products with weights over these slots, forward and backward.
3. Share = their time at the speed of a large matrix product, over the step's time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eval.results import Metric


@dataclass(frozen=True)
class HeadShape:
    """Shape of both heads, by default that for the embedded target. lm_head is trained on both sides or on neither."""

    hidden_size: int = 576  # D
    intermediate_size: int = 1536
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49_152  # V
    draft_vocab_size: int = 8192  # Vd
    num_steps: int = 7  # simulated
    train_lm_head: bool = True


@dataclass(frozen=True)
class SlotCounts:
    """Slots of a batch that the step has to compute."""

    counted: list[int]  # at each simulated step: slots that count in the loss
    context: int  # at step 0: slots up to the last counted one of their row, whose keys it may read
    targets: int  # positions whose target distribution some counted slot learns


def count_slots(loss_mask: np.ndarray, row_offsets: np.ndarray, *, num_steps: int) -> SlotCounts:
    """Slot p counts at step s when x[p+1] .. x[p+2+s] are in one row and all in the mask.

    A run of r masked tokens so gives r - 1 - s slots at step s: the first is the one before the run. Where the run
    begins its row there is none, and one slot fewer.
    """
    counted, context, targets = [0] * num_steps, 0, 0
    for begin, end in pairwise(row_offsets.tolist()):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask[begin:end].astype(np.int8), [0]])))
        last = -1  # counted slot of the row
        for first, stop in zip(edges[::2].tolist(), edges[1::2].tolist()):
            num_slots = stop - first - 1 - (first == 0)  # at step 0
            if num_slots > 0:
                counted = [count + max(num_slots - step, 0) for step, count in enumerate(counted)]
                targets, last = targets + num_slots, stop - 3
        context += last + 1
    return SlotCounts(counted, context, targets)


def necessary_flops(shape: HeadShape, slots: SlotCounts) -> int:
    """Floating point operations of the products with weights that one step cannot do without, forward and backward.

    A product of n rows with an (a, b) matrix is 2nab; its backward is two more of the same size (gradients of input and
    weight), one where the input's is not wanted. Nothing is computed twice: the half of q, k and v that reads the
    token's embedding is shared by all pairs of slot and step that read this token, and since the embedding is frozen
    its backward is the weight's gradient alone (that of the norm's gain follows from it). Attention scores, norms,
    softmax and the optimiser are left out.
    """
    s, size = shape, shape.hidden_size
    q_width, kv_width = s.num_heads * s.head_dim, 2 * s.num_kv_heads * s.head_dim
    all_counted, later = sum(slots.counted), sum(slots.counted[1:])
    products = [  # rows, width in, width out, how many times
        (slots.context, 3 * size, size, 2),  # fc: the taps need no gradient
        (slots.context, size, kv_width, 2 + 3),  # keys and values of step 0: from the token, from the state
        (slots.counted[0], size, q_width, 2 + 3),
        (later, size, q_width + kv_width, 3),  # later steps read the tokens of step 0 again, at other slots
        (all_counted, q_width, size, 3),
        (all_counted, size, 2 * s.intermediate_size, 3),  # gate and up
        (all_counted, s.intermediate_size, size, 3),
        (all_counted, size, s.draft_vocab_size, 3 if s.train_lm_head else 2),
        (slots.targets, size, s.draft_vocab_size, 1),  # the target's head, once a position
    ]
    return sum(2 * rows * wide * out * times for rows, wide, out, times in products)


def matmul_share(
    flops: int,
    step_seconds: Sequence[float],
    product_seconds: Mapping[int, Sequence[float]],  # by size of the square product
) -> Metric:
    """Share of the step's time that its necessary products would take at the speed of the faster large product.

    flops / (max over n of 2n^3 / median(seconds of n)) / median(step_seconds); the interval resamples turns.
    """
    steps = np.asarray(step_seconds)
    products = {size: np.asarray(seconds) for size, seconds in product_seconds.items()}

    def share(turns: np.ndarray) -> np.ndarray:  # (..., turns) -> (...)
        rates = [2 * size**3 / np.median(seconds[turns], -1) for size, seconds in products.items()]
        return flops / np.max(rates, 0) / np.median(steps[turns], -1)

    draws = np.random.default_rng(0).integers(0, len(steps), (1000, len(steps)))
    low, high = np.quantile(share(draws), [0.025, 0.975])
    return Metric(float(share(np.arange(len(steps)))), (float(low), float(high)), len(steps))
