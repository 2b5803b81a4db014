"""How late an event loop runs its timers: the stall that any other coroutine would have suffered.

A timer is set every two milliseconds, and what it is late by is the lag. A stall is counted once
for each tick that should have happened meanwhile, or one stall of a second among 500 ticks would
vanish from the p99. Knows nothing of what keeps the loop busy. Rejected: a thread that posts to the
loop and waits, which measures the interpreter lock along with the loop.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from .figures import percentile

if TYPE_CHECKING:
    from types import TracebackType

INTERVAL = 0.002
"""Seconds between ticks. uvloop's timers count in whole milliseconds: up to one is its rounding."""


@dataclass(frozen=True, slots=True)
class Lag:
    """What a watch has seen, in seconds."""

    ticks: int
    p50: float
    p99: float
    largest: float


class LagWatch:
    """Measures the running loop between ``async with`` and its end."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._samples = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    async def __aenter__(self) -> Self:
        self._set(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def lag(self) -> Lag:
        """The figures so far; a tick that is overdue now counts too."""
        samples = list(self._samples)
        samples.append(max(0.0, time.perf_counter() - self._due))
        return Lag(len(samples), percentile(samples, 50), percentile(samples, 99), max(samples))

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.perf_counter() + self._interval
        self._timer = loop.call_later(self._interval, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        late = max(0.0, time.perf_counter() - self._due)
        while True:
            self._samples.append(late)
            late -= self._interval
            if late < self._interval:
                break
        self._set(loop)
