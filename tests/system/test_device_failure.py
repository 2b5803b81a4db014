"""What a group promises of tensors on a device when something goes wrong, on every way."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import pytest
import torch

from aiocomm import session
from aiocomm.errors import ClosedError, DecodeError, DeviceError, RouteError
from aiocomm.transport.cuda_ipc import receive

from ..device_pairs import LARGE, SMALL, device_pair, each_size, each_way, each_wire
from ..pairs import until

pytestmark = pytest.mark.asyncio
LOOPS = ["uvloop"]  # they wait for time-outs; what is awaited is the same on both


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a device that never comes back, or for a peer to say why, waits for less."""
    monkeypatch.setattr(receive, "CLOSE_GRACE", 0.2)
    monkeypatch.setattr(session, "VERDICT_DELAY", 0.1)


@each_wire
@each_size
async def test_an_event_that_is_never_done_ends_its_direction(way: str, size: int) -> None:
    async with device_pair(way, stall_timeout=0.2) as world:
        stuck = world.sim.stream(0)
        with world.sim.using(stuck):
            tensor = world.here(torch.zeros(size))
            world.sim.write(tensor, world.ramp(size))
            stuck.held = True
            sending = world.a.send(tensor)
        receiving = world.b.recv()
        with pytest.raises((DeviceError, RouteError), match=r"Options\.stall_timeout"):
            await sending
        with pytest.raises(RouteError):
            await receiving
        back = world.b.send("the other direction")
        assert await world.a.recv() == "the other direction"
        await back
        if way == "nccl" and size == LARGE:
            await until(lambda: all(group.aborts for group in world.process_groups))


async def test_within_a_process_an_event_that_is_never_done_ends_the_group() -> None:
    async with device_pair("memory", stall_timeout=0.2) as world:
        stuck = world.sim.stream(0)
        with world.sim.using(stuck):
            stuck.held = True
            sending = world.a.send(world.here(world.ramp(SMALL)))
        receiving = world.b.recv()
        with pytest.raises(DeviceError, match=r"Options\.stall_timeout"):
            await sending
        with pytest.raises(ConnectionError):
            await receiving


@each_wire
@each_size
async def test_a_device_that_fails_is_a_typed_error(way: str, size: int) -> None:
    async with device_pair(way) as world:
        await world.a.send(world.here(world.ramp(size)))
        await world.b.recv()
        mine = [stream for stream in world.sim.streams if stream.index == 0]
        for stream in mine:
            world.sim.fail(stream)
        sending = world.a.send(world.sim.tensor(world.ramp(size), 0))
        receiving = world.b.recv()
        with pytest.raises(DeviceError, match="an illegal memory access"):
            await sending
        with pytest.raises(RouteError, match="an illegal memory access"):
            await receiving


@each_wire
@each_size
async def test_a_device_that_fails_in_the_middle_fails_all_that_is_pending(
    way: str, size: int
) -> None:
    async with device_pair(way) as world:
        sends = [world.a.send(world.here(world.ramp(size)))]
        await world.b.recv()
        await sends.pop()
        stuck = world.sim.stream(0)
        stuck.held = True
        with world.sim.using(stuck):
            sends += [world.a.send(world.here(world.ramp(size))) for _ in range(3)]
        recvs = [world.b.recv() for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        for stream in [each for each in world.sim.streams if each.index == 0]:
            world.sim.fail(stream)
        errors = await asyncio.gather(*sends, *recvs, return_exceptions=True)
        assert all(isinstance(error, (DeviceError, RouteError)) for error in errors)
        assert isinstance(errors[0], DeviceError)
        assert all("an illegal memory access" in str(error) for error in errors)


@each_way
@each_size
async def test_closing_with_work_pending_is_bounded(way: str, size: int) -> None:
    async with device_pair(way, close_timeout=0.2) as world:
        await world.a.send("hello")
        assert await world.b.recv() == "hello"
        stuck = world.sim.stream(0)
        with world.sim.using(stuck):
            stuck.held = True
            works = [world.a.send(world.here(world.ramp(size))) for _ in range(3)]
        receiving = world.b.recv()
        async with asyncio.timeout(10):
            await world.a.aclose()
        errors = await asyncio.gather(*works, return_exceptions=True)
        assert [type(error) for error in errors] == [ClosedError] * 3
        with pytest.raises(ConnectionError):
            await receiving


@each_way
@each_size
async def test_aborting_with_work_pending_leaves_nothing(way: str, size: int) -> None:
    async with device_pair(way) as world:
        await world.a.send(world.here(world.ramp(size)))
        await world.b.recv()
        works = [world.a.send(world.here(world.ramp(size))) for _ in range(3)]
        await world.a.abort()
        await asyncio.gather(*works, return_exceptions=True)
        world.sim.run()


@each_wire
async def test_a_message_that_came_whole_outlives_its_sender(way: str) -> None:
    async with device_pair(way) as world:
        await world.a.send(world.here(world.ramp(SMALL)))
        await world.a.send("and a word")
        await until(lambda: world.b.statistics().unreceived == 2)
        await world.collectives[0].abort()
        assert torch.equal(world.sim.read(await world.b.recv()), world.ramp(SMALL))
        assert await world.b.recv() == "and a word"


@pytest.mark.parametrize("ends", ["the peer", "this side"])
async def test_while_nccl_connects_the_loop_goes_on_and_closing_ends_it(ends: str) -> None:
    async with device_pair("nccl") as world:
        release = world.sim.process_group.hang = threading.Event()
        sending = world.a.send(world.here(world.ramp(LARGE)))
        receiving = world.b.recv()
        for n in range(20):
            await world.b.send(n)
            assert await world.a.recv() == n
        await until(lambda: len(world.process_groups) == 2)
        async with asyncio.timeout(10):
            await world.collectives[1 if ends == "the peer" else 0].abort()
        with pytest.raises(ConnectionError if ends == "the peer" else ClosedError):
            await sending
        with pytest.raises(ClosedError if ends == "the peer" else ConnectionError):
            await receiving
        release.set()
        await until(lambda: all(group.aborts == 2 for group in world.process_groups))


# --- where no route joins the two ---


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("models", ["Simulated 100", "Simulated 200"], "different models"),
        ("uuids", ["GPU-0", "GPU-0"], "both sides are on one GPU"),
        ("process_group", None, "this torch has no NCCL"),
    ],
)
async def test_what_nccl_cannot_join_goes_by_way_of_the_host_with_one_warning(
    attribute: str, value: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with device_pair("nccl", device_route=None) as world:
        world.sim.foreign = "invalid device context"  # as between containers: no cuda_ipc either
        setattr(world.sim, attribute, value)
        with caplog.at_level(logging.WARNING):
            for n in range(3):
                work = world.a.send(world.here(world.ramp(LARGE, n)))
                assert torch.equal(world.sim.read(await world.b.recv()), world.ramp(LARGE, n))
                await work
        (record,) = caplog.records
        assert "CUDA tensors go by way of pinned memory of the host" in record.getMessage()
        assert reason in record.getMessage()
        assert world.a.statistics().device_route == "staged"
        assert world.a.statistics().sent["staged"].messages == 3
        assert world.b.statistics().received["staged"].messages == 3


@each_size
async def test_a_peer_without_a_device_says_so_and_goes_on(size: int) -> None:
    async with device_pair("staged") as world:
        there = world.collectives[1]
        count, world.sim.count = world.sim.count, lambda: 0  # type: ignore[method-assign]
        work = world.a.send(world.here(world.ramp(size)))
        with pytest.raises(DecodeError, match=r"no CUDA device on this side.*tensor\.cpu\(\)"):
            await world.b.recv()
        await work
        world.sim.count = count  # type: ignore[method-assign]
        await world.a.send("next")
        assert await world.b.recv() == "next"
        assert there.address.rank == 0


async def test_statistics_tell_how_messages_went() -> None:
    async with device_pair("nccl") as world:
        for size in (SMALL, LARGE, LARGE):
            work = world.a.send(world.here(world.ramp(size)))
            await world.b.recv()
            await work
        sent, received = world.a.statistics().sent, world.b.statistics().received
        assert {name: count.messages for name, count in sent.items()} == {"link": 1, "nccl": 2}
        assert sent == received
        assert world.a.statistics().device_route == "nccl"
        assert world.b.statistics().device_route is None


@each_way
async def test_memory_is_flat(way: str) -> None:
    async with device_pair(way) as world:
        marks = []
        for _ in range(5):
            for size in (SMALL, LARGE):
                work = world.a.send(world.here(world.ramp(size)))
                await world.b.recv()
                await work
            gc.collect()
            await until(lambda: not any(stream.operations for stream in world.sim.streams))
            marks.append(world.sim.used_bytes)
        assert marks[1] == marks[-1]
