"""Copies between the host and a device: right when the streams say so, and never waited for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiocomm.errors import DeviceError
from aiocomm.options import Options
from aiocomm.runtime import COPY_LIMIT, Runtime
from aiocomm.scheduler.ferry import Ferry

from ..pairs import until
from ..simulated import Simulated, simulated

pytestmark = pytest.mark.asyncio


def ferry(**settings: Any) -> tuple[Ferry, Runtime]:
    runtime = Runtime(asyncio.get_running_loop(), Options(**settings), "a:0")
    return Ferry(runtime), runtime


def noise(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [[9], [3, 200, 64], [COPY_LIMIT + 1], [5 << 20, 7, 9]])
async def test_there_and_back(sizes: list[int]) -> None:
    with simulated(auto=True) as sim:
        carrier, runtime = ferry()
        sent = noise(*sizes)
        far = await carrier.up(sent, 1)
        assert [sim.device_of(each).index for each in far] == [1] * len(sizes)
        assert all(map(torch.equal, map(sim.read, far), sent))
        assert sim.lent, "the caller will use it in a stream of its own"
        back = await carrier.down(list(far), sim.record(sim.default[1]))
        assert all(map(sim.on_cpu, back))
        assert all(map(torch.equal, back, sent))
        runtime.close()


async def test_down_waits_for_what_fills_the_buffers() -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        buffer = sim.tensor(torch.zeros(4, dtype=torch.uint8))
        with sim.using(sim.stream(0)):
            sim.write(buffer, torch.arange(4, dtype=torch.uint8))
            after = sim.record(sim.current_stream(0))
        (got,) = await carrier.down([buffer], after)
        assert got.tolist() == [0, 1, 2, 3]


async def test_up_into_a_buffer_waits_until_it_is_free() -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        buffer = sim.tensor(torch.zeros(4, dtype=torch.uint8))
        sim.write(buffer, torch.full((4,), 9, dtype=torch.uint8))
        after = sim.record(sim.default[0])
        sim.default[0].held = True
        values = torch.arange(4, dtype=torch.uint8)
        moving = carrier.run(carrier.up([values], 0, into=buffer, after=after))
        for _ in range(10):
            await asyncio.sleep(0)
            sim.run()
        assert sim.read(buffer).tolist() == [0] * 4
        sim.default[0].held = False
        (got,) = await moving
        assert got is buffer
        sim.run()
        assert torch.equal(sim.read(buffer), values)
        await carrier.up([torch.ones(4, dtype=torch.uint8)], 0, into=buffer)
        assert sim.read(buffer).tolist() == [1] * 4


async def test_copies_on_a_device() -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        source = sim.tensor(torch.arange(5, dtype=torch.uint8))
        target = sim.tensor(torch.zeros(5, dtype=torch.uint8), 1)
        after = sim.record(sim.default[1])
        await carrier.copy(target, source, after)
        await carrier.copy(target, source)
        assert sim.read(target).tolist() == [0, 1, 2, 3, 4]
        sim.write(source, torch.full((5,), 3, dtype=torch.uint8))
        clones = [
            await carrier.clone(source, sim.record(sim.default[0])),
            await carrier.clone(source),
            carrier.clone_now(source),
        ]
        assert [sim.read(each).tolist() for each in clones] == [[3] * 5] * 3
        await carrier.reach(sim.record(sim.default[0]))


def stuck(sim: Simulated) -> Any:
    stream = sim.stream(0)
    stream.held = True
    return sim.record(stream)


async def test_what_is_never_done_is_an_error_in_time() -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry(stall_timeout=0.05)
        with pytest.raises(DeviceError, match=r"cuda:0 did not come to a copy within 0.05 s"):
            await carrier.reach(stuck(sim))


Crossing = Callable[[Simulated, Ferry, Any], Any]


def full(sim: Simulated, index: int = 0) -> torch.Tensor:
    return sim.tensor(torch.ones(100, dtype=torch.uint8), index)


CROSSINGS: dict[str, Crossing] = {
    "down": lambda sim, carrier, event: carrier.down([full(sim), full(sim)], event),
    "up": lambda sim, carrier, event: carrier.up(noise(100), 0),
    "up into": lambda sim, carrier, event: carrier.up(noise(100), 0, into=full(sim), after=event),
    "copy": lambda sim, carrier, event: carrier.copy(full(sim, 1), full(sim), event),
    "clone": lambda sim, carrier, event: carrier.clone(full(sim), event),
}


@pytest.mark.parametrize("crossing", CROSSINGS.values(), ids=CROSSINGS)
async def test_memory_is_held_until_the_device_is_done_though_nobody_waits(
    crossing: Crossing,
) -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        event = stuck(sim)
        under_way = carrier.run(crossing(sim, carrier, event))
        await asyncio.sleep(0)
        mine = sim.streams[-1]
        mine.held = True
        assert mine.operations
        used = sim.used_bytes
        await carrier.aclose()
        await carrier.aclose()
        assert under_way.cancelled()
        del under_way
        gc.collect()
        assert sim.used_bytes == used > 0
        mine.held = event.stream.held = False
        while sim.used_bytes:
            await asyncio.sleep(0)
            gc.collect()


@pytest.mark.parametrize("name", ["up", "clone", "clone_now"])
async def test_who_gets_new_memory_may_drop_it_while_its_stream_reads_it(name: str) -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        (values,) = noise(100)
        source, mine = sim.tensor(values), sim.default[0]
        if name == "up":
            (got,) = await carrier.up([values], 0)
        else:
            got = carrier.clone_now(source) if name == "clone_now" else await carrier.clone(source)
        sim.run()
        result = sim.tensor(torch.zeros_like(values))
        mine.held = True
        sim.copy(result, got, mine)
        del got
        gc.collect()
        await carrier.up(noise(100), 0)  # into the same memory, if it were free
        mine.held = False
        sim.run()
        assert torch.equal(sim.read(result), values)


@pytest.mark.parametrize("name", ["down", "copy", "clone"])
async def test_what_is_not_ready_yet_is_not_copied(name: str) -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        values, zeros = torch.arange(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
        source, target, mine = sim.tensor(zeros), sim.tensor(zeros, 1), sim.stream(0)
        mine.held = True
        with sim.using(mine):
            sim.write(source, values)
        after = sim.record(mine)
        crossing: dict[str, Callable[[], Any]] = {
            "down": lambda: carrier.down([source], after),
            "copy": lambda: carrier.copy(target, source, after),
            "clone": lambda: carrier.clone(source, after),
        }
        copying = carrier.run(crossing[name]())
        for _ in range(10):
            await asyncio.sleep(0)
            sim.run()
        assert not copying.done()
        mine.held = False
        got = await copying
        if name == "down":
            assert torch.equal(got[0], values)
        else:
            assert torch.equal(sim.read(target if got is None else got), values)


async def test_a_crossing_that_fails_unseen_is_no_news() -> None:
    with simulated(auto=True) as sim:
        carrier, _ = ferry()
        event = stuck(sim)
        sim.fail(event.stream)
        crossing = carrier.run(carrier.reach(event))
        await asyncio.wait([crossing])
        assert isinstance(crossing.exception(), DeviceError)
        carrier.run(carrier.reach(event))
        await until(lambda: not carrier._tasks)
        gc.collect()  # the loop would complain
