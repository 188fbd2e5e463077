"""The draft vocabulary of a head: the ids that a draft most often has to predict."""

import numpy as np

from data.rows import Rows


def frequent_ids(rows: Rows, size: int, vocab_size: int) -> np.ndarray:  # (size,) int64, ascending
    """The `size` most frequent supervised ids of the rows; then the most frequent others; ties by smaller id."""
    supervised = np.bincount(rows.input_ids[rows.loss_mask], minlength=vocab_size)
    others = np.bincount(rows.input_ids, minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -others, -supervised))
    return np.sort(order[:size]).astype(np.int64)


def coverage(rows: Rows, ids: np.ndarray) -> float:
    """Share of the supervised tokens that are among `ids`: an upper bound of any acceptance on them."""
    supervised = rows.input_ids[rows.loss_mask]
    return float(np.isin(supervised, ids).mean()) if len(supervised) else float("nan")
