"""The sending end: what it says of a message, what it holds and how long."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from aiocomm.errors import DeviceError, ProtocolError, RouteError
from aiocomm.packing import DEVICE_LARGE
from aiocomm.transport.cuda_ipc import send as module
from aiocomm.transport.cuda_ipc.wire import parse_body
from aiocomm.transport.transfer import pack_count

from ...pairs import until
from .ends import ends, noise

pytestmark = pytest.mark.asyncio

LARGE = 1 << 20


async def test_large_buffers_stay_and_small_ones_are_joined() -> None:
    async with ends() as both:
        values = [noise(size) for size in (10, DEVICE_LARGE, 70, 2 * DEVICE_LARGE)]
        sending = both.send(*(both.sim.tensor(each) for each in values))
        _, pieces = parse_body(both.bodies[0])
        assert [piece.nbytes for piece in pieces][:2] == [DEVICE_LARGE, 2 * DEVICE_LARGE]
        assert len(pieces) == 3
        memory, future = both.fetch(*(each.numel() for each in values))
        await future
        await sending
        for got, value in zip(memory, values, strict=True):
            assert torch.equal(both.sim.read(got), value)


async def test_a_view_is_found_in_its_allocation() -> None:
    async with ends() as both:
        values = noise(2 * LARGE)
        whole = both.sim.tensor(values)
        sending = both.send(whole[100 : 100 + LARGE])
        (piece,) = parse_body(both.bodies[0])[1]
        assert (piece.offset, piece.nbytes) == (100, LARGE)
        memory, future = both.fetch(LARGE)
        await future
        await sending
        assert torch.equal(both.sim.read(memory[0]), values[100 : 100 + LARGE])


async def test_buffers_on_another_device_come_over_first() -> None:
    async with ends() as both:
        values = noise(LARGE)
        sending = both.send(both.sim.tensor(values, 1))
        memory, future = both.fetch(LARGE)
        await future
        await sending
        assert torch.equal(both.sim.read(memory[0]), values)


async def test_a_send_is_done_when_the_peer_has_copied_and_not_before() -> None:
    async with ends() as both:
        both.deaf = {"done"}
        sending = both.send(both.sim.tensor(noise(LARGE)))
        memory, future = both.fetch(LARGE)
        await future
        await until(lambda: both.said[-1][0] == "g/done")
        assert not sending.done()
        assert both.sender.pending == 1
        both.sender.deliver(*both.said[-1])
        assert sending.done()
        assert both.sender.pending == 0
        del memory


async def test_what_is_sent_is_held_until_then_and_not_longer() -> None:
    async with ends() as both:
        before = both.sim.used_bytes
        tensor = both.sim.tensor(noise(LARGE))
        sending = both.send(tensor)
        del tensor
        gc.collect()
        assert both.sim.used_bytes >= before + LARGE
        memory, future = both.fetch(LARGE)
        await asyncio.gather(sending, future)
        del memory
        gc.collect()
        assert both.sim.used_bytes == before


async def test_more_messages_than_events_wait_for_a_receipt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLOTS", 2)
    async with ends() as both:
        values = [noise(LARGE) for _ in range(5)]
        works = [both.send(both.sim.tensor(value)) for value in values]
        assert (len(both.bodies), both.sender.pending) == (2, 5)
        works[3].cancel()  # of the future: the message goes all the same
        for value in values:
            await until(lambda: both.bodies)
            memory, future = both.fetch(LARGE)
            await future
            assert torch.equal(both.sim.read(memory[0]), value)
        await asyncio.gather(*works, return_exceptions=True)
        assert [work.cancelled() for work in works] == [False] * 3 + [True, False]


async def test_a_message_does_not_wait_for_what_was_queued_for_a_later_one() -> None:
    async with ends(auto=False) as both:
        sim = both.sim
        first = both.send(sim.tensor(noise(LARGE)))
        stuck = sim.stream(0)
        stuck.held = True
        with sim.using(stuck):
            second = both.send(sim.tensor(noise(LARGE)))
        _, future = both.fetch(LARGE)
        sim.auto = True
        await future
        await first
        both.sender.sever()
        with pytest.raises(RouteError, match="severed"):
            await second


async def test_memory_out_of_reach_is_refused_before_anything_is_sent() -> None:
    async with ends() as both:
        tensor = both.sim.tensor(noise(LARGE))
        both.sim.unreachable = {tensor.data_ptr()}
        with pytest.raises(RouteError, match="cannot be shared between processes"):
            both.send(tensor)
        assert (both.bodies, both.sender.pending) == ([], 0)
        values = noise(LARGE)
        sending = both.send(both.sim.tensor(values))
        memory, future = both.fetch(LARGE)
        await asyncio.gather(sending, future)
        assert torch.equal(both.sim.read(memory[0]), values)


async def test_what_is_refused_is_held_while_a_kernel_still_reads_it() -> None:
    async with ends() as both:
        sim = both.sim
        stuck = sim.stream(0)
        stuck.held = True
        before = sim.used_bytes
        sim.unreachable = {"all"}
        with sim.using(stuck):
            small = [sim.tensor(noise(100)) for _ in range(2)]
            with pytest.raises(RouteError, match="cannot be shared"):
                both.send(*small)
        del small
        gc.collect()
        assert sim.used_bytes > before
        stuck.held = False
        await until(lambda: not both.sender._poller.pending)
        gc.collect()
        assert sim.used_bytes == before


async def test_what_is_dropped_is_held_while_its_own_device_still_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SEVER_GRACE", 0.0)
    async with ends() as both:
        sim = both.sim
        own, poller = both.sender._stream, both.sender._poller
        own.held = True  # type: ignore[attr-defined]
        before = sim.used_bytes
        sending = both.send(sim.tensor(noise(9), 1), sim.tensor(noise(70), 1))  # with a gap
        message = sim.used_bytes - before
        buffers, gap, joined = 64 + 128, 64, 192
        assert message == buffers + buffers + gap + joined, "there, here, and what a kernel joins"
        both.sender.sever()
        with pytest.raises(RouteError, match="severed"):
            await sending
        for _ in range(5):  # past the grace
            await asyncio.sleep(0)
        gc.collect()
        probe = 64  # which opening it took
        assert sim.used_bytes == before - probe + message
        own.held = False  # type: ignore[attr-defined]
        await until(lambda: not poller.pending)
        gc.collect()
        assert sim.used_bytes == before - probe


async def test_the_same_where_it_would_have_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS", 1)
    async with ends() as both:
        first = both.send(both.sim.tensor(noise(LARGE)))
        tensor, small = both.sim.tensor(noise(LARGE)), both.sim.tensor(noise(10))
        both.sim.unreachable = {tensor.data_ptr()}
        with pytest.raises(RouteError, match="cannot be shared between processes"):
            both.send(tensor)
        waiting = both.send(small, both.sim.tensor(noise(10)))
        both.sim.unreachable = {"all"}  # what is joined comes from the allocator of this moment
        memory, future = both.fetch(LARGE)
        await asyncio.gather(first, future)
        with pytest.raises(RouteError, match="cannot be shared"):
            await waiting
        del memory


@pytest.mark.parametrize("where", ["device", "peer"])
async def test_what_fails_ends_everything_that_is_pending(where: str) -> None:
    async with ends() as both:
        works = [both.send(both.sim.tensor(noise(LARGE))) for _ in range(2)]
        if where == "device":
            both.sim.fail(both.sender._stream)  # type: ignore[arg-type]
        else:
            both.sender.sever()
        for work in works:
            with pytest.raises(DeviceError if where == "device" else RouteError):
                await work
        with pytest.raises(DeviceError if where == "device" else RouteError):
            await both.send(both.sim.tensor(noise(LARGE)))
        both.sender.deliver("g/done", pack_count(2))  # too late, and no fault of the peer's
        gc.collect()


async def test_a_cancelled_send_that_fails_is_no_news() -> None:
    async with ends() as both:
        work = both.send(both.sim.tensor(noise(LARGE)))
        work.cancel()
        both.sender.sever()
        with pytest.raises(asyncio.CancelledError):
            await work


@pytest.mark.parametrize("value", [pack_count(2), b"rubbish"])
async def test_receipts_that_cannot_be(value: bytes) -> None:
    async with ends() as both:
        work: Any = both.send(both.sim.tensor(noise(LARGE)))
        with pytest.raises(ProtocolError):
            both.sender.deliver("g/done", value)
        both.sender.sever()
        with pytest.raises(RouteError):
            await work


async def test_memory_of_a_tensor_that_is_sent_again_and_again_is_flat() -> None:
    # F49: the producer's memory was never freed; what torch does wraps it once more each time.
    async with ends() as both:
        before = both.sim.used_bytes
        for _ in range(20):
            tensor = both.sim.tensor(noise(LARGE))
            for _ in range(2):
                sending = both.send(tensor)
                memory, future = both.fetch(LARGE)
                await asyncio.gather(sending, future)
        del tensor, memory
        gc.collect()
        assert both.sim.used_bytes == before
        await both.aclose()
        assert both.sim.opened == {}
        assert both.sim.openings == both.sim.closings


@pytest.mark.parametrize("grace", [60.0, 0.0])
async def test_what_the_peers_device_may_still_read_outlives_a_failure(
    grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEVER_GRACE", grace)
    async with ends() as both:
        values = [noise(10), noise(LARGE), noise(20)]
        tensors = [both.sim.tensor(each) for each in values]
        addresses = [each.data_ptr() for each in tensors]
        sending = both.send(*tensors)
        del tensors
        await until(lambda: not both.sender._poller.pending)  # its own device has let go
        both.sender.sever()
        with pytest.raises(RouteError, match="severed"):
            await sending
        gc.collect()
        given = both.sim.memories[0].given
        if grace:
            assert all(given[each][0] for each in addresses)
            memory, future = both.fetch(10, LARGE, 20)  # the peer has not heard of it
            await future
            assert all(map(torch.equal, map(both.sim.read, memory), values))
        else:
            await until(lambda: not any(given[each][0] for each in addresses))
