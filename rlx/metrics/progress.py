"""What a person sees while a run trains: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TextIO

from tqdm import tqdm

BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Shown(NamedTuple):
    """What an update reports to the reader."""

    reward: float  # mean
    pass_rate: float  # fraction
    tokens_per_second: float | None  # None until an update counts
    lag: float  # mean age of the trained tokens, updates


class Progress:
    """One call of `update` for each optimizer update.

    Args:
      total: updates of the run.
      done: updates made before this process (a resumed run).
      skip_updates: the first updates of this process that the time left is not estimated from.
      every_seconds: least time between two lines where the stream is no terminal; the last update always has one.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        skip_updates: int = 3,
        every_seconds: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._skip = total, done, skip_updates
        self._every, self._clock = every_seconds, clock
        self._stream = sys.stderr if stream is None else stream
        self._printed: float | None = None
        self._measured_from, self._measured = clock(), 0
        self._bar = _bar(total, done, self._stream) if self._stream.isatty() else None

    def update(self, shown: Shown) -> None:
        """Reports one more update."""
        now = self._clock()
        self._done += 1
        if self._skip > 0:
            self._skip, self._measured_from = self._skip - 1, now
        else:
            self._measured += 1
        text = _describe(shown, self._seconds_left(now))
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._printed is None or now - self._printed >= self._every or self._done == self._total:
            print(f"update {self._done}/{self._total}, {text}", file=self._stream, flush=True)
            self._printed = now

    def message(self, text: str) -> None:
        """Prints a line above the bar, or as a line of the log."""
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _seconds_left(self, now: float) -> float | None:
        if not self._measured:
            return None
        return (self._total - self._done) * (now - self._measured_from) / self._measured


def _bar(total: int, done: int, stream: TextIO) -> tqdm:
    return tqdm(
        total=total, initial=done, file=stream, desc="update", bar_format=BAR, dynamic_ncols=True, mininterval=0.0
    )


def _describe(shown: Shown, seconds_left: float | None) -> str:
    rate = "-" if shown.tokens_per_second is None else tqdm.format_sizeof(shown.tokens_per_second)
    left = "?" if seconds_left is None else tqdm.format_interval(seconds_left)
    return f"reward {shown.reward:.3f}, pass {shown.pass_rate:.1%}, {rate} tok/s, lag {shown.lag:.1f}, left {left}"
