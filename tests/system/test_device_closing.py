"""Closing with work pending in memory of a device, on every way that it may take, simulated."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from aiocomm.errors import ClosedError, PeerClosedError, PeerLostError

from ..device_pairs import LARGE, World, device_pair, each_size, each_way
from ..pairs import until

pytestmark = pytest.mark.asyncio

FOREVER = {"close_timeout": 600.0, "prefetch_bytes": 0}  # nothing moves in before somebody asks


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "aiocomm"]
    return [each.getMessage() for each in records if each.levelno >= logging.WARNING]


async def introduced(world: World, size: int) -> None:
    """Both directions have carried a message of that size."""
    for ours, theirs, index in ((world.a, world.b, 0), (world.b, world.a, world.there)):
        sending = ours.send(world.sim.tensor(world.ramp(size), index))
        await theirs.recv()
        await sending


@each_way
@each_size
@pytest.mark.parametrize("met", [True, False])
async def test_pending_sends_leave_before_the_goodbye(way: str, size: int, met: bool) -> None:
    async with device_pair(way, **FOREVER) as world:
        await asyncio.gather(world.a.send("linked"), world.b.recv())
        if met:
            await introduced(world, size)
        sends = [world.a.send(world.here(world.ramp(size, n))) for n in range(3)]
        closing = asyncio.create_task(world.a.aclose())
        async with asyncio.timeout(20):
            for n in range(3):
                got = await world.b.recv()
                assert torch.equal(world.sim.read(got), world.ramp(size, n))
            await closing
        assert [send.result() for send in sends] == [None] * 3
        with pytest.raises(PeerClosedError):
            await world.b.recv()


@each_way
@each_size
@pytest.mark.parametrize("met", [True, False])
async def test_two_that_close_at_once_do_not_wait_for_each_other(
    way: str, size: int, met: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with device_pair(way, window_messages=4, **FOREVER) as world:
        await asyncio.gather(world.a.send("linked"), world.b.recv())
        if met:
            await introduced(world, size)
        sides = ((world.a, 0), (world.b, world.there))
        sends = [
            [group.send(world.sim.tensor(world.ramp(size), index)) for _ in range(8)]
            for group, index in sides
        ]
        async with asyncio.timeout(20):
            await asyncio.gather(world.a.aclose(), world.b.aclose())
        errors = [[work.exception() for work in works] for works in sends]
        assert [None] * 8 in errors  # whoever is done first says goodbye
        left = [error for each in errors for error in each if error is not None]
        assert all(isinstance(error, PeerClosedError) for error in left)
    assert said(caplog) == []


@each_way
@each_size
async def test_an_abort_cuts_a_drain_that_waits_for_the_device(way: str, size: int) -> None:
    async with device_pair(way, **FOREVER) as world:
        await introduced(world, size)
        stuck = world.sim.stream(0)
        with world.sim.using(stuck):
            stuck.held = True
            sends = [world.a.send(world.here(world.ramp(size))) for _ in range(3)]
        receiving = world.b.recv()
        closing = asyncio.create_task(world.a.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await world.a.abort()
            await closing
            for send in sends:
                with pytest.raises(ClosedError):
                    await send
            with pytest.raises(PeerClosedError):
                await receiving


@each_way
@each_size
@pytest.mark.parametrize("dies", [True, False])
async def test_a_peer_that_is_gone_ends_a_drain_and_what_it_takes_in(
    way: str, size: int, dies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with device_pair(way, **FOREVER) as world:
        await introduced(world, size)
        stuck = world.sim.stream(0)
        with world.sim.using(stuck):
            stuck.held = True
            theirs = [world.a.send(world.here(world.ramp(size))) for _ in range(3)]
        ours = [world.b.send(world.sim.tensor(world.ramp(size), world.there)) for _ in range(8)]
        taken = world.b.recv()
        if size == LARGE and way in ("nccl", "cuda_ipc"):  # what is staged is stuck on the far side
            await until(lambda: world.b._session.receiving.moving)
        closing = asyncio.create_task(world.b.aclose())
        await asyncio.sleep(0)
        if dies:
            link = world.a._session._link
            assert link is not None
            link.abort()
        async with asyncio.timeout(20):
            if not dies:
                await world.a.abort()
            await closing
            errors = await asyncio.gather(*ours, return_exceptions=True)
        assert all(error is None or isinstance(error, PeerLostError) for error in errors)
        await world.a.abort()
        await asyncio.gather(taken, *theirs, return_exceptions=True)
    assert said(caplog) == []
