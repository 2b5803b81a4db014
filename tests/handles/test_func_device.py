"""Functions that queue work on a device: their work is done when the device is, simulated."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from aiocomm.device import here
from aiocomm.errors import DeviceError
from aiocomm.transport import completion
from aiocomm.transport.completion import poller_of

from ..loops import Context, counted_turns
from ..simulated import Simulated, simulated
from .works import done_soon, new_work

pytestmark = pytest.mark.asyncio

VALUES = torch.arange(4, dtype=torch.int64)


async def turns(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def filled(sim: Simulated) -> torch.Tensor:
    """A tensor that a kernel, queued in the current stream, gives its values."""
    tensor = sim.tensor(torch.zeros(4, dtype=torch.int64))
    sim.write(tensor, VALUES)
    return tensor


@pytest.mark.parametrize("kind", ["plain", "coroutine", "in a stream of its own"])
async def test_it_is_done_when_the_device_is(kind: str) -> None:
    with simulated() as sim:

        def queue(_: object) -> torch.Tensor:
            return filled(sim)

        async def queue_later(_: object) -> torch.Tensor:
            await asyncio.sleep(0)
            return filled(sim)

        def queue_aside(_: object) -> torch.Tensor:
            side = sim.stream(0)
            with sim.using(side):
                tensor = filled(sim)
            sim.wait(sim.current_stream(0), sim.record(side))  # as its docstring asks for
            return tensor

        func: Any = {"plain": queue, "coroutine": queue_later}.get(kind, queue_aside)
        work = done_soon(1).then(func)
        await turns()
        assert not work.done()
        sim.run()
        tensor = await work
        assert torch.equal(sim.read(tensor), VALUES), "nobody had to wait for a stream"


async def test_it_is_done_three_turns_after_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "SPIN", 1000.0)  # the loop's own turns may take long
    with simulated() as sim, counted_turns() as count:
        for _ in range(20):
            work = done_soon(1).then(lambda _: filled(sim))
            await turns()
            sim.run()
            start = count[0]
            await work
            assert count[0] - start <= 3, "the event is asked for, the work is told, the task woken"


async def test_a_chain_waits_for_each_function() -> None:
    with simulated(auto=True) as sim:
        seen = []

        def add(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(sim.read(tensor).tolist())
            sim.write(tensor, VALUES + 1)
            return tensor

        tensor = await done_soon(1).then(lambda _: filled(sim)).then(add)
        assert seen == [VALUES.tolist()]
        assert sim.read(tensor).tolist() == (VALUES + 1).tolist()


async def test_a_function_that_queues_nothing_does_not_wait() -> None:
    with simulated() as sim:
        sim.run()
        event = here.mark()
        sim.run()
        assert event.query()
        work = done_soon(1).then(lambda value: value + 1)
        sim.auto = True
        assert await work == 2
        assert poller_of(asyncio.get_running_loop()).pending == 0


async def test_without_a_device_in_use_nothing_is_asked() -> None:
    with simulated(used=False) as sim:
        assert await done_soon(1).then(lambda value: value + 1) == 2
        assert sim.queries == 0
        assert not sim.default[0].operations


@pytest.mark.parametrize("when", ["at once", "later"])
async def test_an_error_of_the_device_fails_the_work_and_skips_the_rest(when: str) -> None:
    with simulated() as sim:
        if when == "at once":
            sim.fail(sim.default[0])
        work = done_soon(1).then(lambda _: filled(sim))
        last: Any = work.then(lambda _: pytest.fail("it was called"))
        await turns()
        assert work.done() is (when == "at once")
        sim.fail(sim.default[0])
        with pytest.raises(DeviceError, match="an illegal memory access"):
            await last


@pytest.mark.parametrize("fails", [True, False])
async def test_a_work_that_was_cancelled_meanwhile_stays_so(
    fails: bool, complaints: list[Context]
) -> None:
    with simulated() as sim:
        work = done_soon(1).then(lambda _: filled(sim))
        await turns()
        assert work.cancel()
        if fails:
            sim.fail(sim.default[0])
        sim.run()
        while poller_of(asyncio.get_running_loop()).pending:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await turns()
        assert work.cancelled()
        assert [type(each["exception"]) for each in complaints] == [DeviceError] * fails
        complaints.clear()


async def test_memory_is_held_until_the_device_is_done() -> None:
    with simulated() as sim:
        work = done_soon(1).then(lambda _: filled(sim))
        await turns()
        work.cancel()
        del work
        gc.collect()
        assert sim.used_bytes
        sim.run()
        while sim.used_bytes:
            await asyncio.sleep(0)
            gc.collect()


async def test_a_returned_work_is_followed_as_ever() -> None:
    with simulated() as sim:
        inner = new_work()
        work = done_soon(1).then(lambda _: inner)
        await turns()
        inner._finish(5)
        assert await work == 5
        assert sim.queries == 0
