"""Events of a device as futures: how many are asked for, when, and how they end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aiocomm.errors import DeviceError
from aiocomm.transport import completion
from aiocomm.transport.completion import LONGEST_NAP, SPIN, SPIN_TURNS, Poller, poller_of

from .. import loops
from ..simulated import Simulated
from ..simulated_memory import SimStream

pytestmark = pytest.mark.asyncio


class Clock:
    """The loop's calls as the poller makes them, carried out by the test, in virtual time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = 0.0
        self.calls: list[tuple[float, Any]] = []
        monkeypatch.setattr(completion, "monotonic", lambda: self.now)

    def create_future(self) -> asyncio.Future[None]:
        return self.loop.create_future()

    def call_soon(self, call: Callable[[], None]) -> Any:
        return self.call_later(0.0, call)

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        entry = (delay, call)
        self.calls.append(entry)
        clock = self

        class Handle:
            def cancel(self) -> None:
                if entry in clock.calls:
                    clock.calls.remove(entry)

        return Handle()

    def turn(self) -> float:
        """Carry out the one call that is due next. Returns how long it was put off."""
        ((delay, call),) = self.calls
        self.calls.clear()
        self.now += delay
        call()
        return delay


def streams_of(sim: Simulated, count: int) -> list[SimStream]:
    return [sim.stream(0) for _ in range(count)]


async def test_a_turn_asks_for_one_event_of_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, clock = Simulated(), Clock(monkeypatch)
    poller = Poller(clock)  # type: ignore[arg-type]
    streams = streams_of(sim, 2)
    futures = [poller.watch(sim.record(stream)) for stream in streams for _ in range(5000)]
    assert poller.pending == 10_000
    for _ in range(20):
        before = sim.queries
        clock.turn()
        assert sim.queries - before == 2
    streams[1].step()
    clock.turn()
    assert [future.done() for future in (futures[0], futures[5000], futures[5001])] == [
        *(False, True, False)
    ]
    sim.run()
    turns = 0
    while clock.calls:
        before = sim.queries
        clock.turn()
        assert sim.queries - before <= 2
        turns += 1
    assert turns == 5000
    assert all(future.done() for future in futures)
    assert poller.pending == 0


async def test_it_asks_at_every_turn_then_seldom_then_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, clock = Simulated(), Clock(monkeypatch)
    poller = Poller(clock)  # type: ignore[arg-type]
    assert clock.calls == [], "nothing is scheduled where nothing is pending"
    stream = sim.stream(0)
    first = poller.watch(sim.record(stream))
    while clock.now < SPIN:
        assert clock.turn() == 0.0
        clock.now += SPIN / 10
    clock.turn()
    delays = [clock.turn() for _ in range(12)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (SPIN, LONGEST_NAP)
    assert delays[1] == 2 * SPIN
    second = poller.watch(sim.record(stream))
    assert [delay for delay, _ in clock.calls] == [0.0], "a new event ends the nap"
    sim.run()
    clock.turn()
    assert first.done()
    assert not second.done()
    assert clock.turn() == 0.0, "where one was done the next may be"
    assert second.done()
    assert clock.calls == []


async def test_where_one_was_done_after_a_long_time_the_next_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, clock = Simulated(), Clock(monkeypatch)
    poller = Poller(clock)  # type: ignore[arg-type]
    stream = sim.stream(0)
    for _ in range(2):
        poller.watch(sim.record(stream))
    while not clock.calls[0][0]:
        clock.now += SPIN
        clock.turn()
    stream.step()
    clock.turn()
    assert poller.pending == 1
    for _ in range(SPIN_TURNS):
        assert clock.turn() == 0.0


async def test_where_turns_are_long_it_asks_at_some_of_them_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, clock = Simulated(), Clock(monkeypatch)
    poller = Poller(clock)  # type: ignore[arg-type]
    stream = sim.stream(0)
    for _ in range(2):
        future = poller.watch(sim.record(stream))
        for _ in range(SPIN_TURNS):
            clock.now += 100 * SPIN  # a busy loop, or a machine that gives it no time
            assert clock.turn() == 0.0
            assert clock.calls[0][0] == 0.0, "a nap here would add to what is late already"
        clock.now += 100 * SPIN
        clock.turn()
        assert clock.turn() == SPIN
        sim.run()
        clock.turn()
        assert future.done()


@pytest.mark.parametrize("pending", [0, 1000])
async def test_who_awaits_an_event_goes_on_two_turns_after_it(
    pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "SPIN", 1000.0)  # the loop's own turns may take long
    sim, loop = Simulated(), asyncio.get_running_loop()
    poller = poller_of(loop)
    assert poller is poller_of(loop)
    stream, others = sim.stream(0), streams_of(sim, 2)
    more = [poller.watch(sim.record(others[n % 2])) for n in range(pending)]
    with loops.counted_turns() as turns:
        for before in range(20):
            future = poller.watch(sim.record(stream))
            for _ in range(before):
                await asyncio.sleep(0)
            assert not future.done()
            sim.run(stream)
            start = turns[0]
            await future
            assert turns[0] - start <= 2, "one in which it is asked for, one that wakes the task"
    sim.run()
    await asyncio.gather(*more)
    assert poller.pending == 0


async def test_streams_do_not_wait_for_one_another() -> None:
    sim = Simulated()
    poller = poller_of(asyncio.get_running_loop())
    slow, quick = streams_of(sim, 2)
    waiting, soon = poller.watch(sim.record(slow)), poller.watch(sim.record(quick))
    sim.run(quick)
    await soon
    assert not waiting.done()
    sim.run(slow)
    await waiting


async def test_an_error_of_the_device_reaches_every_work_of_its_stream() -> None:
    sim = Simulated()
    poller = poller_of(asyncio.get_running_loop())
    broken, well = streams_of(sim, 2)
    lost = [poller.watch(sim.record(broken)) for _ in range(3)]
    kept = poller.watch(sim.record(well))
    sim.fail(broken)
    errors = await asyncio.gather(*lost, return_exceptions=True)
    assert [type(error) for error in errors] == [DeviceError] * 3
    assert len(set(map(id, errors))) == 3, "an instance collects the tracebacks of all"
    assert "an illegal memory access" in str(errors[2])
    sim.run(well)
    await kept
    with pytest.raises(DeviceError):
        await poller.watch(sim.record(broken))
    assert poller.pending == 0


async def test_the_cause_of_an_error_is_kept_for_every_work() -> None:
    poller, stream = poller_of(asyncio.get_running_loop()), Simulated().stream(0)

    class Failing:
        def __init__(self) -> None:
            self.stream = stream

        def query(self) -> bool:
            raise DeviceError("device cuda:0 failed") from RuntimeError("as CUDA says it")

    futures = [poller.watch(Failing()) for _ in range(2)]
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert [str(error.__cause__) for error in errors] == ["as CUDA says it"] * 2


class Held:
    """Something whose end can be seen."""


async def test_what_is_kept_outlives_a_cancellation() -> None:
    sim = Simulated()
    poller = poller_of(asyncio.get_running_loop())
    stream = sim.stream(0)
    held = Held()
    seen = weakref.ref(held)
    future = poller.watch(sim.record(stream), keep=held)
    del held
    future.cancel()
    await asyncio.sleep(0)
    gc.collect()
    assert seen() is not None
    assert poller.pending == 1
    sim.run()
    while poller.pending:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert seen() is None


async def test_an_event_that_nobody_waits_for_is_not_asked_for() -> None:
    sim = Simulated()
    poller = poller_of(asyncio.get_running_loop())
    stream = sim.stream(0)
    futures = [poller.watch(sim.record(stream)) for _ in range(3)]
    for future in futures[:2]:
        future.cancel()
    sim.run()
    await futures[2]
    assert sim.queries == 1
    gone = poller.watch(sim.record(sim.stream(0)))
    gone.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert poller.pending == 0
    assert sim.queries == 1


async def test_a_poller_goes_with_its_loop() -> None:
    sim = Simulated()
    ends = []

    def elsewhere() -> None:
        loop = loops.make("asyncio", [])
        poller = poller_of(loop)
        poller.watch(sim.record(sim.stream(0)), keep=Held())
        ends.append(weakref.ref(poller))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    await asyncio.to_thread(elsewhere)
    mine = poller_of(asyncio.get_running_loop())  # may be the first of this loop
    elsewhere_too = loops.make("asyncio", [])
    poller_of(elsewhere_too)
    elsewhere_too.close()
    gc.collect()
    assert ends[0]() is None
    assert mine.pending == 0
