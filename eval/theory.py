"""What a chain of drafted tokens gains, by formula: python -m eval.theory writes a table, theory.json and theory.png.

Of K drafted tokens each is accepted with chance alpha, independently, until the first rejection; a round emits the
accepted ones and one of the target's own. A drafted token costs c target steps (Leviathan et al. 2023,
arXiv:2211.17192, eq. 1 and theorem 3.8):

    tokens    (1 - alpha^(K+1)) / (1 - alpha)
    speed-up  (1 - alpha^(K+1)) / ((1 - alpha) (1 + K c))

1. the formulas over ALPHAS and DRAFT_LENS; the best K at the costs of DRAFT_COSTS
2. the same tokens from `verify_chain`, the rule of the decode loop, on distributions that overlap by alpha
3. the table, the plot and the file; a formula that the simulation contradicts ends the command with exit code 1

Real acceptance is not independent: it differs by depth and text. `tau_from_depths` in results.json takes the depths as
measured.
"""

import json
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from omegaconf import DictConfig

from eval.entry import entry
from eval.plots import COLOURS, DASHES, DPI, MARKERS
from eval.report import print_table
from eval.results import run_info, write_atomic
from eval.verification import verify_chain

ALPHAS = np.arange(30, 96, 5) / 100  # 0.30, 0.35 .. 0.95
DRAFT_LENS = np.arange(1, 17)
BEST_ALPHAS = (0.5, 0.7, 0.9)
DRAFT_COSTS = (0.0, 0.05, 0.1, 0.2, 0.5)
NUM_ROUNDS = 20_000  # simulated, for each alpha and K
FALSE_ALARM = 1e-3  # chance that a right formula fails the whole check
Z95 = NormalDist().inv_cdf(0.975)


def expected_tokens(alpha: ArrayLike, draft_len: ArrayLike) -> np.ndarray:
    """Tokens a round, the target's own included: 1 + alpha + .. + alpha^K. From 1 at alpha = 0 to K + 1 at alpha = 1.

    alpha in [0, 1] and draft_len >= 0 broadcast. Accurate to rounding near 1 too, where 1 - alpha^(K+1) would cancel.
    ValueError outside of these.
    """
    alpha, draft_len = np.asarray(alpha, dtype=np.float64), np.asarray(draft_len, dtype=np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha={alpha}: a chance is between 0 and 1")
    if not np.all(draft_len >= 0):
        raise ValueError(f"draft_len={draft_len}: must be 0 or more")
    rejection = 1 - alpha
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens = -np.expm1((draft_len + 1) * np.log1p(-rejection)) / rejection
    return np.where(rejection == 0, draft_len + 1, tokens)


def expected_speedup(
    alpha: ArrayLike, draft_len: ArrayLike, draft_cost: ArrayLike, verify_cost: ArrayLike = 1.0
) -> np.ndarray:
    """Time of a plain token over time of a speculative one; below 1 speculation is slower.

    tokens / (verify_cost + K c). draft_cost c: one draft step in target steps. verify_cost: the forward of K+1 tokens
    in target steps, 1 where a forward's time does not depend on its few tokens.
    """
    return expected_tokens(alpha, draft_len) / (np.asarray(verify_cost) + np.asarray(draft_len) * draft_cost)


def best_draft_len(
    alpha: ArrayLike, draft_cost: ArrayLike, *, max_draft_len: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """(K, speed-up) of the fastest K in 1 .. max_draft_len, the shorter one of equals.

    Some K gains exactly where alpha > c (corollary 3.9); elsewhere the speed-up is at most 1, so decode plainly.
    """
    alpha, draft_cost = np.broadcast_arrays(np.asarray(alpha, dtype=np.float64), draft_cost)
    draft_lens = np.arange(1, max_draft_len + 1)  # (K,)
    speedups = expected_speedup(alpha[..., None], draft_lens, draft_cost[..., None])  # (..., K)
    best = speedups.argmax(-1)
    return draft_lens[best], np.take_along_axis(speedups, best[..., None], -1)[..., 0]


def simulate_tokens(alpha: float, draft_len: int, *, num_rounds: int, seed: int) -> tuple[float, float]:
    """(mean, standard error) of the tokens a round that `verify_chain` emits.

    Two tokens; draft ((1-d)/2, (1+d)/2), target the other way round, so that they overlap by alpha = 1 - d. The first
    token is always accepted, the second with (1-d)/(1+d): chances that no single token has as its own.
    """
    generator = torch.Generator().manual_seed(seed)
    d = 1 - alpha
    draft_probs = torch.tensor([(1 - d) / 2, (1 + d) / 2], dtype=torch.float64)
    drawn = torch.rand(num_rounds, draft_len, dtype=torch.float64, generator=generator)
    draft_tokens = (drawn >= draft_probs[0]).long()  # (B, K)
    verdict = verify_chain(
        draft_probs.flip(0).expand(num_rounds, draft_len + 1, 2),
        draft_tokens,
        draft_probs.expand(num_rounds, draft_len, 2),
        generator=generator,
    )
    tokens = 1.0 + verdict.num_accepted.double()
    return tokens.mean().item(), tokens.std().item() / num_rounds**0.5


def theory(*, num_rounds: int = NUM_ROUNDS, seed: int = 0) -> dict[str, Any]:
    """What theory.json holds: the formulas' values, the simulated ones with 95 % intervals, and the best K."""
    tokens = expected_tokens(ALPHAS[:, None], DRAFT_LENS)  # (A, K)
    simulated = np.array(
        [
            [
                simulate_tokens(alpha, draft_len, num_rounds=num_rounds, seed=seed + 1000 * i + int(draft_len))
                for draft_len in DRAFT_LENS
            ]
            for i, alpha in enumerate(ALPHAS)
        ]
    )  # (A, K, 2)
    mean, error = simulated[..., 0], simulated[..., 1]
    z = np.abs(mean - tokens) / error
    z_limit = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * z.size))
    best = []
    for alpha in BEST_ALPHAS:
        for cost in DRAFT_COSTS:
            draft_len, speedup = best_draft_len(alpha, cost, max_draft_len=int(DRAFT_LENS[-1]))
            best.append(
                {
                    "alpha": alpha,
                    "draft_cost": cost,
                    "draft_len": int(draft_len),
                    "expected_tokens": float(expected_tokens(alpha, draft_len)),
                    "speedup": float(speedup),
                }
            )
    return {
        **run_info(),
        "alphas": ALPHAS.tolist(),
        "draft_lens": DRAFT_LENS.tolist(),
        "expected_tokens": tokens.tolist(),
        "best": best,
        "simulated": {
            "rounds": num_rounds,
            "seed": seed,
            "mean": mean.tolist(),
            "ci95": np.stack([mean - Z95 * error, mean + Z95 * error], -1).tolist(),
            "inside_ci95": float((z <= Z95).mean()),
            "largest_z": float(z.max()),
            "z_limit": z_limit,
            "agrees": bool(z.max() <= z_limit),
        },
    }


def plot_theory(results: dict[str, Any], path: str | Path) -> Path:
    """Above on the left: tokens a round by K, curves of the formula and simulated points with 95 % intervals. Then a
    panel for each alpha of BEST_ALPHAS: speed-up by K at each draft cost, the best K marked."""
    figure = Figure(figsize=(11.0, 8.6), dpi=DPI, layout="constrained")
    grid = figure.subplots(2, 2)
    axes = grid[0, 0]
    fine = np.linspace(1, DRAFT_LENS[-1], 200)
    simulated = results["simulated"]
    for i, alpha in enumerate((0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)):
        colour, marker, row = COLOURS[i % 6], MARKERS[i % 6], results["alphas"].index(alpha)
        low, high = np.array(simulated["ci95"][row]).T
        mean = np.array(simulated["mean"][row])
        axes.plot(fine, expected_tokens(alpha, fine), color=colour, linestyle=DASHES[i // 6], linewidth=1.4)
        axes.errorbar(
            DRAFT_LENS, mean, yerr=[mean - low, high - mean], color=colour, marker=marker, markersize=4, capsize=2,
            linestyle="none", label=f"{alpha:g}",
        )  # fmt: skip
    axes.set(title="tokens a target forward", xlabel="drafted tokens K", ylabel="tokens a round")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], frameon=False, loc="upper left",
        title=f"alpha (lines: formula; points:\n{simulated['rounds']:,} simulated rounds, 95 %)",
        title_fontsize=8, fontsize=8,
    )  # fmt: skip
    for axes, alpha in zip(grid.flat[1:], BEST_ALPHAS):
        for i, cost in enumerate(DRAFT_COSTS):
            axes.plot(
                DRAFT_LENS, expected_speedup(alpha, DRAFT_LENS, cost), color=COLOURS[i], marker=MARKERS[i],
                markersize=3.5, linewidth=1.4, label=f"c = {cost:g}",
            )  # fmt: skip
            draft_len, speedup = best_draft_len(alpha, cost)
            axes.plot(
                draft_len, speedup, color=COLOURS[i], marker="o", markersize=11, fillstyle="none", linestyle="none"
            )
            axes.annotate(
                f"K = {draft_len}", (draft_len, speedup), xytext=(0, -16 if draft_len == 1 else 9),
                textcoords="offset points", fontsize=8, color=COLOURS[i],
                ha="right" if draft_len == DRAFT_LENS[-1] else "center",
            )  # fmt: skip
        axes.axhline(1, color="black", linewidth=1, linestyle=":")
        axes.margins(y=0.12)
        axes.set(
            title=f"alpha = {alpha:g}: speed-up, best K ringed", xlabel="drafted tokens K",
            ylabel="plain time / speculative time",
        )  # fmt: skip
    grid[1, 1].legend(
        frameon=False, loc="upper left", title="a draft step in target steps", title_fontsize=8, fontsize=8
    )
    for axes in grid.flat:
        axes.set_xticks([1, 2, 4, 6, 8, 10, 12, 14, 16])
        axes.set_xlim(0, DRAFT_LENS[-1] + 0.6)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Chain speculation by formula, K tokens of independent acceptance alpha", fontsize=12)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def print_theory(results: dict[str, Any]) -> None:
    shown = [i for i, draft_len in enumerate(results["draft_lens"]) if draft_len in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)]
    print_table(
        "Tokens a target forward, (1 - alpha^(K+1)) / (1 - alpha)",
        ("alpha", *(f"K={results['draft_lens'][i]}" for i in shown)),
        [
            (f"{alpha:.2f}", *(f"{row[i]:.2f}" for i in shown))
            for alpha, row in zip(results["alphas"], results["expected_tokens"])
        ],
    )
    cells = {
        (b["alpha"], b["draft_cost"]): f"K={b['draft_len']} {b['speedup']:.2f}x{' slower' if b['speedup'] < 1 else ''}"
        for b in results["best"]
    }
    print_table(
        f"Best K in 1..{results['draft_lens'][-1]} and its speed-up, by draft cost c (draft step / target step)",
        ("alpha", *(f"c={cost:g}" for cost in DRAFT_COSTS)),
        [(f"{alpha:g}", *(cells[alpha, cost] for cost in DRAFT_COSTS)) for alpha in BEST_ALPHAS],
        note="c = 0 has no end: each further token adds alpha^K, so the longest wins",
    )
    simulated = results["simulated"]
    print(
        f"simulation ({simulated['rounds']:,} rounds of the verification rule for each alpha and K): the formula is "
        f"inside {simulated['inside_ci95']:.1%} of the 95 % intervals; largest distance {simulated['largest_z']:.2f} "
        f"standard errors, at most {simulated['z_limit']:.2f} expected: "
        f"{'agrees' if simulated['agrees'] else 'DISAGREES'}"
    )


@entry("theory")
def main(cfg: DictConfig) -> None:
    results = theory(num_rounds=NUM_ROUNDS, seed=cfg.seed)
    folder = Path(cfg.output_root) / "theory"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "theory.json", json.dumps(results, indent=1) + "\n")
    plot_theory(results, folder / "theory.png")
    print_theory(results)
    for name in ("theory.json", "theory.png"):
        print(folder / name)
    if not results["simulated"]["agrees"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
