"""`fallback=auto`: plain steps while speculation gains nothing, by what rounds and plain steps took in the same text.

    gain = tokens a round / seconds a round * seconds of a plain step

1. a few plain steps, then a few speculative rounds
2. the gain of the last rounds is below 1: pause, that is, plain steps; the next pause is twice as long
3. behind a pause a few rounds are a probe: a gain ends the pausing, and the next pause is short again
4. while speculating, now and then a plain step: its seconds grow with the text

The text stays exact though the decisions follow the clock. Round and plain step both continue a committed prefix as the
target would, whatever the prefix. `wants_plain` is asked before anything of the next round is drawn, so it depends on
the prefix, on earlier draws and on times; given all of these, the next tokens are the target's either way. A decision
that saw the round's own verdict would be wrong: to drop rounds for a rejection leaves out what comes of rejections.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from models.errors import UserError

FALLBACKS = ("never", "auto")
NUM_PLAIN = 3  # plain steps at the beginning
NUM_ROUNDS = 6  # timed rounds before the first judgement, and of a probe
WINDOW = 16  # rounds that are judged at most
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # plain steps
PLAIN_EVERY = 64  # rounds


class Fallback:
    """Decides round by round, from nothing but what was added. One that serves several texts knows the former."""

    def __init__(self) -> None:
        self._plain_left = NUM_PLAIN
        self._pause = FIRST_PAUSE
        self._num_rounds = 0  # since the last plain step
        self._tokens: deque[int] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._plain_seconds: deque[float] = deque(maxlen=WINDOW)

    def wants_plain(self) -> bool:
        """Whether the next round should be a plain step."""
        return self._plain_left > 0

    def add(self, num_tokens: int, seconds: float, *, is_plain: bool) -> None:
        """A round or plain step that emitted `num_tokens`."""
        if is_plain:
            self._plain_seconds.append(seconds)
            self._plain_left = max(0, self._plain_left - 1)
            self._num_rounds = 0
            return
        self._tokens.append(num_tokens)
        if self._num_rounds:  # the first one behind a pause also reads what the draft has missed
            self._seconds.append(seconds)
        self._num_rounds += 1
        if len(self._seconds) < NUM_ROUNDS:
            return
        if gain(self._tokens, self._seconds, self._plain_seconds) < 1:
            self._plain_left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._tokens.clear()
            self._seconds.clear()
        else:
            self._pause = FIRST_PAUSE
            self._plain_left = int(self._num_rounds >= PLAIN_EVERY)


def gain(tokens: Sequence[int], seconds: Sequence[float], plain_seconds: Sequence[float]) -> float:
    """Tokens that rounds emit in the time of one plain token. Medians of seconds: a hiccup of the machine counts once.

    Infinite while no plain step was timed.
    """
    return fmean(tokens) / median(seconds) * median(plain_seconds) if plain_seconds else float("inf")


def make_fallback(fallback: "str | Fallback") -> Fallback | None:
    """Raises UserError for an unknown name."""
    if fallback not in FALLBACKS and isinstance(fallback, str):
        raise UserError(f"decode.fallback={fallback}: unknown; use {' or '.join(FALLBACKS)}")
    return None if fallback == "never" else Fallback() if fallback == "auto" else fallback
