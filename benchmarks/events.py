"""From the end of device work to the code that waits for it: what the poller of events adds.

The device is a clock: an event is done when its time has come, so nothing but the poller and the
loop is measured, and no thread or driver takes part. A chip adds what its driver takes to tell.

While transfers are under way the poller asks at every turn of the loop: events 30 us apart, one
awaited at a time, alone and beside ten other tasks that take a turn each; by the work of a function
of ``then``; and 10,000 that pend on two streams, of which each turn takes one a stream, so that a
moment without a processor is felt by those behind it too. An event after a rest may be as late as
the longest nap, and is there to show it: it has no bar.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aiocomm.demo.figures import median, percentile
from aiocomm.device import here
from aiocomm.handles import AsyncWork
from aiocomm.transport.completion import poller_of

from .harness import LOOPS, loop_factory
from .outcome import Outcome

if TYPE_CHECKING:
    from aiocomm.device.base import Accelerator

    from .harness import Settings

GAP, REST = 30e-6, 5e-3
PENDING, LINES = 10_000, 2
BAR = 100.0
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Line:
    """A stream."""

    key: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """An event that is done at its time."""

    stream: Line
    at: float

    def query(self) -> bool:
        return time.perf_counter() >= self.at


class Clock:
    """As much of an accelerator as a function of ``then`` needs; what it queues takes ``GAP``."""

    last = Due(Line(0), 0.0)

    def in_use(self) -> bool:
        return True

    def on_cpu(self, _: object) -> bool:
        return True

    def device_of(self, _: object) -> str:
        return CPU

    def current(self) -> int:
        return 0

    def current_stream(self, index: int) -> Line:
        return Line(0, index)

    def record(self, stream: Line) -> Due:
        self.last = Due(stream, time.perf_counter() + GAP)
        return self.last


async def awaited(count: int, gap: float = GAP) -> list[float]:
    """One event after the other; how late each was seen, in seconds."""
    poller, line, late = poller_of(asyncio.get_running_loop()), Line(0), []
    for _ in range(count):
        event = Due(line, time.perf_counter() + gap)
        await poller.watch(event)
        late.append(time.perf_counter() - event.at)
    return late


async def in_company(count: int) -> list[float]:
    """The same while ten other tasks take a turn each."""

    async def other() -> None:
        for _ in range(count * 10_000):  # longer than this takes
            await asyncio.sleep(0)

    others = [asyncio.create_task(other()) for _ in range(10)]
    late = await awaited(count)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    return late


async def chained(count: int) -> list[float]:
    """One function of ``then`` after the other."""
    clock, late = Clock(), []
    with here.standing_in(cast("Accelerator", clock)):
        for _ in range(count):
            first: AsyncWork[None] = AsyncWork(loop=asyncio.get_running_loop())
            work = first.then(lambda _: None)
            first.set_result(None)
            await work
            late.append(time.perf_counter() - clock.last.at)
    return late


async def crowd(count: int) -> list[float]:
    """Many that pend on some streams, each stream's done one after the other."""
    poller, late = poller_of(asyncio.get_running_loop()), []
    futures = []

    def note(event: Due, _: object) -> None:
        late.append(time.perf_counter() - event.at)

    start = time.perf_counter() + count * 50e-6  # they are all there by then
    for number in range(count):
        event = Due(Line(number % LINES), start + number * GAP)
        future = poller.watch(event)
        future.add_done_callback(partial(note, event))
        futures.append(future)
    await asyncio.gather(*futures)
    return late


async def rested(count: int) -> list[float]:
    """As ``awaited``, with a rest before each."""
    return await awaited(count // 20, REST)


Measure = Callable[[int], Coroutine[Any, Any, list[float]]]
KINDS: dict[str, tuple[Measure, tuple[str, ...]]] = {
    "awaited": (awaited, ("median", "p99")),
    "beside ten tasks": (in_company, ("median", "p99")),
    "a function of then": (chained, ("median", "p99")),
    f"{PENDING:,} on {LINES} streams": (crowd, ("median",)),
    f"after {REST * 1e3:g} ms of rest": (rested, ()),
}


def run(settings: Settings) -> Outcome:
    """Measure; bars on what is busy."""
    outcome = Outcome(
        "from an event of a device to who awaits it (the device is a clock)",
        ("loop, kind", "median us", "p99 us", "largest us"),
    )
    for loop in LOOPS:
        for kind, (measure, bars) in KINDS.items():
            count = PENDING // 20 if settings.quick else PENDING
            with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
                late = [each * 1e6 for each in runner.run(measure(count))]
            figures = {"median": median(late), "p99": percentile(late, 99), "largest": max(late)}
            name = f"{loop}, {kind}"
            outcome.rows.append((name, *(f"{each:.1f}" for each in figures.values())))
            outcome.figures[name] = figures
            for bar in bars:
                outcome.at_most(f"event to who awaits it, {name}, {bar}", figures[bar], BAR, "us")
    return outcome
