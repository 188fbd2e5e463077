"""Bootstrap intervals over prompts or rows: the unit that was drawn at random is the unit resampled."""

import numpy as np
from numpy.typing import ArrayLike

Interval = tuple[float, float, float]  # value, low, high


def ratio_ci(
    numerators: ArrayLike,  # (R,) one sum a prompt, e.g. accepted tokens
    denominators: ArrayLike,  # (R,) e.g. judged tokens
    *,
    n: int = 1000,
    seed: int = 0,
) -> Interval:
    """sum(numerators) / sum(denominators) with its 95 % percentile-bootstrap interval over the R prompts.

    Prompts are drawn with replacement, both sums together. A prompt whose two parts are zero changes nothing.
    nan for all three when the denominators sum to zero (nothing was measured); a single prompt has an
    interval of no width, so read it together with its n.
    """
    top = np.asarray(numerators, dtype=np.float64).reshape(-1)  # (R,)
    bottom = np.asarray(denominators, dtype=np.float64).reshape(-1)  # (R,)
    assert top.shape == bottom.shape, (top.shape, bottom.shape)
    total = bottom.sum()
    if total == 0:
        return (float("nan"),) * 3
    num_rows = len(top)
    rng = np.random.default_rng(seed)
    ratios = []
    block = max(1, 4_000_000 // num_rows)  # bounds the matrix of counts at 32 MB
    for start in range(0, n, block):
        size = min(block, n - start)
        counts = rng.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size)  # (size, R)
        sums = counts @ bottom  # (size,)
        ratios.append((counts @ top)[sums > 0] / sums[sums > 0])
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(top.sum() / total), float(low), float(high)


def bootstrap_ci(
    values: ArrayLike,  # (R,) one figure a prompt
    weights: ArrayLike | None = None,  # (R,) e.g. tokens a prompt; None: every prompt counts the same
    n: int = 1000,
    seed: int = 0,
) -> Interval:
    """Mean of per-prompt figures, sum(weights * values) / sum(weights), and its 95 % interval.

    With weights the interval is that of a ratio of sums: the weights are resampled with their prompts. nan
    when there is nothing to average. Values where the weight is zero are ignored, nan included.
    """
    values = np.asarray(values, dtype=np.float64).reshape(-1)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64).reshape(-1)
    return ratio_ci(np.where(weights > 0, values * weights, 0.0), weights, n=n, seed=seed)
