"""The progress bar: counts, rate and remaining time on a terminal, few lines elsewhere."""

from __future__ import annotations

import io

import pytest

from rtkernels.runtime.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_shows_count_rate_and_time_left() -> None:
    stream, clock = Terminal(), Clock()
    with Bar(600, "kernels", stream, clock=clock) as bar:
        clock.now = 10.0
        bar.step(120)
        assert (
            stream.getvalue().endswith("] 120/600 kernels, 12.0/s, 0:40 left\x1b[K") and "\n" not in stream.getvalue()
        )
        clock.now = 10.01
        bar.step()
        assert "121/600" not in stream.getvalue(), "drawn at most ten times a second"
        clock.now = 50.0
        bar.step(479)
        assert "[########" in stream.getvalue() and stream.getvalue().endswith("600/600 kernels, 12.0/s\x1b[K")
    assert stream.getvalue().endswith(" \r"), "erased at the end"


def test_a_log_gets_about_ten_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    bar = Bar(1000, "rows", stream, clock=clock)
    for _ in bar.over(range(1000)):
        clock.now += 2.0
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[0] == "100/1000 rows, 2.0 s each, 200 s" and "\r" not in stream.getvalue()
    list(bar.over(range(1000)))
    assert len(stream.getvalue().splitlines()) == 20 and bar.done == 1000, "it can count again"
    silent = io.StringIO()
    for _ in Bar(10, "rows", silent, lines=False).over(range(10)):
        pass
    assert silent.getvalue() == ""


def test_lines_are_told_above_the_bar() -> None:
    stream, out, clock = Terminal(), io.StringIO(), Clock()
    bar = Bar(4, "rows", stream, clock=clock)
    bar.tell("before", out)
    clock.now = 1.0
    bar.step()
    bar.tell("between", out)
    lines: list[str] = []
    bar.around(lines.append)("logged")
    assert lines == ["logged"]
    assert out.getvalue() == "before\nbetween\n" and stream.getvalue().count("1/4 rows") == 3, "drawn again below"


def test_bytes_are_counted_in_gigabytes() -> None:
    stream, clock = Terminal(), Clock()
    bar = Bar(3 * 10**9, "GB", stream, clock=clock)
    clock.now = 2.0
    bar.step(10**9)
    assert stream.getvalue().endswith("1.00/3.00 GB, 0.50 GB/s, 0:04 left\x1b[K")


@pytest.mark.parametrize("total", (0, 1))
def test_little_or_nothing_to_do(total: int) -> None:
    stream = Terminal()
    with Bar(total, "rows", stream) as bar:
        bar.step(total)
    assert f"{total}/{total} rows" in stream.getvalue()
