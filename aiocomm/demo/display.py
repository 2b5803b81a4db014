"""How far the demo is: bars that move on a terminal, a line now and then elsewhere, or nothing.

Called from the thread that reads the workers' notes. The rate shown is what arrived in the last two
seconds by the clock on the wall; the table at the end has the rate of the transfers themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .records import Direction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from .records import Settings
    from .run import Display

WINDOW = 2.0
"""Seconds over which the rate is taken."""

LINE_EVERY = 1.0
"""Seconds between lines where there is no terminal."""


class Rate:
    """Bytes per second over the last WINDOW seconds, from running totals."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, nbytes: int) -> float:
        """Take in the total so far; the rate now."""
        now = time.monotonic()
        self._points.append((now, nbytes))
        while len(self._points) > 2 and self._points[1][0] < now - WINDOW:
            self._points.popleft()
        then, before = self._points[0]
        return (nbytes - before) / max(now - then, 1e-3)


class Bars:
    """On a terminal: one bar for each direction."""

    def __init__(self, progress: Progress, settings: Settings) -> None:
        self._progress = progress
        self._rates = {direction: Rate() for direction in Direction}
        self._bars = {
            direction: progress.add_task(direction, total=settings.total(direction), rate="")
            for direction in Direction
        }

    def update(self, direction: Direction, messages: int, nbytes: int) -> None:
        """See ``Display``."""
        rate = self._rates[direction].add(nbytes)
        self._progress.update(
            self._bars[direction], completed=messages, rate=f"{rate / 1e9:.2f} GB/s"
        )


class Lines:
    """Elsewhere: one plain line for both directions, each second and at the end of each."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._totals = {direction: settings.total(direction) for direction in Direction}
        self._rates = {direction: Rate() for direction in Direction}
        self._texts = {
            direction: f"{direction} 0/{total}" for direction, total in self._totals.items()
        }
        self._next = 0.0
        self._last = ""

    def update(self, direction: Direction, messages: int, nbytes: int) -> None:
        """See ``Display``."""
        total = self._totals[direction]
        rate = self._rates[direction].add(nbytes)
        self._texts[direction] = f"{direction} {messages}/{total} {rate / 1e9:.2f} GB/s"
        line = ", ".join(self._texts.values())
        due = messages == total or time.monotonic() >= self._next
        if due and line != self._last:
            self._next = time.monotonic() + LINE_EVERY
            self._last = line
            self._console.print(line, highlight=False)


class Nothing:
    """Where quiet was asked for."""

    def update(self, direction: Direction, messages: int, nbytes: int) -> None:
        """See ``Display``."""


@contextlib.contextmanager
def showing(console: Console, settings: Settings, *, quiet: bool) -> Iterator[Display]:
    """The display that suits the console."""
    if quiet:
        yield Nothing()
    elif not console.is_terminal:
        yield Lines(console, settings)
    else:
        progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[rate]:>10}"),
            TimeElapsedColumn(),
            console=console,
        )
        with progress:
            yield Bars(progress, settings)
