"""Progress of long steps: what is done, units a second, time left. A live bar on a terminal, a plain line now and then
elsewhere (logs, CI)."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """`with ProgressBar("caching", total, "tokens") as bar: bar.advance(n)`; the rate counts this process' work only.

    done: units finished before this process began (a resumed job): they fill the bar but do not count in the rate.
    """

    def __init__(self, description: str, total: int, unit: str, *, done: int = 0, line_every_s: float = 10.0):
        self.description, self.total, self.unit = description, total, unit
        self.done, self._new = done, 0
        self._line_every_s = line_every_s
        self._live: Progress | None = None

    def __enter__(self) -> "ProgressBar":
        self._start = self._last_line = time.monotonic()
        if sys.stderr.isatty():
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._live.start()
            self._task = self._live.add_task(self.description, total=self.total, completed=self.done, rate="")
        return self

    @property
    def rate(self) -> float:
        """Units a second of this process so far."""
        return self._new / max(time.monotonic() - self._start, 1e-9)

    def _told_rate(self) -> str:
        return f"{self.rate:,.0f} {self.unit}/s" if self.rate >= 10 else f"{self.rate:.2g} {self.unit}/s"

    def advance(self, count: int) -> None:
        self.done += count
        self._new += count
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=self.done, rate=self._told_rate())
        elif now - self._last_line >= self._line_every_s or self.done >= self.total:
            self._last_line = now
            left = max(self.total - self.done, 0) / max(self.rate, 1e-9)
            print(
                f"{self.description}: {self.done:,}/{self.total:,} {self.unit}, {self._told_rate()}, "
                f"{left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
