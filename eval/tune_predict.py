"""From a profile of the machine and replayed acceptance to predicted speed-ups, break-even points and a choice.

round_s   = target forward of nodes + 1 tokens + drafting + loop
text_s    = prefill + (N - 1) / tau * round_s        tau = 1 and round_s = plain step for plain decoding
speed-up  = text_s of plain decoding / text_s
break-even tau = round_s / plain step: with fewer tokens a round, plain decoding is faster
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from eval.theory import expected_tokens
from eval.tree import TreeShape
from eval.tune_profile import DraftProfile, TargetProfile, between
from eval.tune_replay import Replay, rounds_of

STATIC = ("2x1", "3x1", "2x2", "2x1x1", "3x1x1", "2x2x1", "3x2x1", "2x1x1x1", "3x2x1x1", "4x2x1x1", "4x3x2x1")
TOP_KS = (2, 3, 4, 6, 8, 10)
NODES = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 60)


@dataclass(frozen=True)
class Plain:
    """Plain decoding at one temperature."""

    step_s: float  # target forward and loop
    prefill_s: float
    num_tokens: float  # N, of a text


@dataclass(frozen=True)
class Candidate:
    """One way of decoding, predicted. run: the draft's; None where no draft is needed."""

    run: str | None
    method: str
    temperature: float
    tau: float
    num_nodes: float  # drafted a round
    round_s: float
    start_s: float  # what drafting adds to the prefill
    speedup: float
    break_even_tau: float

    @property
    def shape(self) -> TreeShape:
        return TreeShape.parse(self.method)

    @property
    def break_even_alpha(self) -> float | None:
        """Of a chain: the acceptance at which it takes as long as plain decoding; None where no acceptance suffices."""
        return break_even_alpha(self.shape.depth, self.break_even_tau) if self.shape.kind == "chain" else None

    def with_tau(self, tau: float, plain: Plain) -> "Candidate":
        """The same rounds with another acceptance."""
        return candidate(
            self.shape,
            tau,
            self.num_nodes,
            self.round_s,
            self.start_s,
            plain,
            temperature=self.temperature,
            run=self.run,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "break_even_alpha": self.break_even_alpha}


@dataclass(frozen=True)
class Machine:
    """Seconds of everything but the plain loop, for one run at one temperature."""

    target: TargetProfile
    draft: DraftProfile | None
    loop_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # kind of shape -> nodes -> seconds a round
    draftless_s: Mapping[str, float] = field(default_factory=dict)  # kind of shape -> drafting seconds a round

    def round_s(self, shape: TreeShape, num_nodes: np.ndarray, temperature: float) -> np.ndarray:  # (S,) nodes drafted
        is_chain = shape.kind in ("chain", "ngram")
        beside = shape.num_nodes - shape.pool * shape.depth if shape.kind == "lookahead" else 0
        target = self.target.seconds(num_nodes + 1.0 + beside, is_chain=is_chain)
        draft = self.draft.seconds(shape, temperature) if shape.needs_draft else self.draftless_s.get(shape.kind, 0.0)
        loop = between(self.loop_s["tree" if shape.kind in ("static", "dynamic") else shape.kind], num_nodes)
        return target + draft + loop


def chain_shapes(max_chain: int) -> list[TreeShape]:
    return [TreeShape.chain(k) for k in range(1, max_chain + 1)]


def tree_shapes(max_depth: int, max_nodes: int, max_width: int) -> list[TreeShape]:
    """The grid of trees, static and dynamic, with at most these levels, nodes and children of one node."""
    static = [TreeShape.parse(f"static_{name}") for name in STATIC]
    dynamic = [
        TreeShape("dynamic", depth, top_k=top_k, total_tokens=num_nodes)
        for depth in range(2, max_depth + 1)
        for top_k in TOP_KS
        for num_nodes in NODES
        if depth < num_nodes <= top_k + (depth - 1) * top_k**2
    ]
    return [
        shape
        for shape in (*static, *dynamic)
        if shape.depth <= max_depth
        and shape.num_nodes <= max_nodes
        and max(*shape.children, shape.top_k, 0) <= max_width
    ]


def predict(
    shape: TreeShape,
    replays: Sequence[Replay],  # one a text
    machine: Machine,
    plain: Plain,
    *,
    temperature: float,
    run: str | None,
) -> Candidate:
    rounds = places = seconds = nodes = 0.0
    for replay in replays:
        num_rounds, starts = rounds_of(replay, shape.depth)
        num_nodes = np.minimum(replay.num_nodes, shape.depth) if shape.kind in ("chain", "ngram") else replay.num_nodes
        rounds += num_rounds
        places += len(starts)
        nodes += float(starts @ num_nodes)
        seconds += float(starts @ machine.round_s(shape, num_nodes, temperature))
    start_s = machine.draft.start_s if shape.needs_draft else 0.0
    return candidate(
        shape, places / rounds, nodes / rounds, seconds / rounds, start_s, plain, temperature=temperature, run=run
    )


def candidate(
    shape: TreeShape,
    tau: float,
    num_nodes: float,
    round_s: float,
    start_s: float,
    plain: Plain,
    *,
    temperature: float,
    run: str | None,
) -> Candidate:
    """The speed-up that follows from tokens and seconds a round."""
    steps = plain.num_tokens - 1
    plain_s = plain.prefill_s + steps * plain.step_s
    ours_s = plain.prefill_s + start_s + steps / tau * round_s
    return Candidate(
        run=run if shape.needs_draft else None,
        method=str(shape),
        temperature=temperature,
        tau=tau,
        num_nodes=num_nodes,
        round_s=round_s,
        start_s=start_s,
        speedup=plain_s / ours_s,
        break_even_tau=round_s / plain.step_s,
    )


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest first; of equals the one with fewer nodes."""
    return sorted(candidates, key=lambda c: (-c.speedup, c.num_nodes, c.method))


def shortlist(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """What is worth measuring: the best of each draft and kind of shape before a second one like it.

    The best trees are neighbours of one another: four of them would tell no more than one.
    """
    best = ranked(candidates)
    firsts = list({_family(c): c for c in reversed(best)}.values())
    chosen = ranked(firsts)[:count]
    rest = [c for c in best if c not in chosen]
    return ranked([*chosen, *rest[: count - len(chosen)]])


def _family(c: Candidate) -> tuple[str | None, str]:
    return c.run, c.shape.kind


def break_even_alpha(draft_len: int, tau: float) -> float | None:
    """The alpha at which a chain emits `tau` tokens a round, (1 - alpha^(K+1)) / (1 - alpha) = tau; 0 for tau <= 1."""
    if tau <= 1:
        return 0.0
    if tau > draft_len + 1:
        return None
    return _root(lambda alpha: float(expected_tokens(alpha, draft_len)) - tau)


def _root(increasing: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Measured:
    """A candidate's figures out of the loop, each (value, low, high) with its 95 % interval over prompts."""

    candidate: Candidate
    speedup: tuple[float, float, float]
    tau: tuple[float, float, float]
    speedup_at_tau: float  # predicted from the measured tau: what is still off is the machine's profile

    @property
    def error(self) -> float:
        """How far the prediction was off, as a share of what was measured."""
        return self.candidate.speedup / self.speedup[0] - 1

    def to_json(self) -> dict[str, Any]:
        return {
            **self.candidate.to_json(),
            "measured_speedup": self.speedup,
            "measured_tau": self.tau,
            "speedup_at_measured_tau": self.speedup_at_tau,
            "error": self.error,
        }


def choose(measured: Iterable[Measured]) -> Measured | None:
    """The fastest whose interval lies above 1; None: decode plainly, no gain was shown."""
    gaining = [m for m in measured if m.speedup[1] > 1]
    return max(gaining, key=lambda m: m.speedup[0], default=None)
