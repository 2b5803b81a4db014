"""One direction over NCCL: what cannot be set up, what breaks, and how it is closed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from aiocomm.errors import DeviceError, ProtocolError, RouteError
from aiocomm.transport import pair_route
from aiocomm.transport.transfer import pack_count

from ..pairs import until
from .nccl_ends import ends, noise

pytestmark = pytest.mark.asyncio


# --- setting up ---


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("process_group", None, "has no NCCL"),
        ("uuids", ["GPU-0", "GPU-0"], "on one GPU"),
        ("models", ["One", "Two"], r"different models \((One here, Two|Two here, One) there\)"),
    ],
)
async def test_devices_that_nccl_cannot_join(attribute: str, value: Any, reason: str) -> None:
    async with ends(opened=False) as both:
        setattr(both.sim, attribute, value)
        openings = asyncio.gather(both.sender.open(), both.receiver.open(), return_exceptions=True)
        for error in await openings:
            assert isinstance(error, RouteError)
            with pytest.raises(RouteError, match=reason):
                raise error
        with pytest.raises(RouteError, match=reason):
            await both.sender.open()


async def test_what_nccl_refuses() -> None:
    async with ends(opened=False) as both:
        both.sim.process_group.refuse = "ncclSystemError: no such device"
        with pytest.raises(RouteError, match="could not be set up: ncclSystemError") as caught:
            await both.open()
        assert "stack of C" not in str(caught.value)


@pytest.mark.parametrize("alone", ["meeting", "connecting"])
async def test_a_peer_that_does_not_open_its_side(alone: str) -> None:
    async with ends(opened=False, timeout=0.1) as both:
        if alone == "connecting":
            both.sender.deliver("g/identity", b"GPU-1\0Simulated 100")
        with pytest.raises(RouteError, match=r"the peer (does not open|did not set up) its side"):
            await both.sender.open()


async def test_severing_ends_the_wait_for_a_peer_that_says_nothing() -> None:
    async with ends(opened=False) as both:
        opening = asyncio.create_task(both.sender.open())
        await asyncio.sleep(0)
        both.sender.sever()
        with pytest.raises(RouteError, match="severed"):
            await opening


async def test_counts_that_cannot_be_are_the_peers_fault() -> None:
    async with ends() as both:
        with pytest.raises(ProtocolError):
            both.receiver.deliver("g/ready", pack_count(1))
        with pytest.raises(ProtocolError):
            both.sender.deliver("g/done", b"x")


# --- breaking ---


async def test_an_operation_that_nccl_refuses_breaks_the_route() -> None:
    async with ends() as both:
        both.sim.process_group.broken = "NCCL error\nand a stack"
        _, moved = both.fetch(9)
        with pytest.raises(RouteError, match=r"broke: NCCL error$"):
            await moved
        with pytest.raises(RouteError, match="broke"):
            await both.fetch(9)[1]
        both.receiver.sever()


@pytest.mark.parametrize("side", [0, 1])
async def test_a_device_that_fails_is_a_typed_error_for_every_work(side: int) -> None:
    async with ends() as both:
        sim = both.sim
        sending = [both.send(sim.tensor(noise(9))) for _ in range(3)]
        stream: Any = (both.sender, both.receiver)[side]._stream
        sim.fail(stream)
        moved = [both.fetch(9)[1] for _ in range(3)]
        for future in (sending, moved)[side]:
            with pytest.raises(DeviceError, match="an illegal memory access"):
                await future
        (both.receiver, both.sender)[side].sever()
        await asyncio.wait([*sending, *moved])
        for future in (*sending, *moved):
            future.exception()


async def test_what_stands_still_is_aborted() -> None:
    async with ends(stall_timeout=0.1) as both:
        with both.sim.using(both.sim.stream(0)):
            both.sim.streams[-1].held = True
            sending = both.send(both.sim.tensor(noise(9)))
        _, moved = both.fetch(9)
        for future in (sending, moved):
            with pytest.raises(RouteError, match=r"stands still.*Options\.stall_timeout"):
                await future
        await until(lambda: [group.aborts for group in both.groups] == [1, 1])


async def test_severing_fails_what_is_pending_once_the_device_has_let_go() -> None:
    async with ends() as both:
        _, moved = both.fetch(9)  # a kernel that waits for a peer who sends nothing
        waiting = both.send(both.sim.tensor(noise(9)))
        both.receiver.sever()
        both.sender.sever()
        for future in (moved, waiting):
            with pytest.raises(RouteError, match="was severed on this side"):
                await future
        assert both.groups[0].aborts or both.groups[1].aborts


async def test_what_the_device_does_not_let_go_of_fails_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_route, "SEVER_GRACE", 0.01)
    async with ends() as both:
        (buffer,), moved = both.fetch(9)
        both.sim.default[1].held = both.receiver._stream.held = True  # type: ignore[attr-defined]
        cancelled = both.fetch(9)[1]
        cancelled.cancel()
        both.receiver.sever()
        with pytest.raises(RouteError, match="severed"):
            await moved
        address, memory = buffer.data_ptr(), both.sim.memories[1]
        del buffer
        gc.collect()
        assert memory.given[address][0], "the device may still write to it"
        both.receiver._stream.held = False  # type: ignore[attr-defined]
        await until(lambda: "pending=0" in repr(both.receiver))
        await until(lambda: not memory.given[address][0])


async def test_a_cancelled_future_does_not_stop_the_transfer() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(9)))
        sending.cancel()
        values = noise(9)
        second = both.send(both.sim.tensor(values))
        both.fetch(9)[1].cancel()
        (buffer,), moved = both.fetch(9)
        await moved
        await second
        assert torch.equal(both.sim.read(buffer), values)
