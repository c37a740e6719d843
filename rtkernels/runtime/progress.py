"""Progress of long work: a bar with rate and remaining time on a terminal, about ten lines in a log.

tqdm is not used: it is not among the dependencies (torch and numpy), and into a log it writes a line per redraw.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

_REDRAW_S = 0.1


class Bar:
    """Counts `total` items of work that are called `unit`; one of ``"GB"`` is counted in bytes.

    Args:
        total: Number of items, or of bytes.
        unit: What they are, in the plural.
        stream: Where the bar is drawn. Default: stderr.
        lines: Print about ten lines if the stream is not a terminal.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        stream: TextIO | None = None,
        *,
        lines: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total, self.unit, self.done = total, unit, 0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._lines, self._clock, self._started = lines, clock, clock()
        self._tenths, self._drawn = 0, float("-inf")

    def step(self, count: int = 1) -> None:
        """Count finished work and show it."""
        self.done += count
        if self._terminal:
            if self.done >= self.total or self._clock() - self._drawn >= _REDRAW_S:
                self._draw()
        elif self._lines and (tenths := 10 * self.done // max(self.total, 1)) > self._tenths:
            self._tenths = tenths
            print(f"{self._count()}{self._rate()}, {self._passed():.0f} s", file=self._stream, flush=True)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, each of which is counted when the next one is asked for; count and time begin at 0."""
        self._started, self.done, self._tenths = self._clock(), 0, 0
        for item in items:
            yield item
            self.step()

    def tell(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line above the bar."""
        out = self._stream if stream is None else stream
        self.around(lambda line: print(line, file=out, flush=True))(text)

    def around(self, log: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that logs a line above the bar."""

        def logged(text: str) -> None:
            self._wipe()
            log(text)
            if self._drawn > float("-inf"):
                self._draw()

        return logged

    def close(self) -> None:
        """Erase the bar."""
        self._wipe()
        self._drawn = float("-inf")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _passed(self) -> float:
        return self._clock() - self._started

    def _count(self) -> str:
        if self.unit == "GB":
            return f"{self.done / 1e9:.2f}/{self.total / 1e9:.2f} GB"
        return f"{self.done}/{self.total} {self.unit}"

    def _rate(self) -> str:
        passed = self._passed()
        if not self.done or passed <= 0:
            return ""
        rate = self.done / passed
        if self.unit == "GB":
            return f", {rate / 1e9:.2f} GB/s"
        return f", {rate:.1f}/s" if rate >= 1 else f", {1 / rate:.1f} s each"

    def _left(self) -> str:
        if not 0 < self.done < self.total:
            return ""
        seconds = round(self._passed() * (self.total - self.done) / self.done)
        return f", {seconds // 60}:{seconds % 60:02} left"

    def _draw(self) -> None:
        self._drawn = self._clock()
        text = f"{self._count()}{self._rate()}{self._left()}"
        width = max(10, min(40, shutil.get_terminal_size().columns - len(text) - 4))
        solid = width * min(self.done, self.total) // max(self.total, 1)
        self._stream.write(f"\r[{'#' * solid}{'.' * (width - solid)}] {text}\x1b[K")
        self._stream.flush()

    def _wipe(self) -> None:
        if self._terminal:
            self._stream.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
            self._stream.flush()
