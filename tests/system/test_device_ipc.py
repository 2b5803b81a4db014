"""Two processes on one chip, simulated: how they come to cuda_ipc, and what its memory does.

What a group promises on every way, this one included, is in ``test_device.py``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiocomm.errors import RouteError
from aiocomm.transport.cuda_ipc import mappings

from ..device_pairs import LARGE, SMALL, World, device_pair
from ..pairs import until
from ..rounds import rounds

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def one_chip(**settings: Any) -> AsyncIterator[World]:
    """Two processes on one chip that may choose the route by themselves."""
    async with device_pair("cuda_ipc", device_route=None, **settings) as world:
        yield world


async def exchange(world: World, tensor: torch.Tensor) -> torch.Tensor:
    work = world.a.send(tensor)
    got = world.sim.read(await world.b.recv())
    await work
    return got


async def test_two_on_one_chip_come_to_it_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    async with one_chip() as world:
        with caplog.at_level(logging.WARNING):
            values = world.ramp(LARGE)
            assert torch.equal(await exchange(world, world.here(values)), values)
        assert not caplog.records, "that NCCL refuses one chip is no news"
        assert world.a.statistics().device_route == "cuda_ipc"
        assert world.a.statistics().sent["cuda_ipc"].messages == 1
        assert world.b.statistics().received["cuda_ipc"].messages == 1


async def test_memory_out_of_reach_goes_by_the_host_in_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with one_chip() as world:
        with caplog.at_level(logging.WARNING):
            tensors = [world.here(world.ramp(4 * LARGE, n)) for n in range(6)]
            world.sim.unreachable = {tensor.data_ptr() for tensor in tensors[1::2]}
            works = [world.a.send(tensor) for tensor in tensors]
            for n in range(6):
                got = world.sim.read(await world.b.recv())
                assert torch.equal(got, world.ramp(4 * LARGE, n))
            await asyncio.gather(*works)
        (record,) = caplog.records
        assert "route cuda_ipc does not reach" in record.getMessage()
        assert "cannot be shared between processes: expandable" in record.getMessage()
        sent = world.a.statistics().sent
        assert {name: count.messages for name, count in sent.items()} == {
            "cuda_ipc": 3,
            "staged": 3,
        }


async def test_an_allocator_that_shares_nothing_is_found_when_it_is_set_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with one_chip() as world:
        world.sim.unreachable = {"all"}
        with caplog.at_level(logging.WARNING):
            for n in range(2):
                values = world.ramp(LARGE, n)
                assert torch.equal(await exchange(world, world.here(values)), values)
        (record,) = caplog.records
        assert "by way of pinned memory of the host" in record.getMessage()
        assert "both sides are on one GPU" in record.getMessage()
        assert "cuda_ipc: memory of cuda:0 cannot be shared" in record.getMessage()
        assert world.a.statistics().sent["staged"].messages == 2


async def test_thousands_of_messages_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # F49: memory that was shared was never freed.
    messages = rounds(10_000)
    monkeypatch.setattr(mappings, "LINGER", 0.0)
    async with one_chip() as world:
        kept = world.here(world.ramp(LARGE, 7))
        marks = []
        for _ in range(5):
            for n in range(messages // 10):
                await exchange(world, kept if n % 2 else world.here(world.ramp(LARGE, n)))
                world.a.send(n)
                assert await world.b.recv() == n
            gc.collect()
            await until(lambda: not world.sim.opened)
            marks.append(world.sim.used_bytes)
        assert marks[0] == marks[-1]
        assert world.sim.openings == world.sim.closings > 0


async def test_a_peer_that_is_gone_in_the_middle() -> None:
    async with one_chip(close_timeout=0.2) as world:
        sim = world.sim
        await exchange(world, world.here(world.ramp(LARGE)))
        gc.collect()
        before = sim.used_bytes
        stuck = sim.stream(0)
        stuck.held = True
        with sim.using(stuck):
            work = world.a.send(world.here(world.ramp(LARGE)))
        receiving = world.b.recv()
        await until(lambda: any(count for count in sim.opened.values()))
        await world.collectives[0].abort()
        with pytest.raises(ConnectionError):
            await receiving
        await asyncio.wait([work])
        work.exception()
        del work, receiving
        stuck.held = False
        await until(lambda: not sim.opened)
        await until(lambda: not any(stream.operations for stream in sim.streams))
        gc.collect()
        await until(lambda: sim.used_bytes <= before)  # the poller sees the end of what was stuck


async def test_a_pinned_route_that_cannot_be_set_up_says_why() -> None:
    async with device_pair("cuda_ipc") as world:
        world.sim.uuids = ["GPU-0", "GPU-1"]
        await exchange(world, world.here(world.ramp(LARGE)))
        assert world.a.statistics().device_route == "staged"
        with pytest.raises(RouteError, match="cuda_ipc: the two sides are on different GPUs"):
            await world.a._session._open_device(0)


async def test_small_messages_stay_in_their_envelope() -> None:
    async with one_chip() as world:
        await exchange(world, world.here(world.ramp(SMALL)))
        assert set(world.a.statistics().sent) == {"link"}
        assert not world.sim.exports
