"""What a sender shares, how it gets to the peer, and when it is let go of."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

from aiocomm.errors import RouteError
from aiocomm.transport.shm import memory as memory_module
from aiocomm.transport.shm import receipts as receipts_module
from aiocomm.transport.shm.mailbox import Courier
from aiocomm.transport.shm.segment import Segment
from aiocomm.transport.shm.shared import REGISTRY
from aiocomm.transport.shm.wire import RING_NUMBER, Op

from ...pairs import until
from .ends import MIB, blank, ends, grant, pieces, ramp

pytestmark = pytest.mark.asyncio


def shared(size: int) -> torch.Tensor:
    return torch.frombuffer(REGISTRY.make(size, aliased=False), dtype=torch.uint8)


async def test_the_peer_hears_when_shared_memory_goes_out_of_use() -> None:
    async with ends() as both:
        tensor = shared(2 * MIB)
        sent = both.send([tensor], lend=False)
        received = both.receiver.receive([blank(2 * MIB)])
        await both.run(sent, received)
        del tensor
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pieces(both)[-1].op is Op.FORGET
        both.carry()
        assert list(both.receiver._segments) == [RING_NUMBER]


async def test_shared_memory_goes_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        async with ends() as both:
            tensor = shared(2 * MIB)
            found = REGISTRY.find(tensor.data_ptr(), 1)
            assert found is not None
            segment = weakref.ref(found[0].segment)
            del found
            sent = both.send([tensor], lend=False)
            received = both.receiver.receive([blank(2 * MIB)])
            await both.run(sent, received)
            del tensor
            gone = asyncio.ensure_future(until(lambda: segment() is None))
            await both.run(gone)
            await gone
    finally:
        gc.enable()


async def test_a_route_may_close_before_it_hears_of_memory_that_has_gone() -> None:
    async with ends() as both:
        tensor = shared(2 * MIB)
        sent = both.send([tensor], lend=False)
        await both.run(sent, both.receiver.receive([blank(2 * MIB)]))
        del tensor
        gc.collect()
        await both.sender.aclose()


async def test_a_closed_route_is_not_watched_by_memory_that_lives_on() -> None:
    tensor = shared(2 * MIB)
    async with ends() as both:
        both.send([tensor], lend=False)
        found = REGISTRY.find(tensor.data_ptr(), 1)
        assert found is not None
        assert len(found[0].watchers) == 1
    assert found[0].watchers == []


async def test_without_another_segment_the_ring_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as both:

        def create(nbytes: int) -> Segment:
            raise RouteError("none left")

        monkeypatch.setattr(Segment, "create", create)
        await both.send([ramp(2 * MIB)], lend=True)
        assert {piece.op for piece in pieces(both)} == {Op.COPY}


async def test_shared_memory_that_cannot_be_handed_over_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ends() as both:

        def refuse(*_: object) -> None:
            raise RouteError("the mailbox is full")

        monkeypatch.setattr(Courier, "send", refuse)
        await both.send([shared(2 * MIB)], lend=False)
        assert pieces(both)[0].segment == RING_NUMBER


async def test_what_is_idle_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "IDLE", 0.01)
    async with ends() as both:
        await both.send([ramp(2 * MIB)], lend=True)
        both.sender.grant_received(grant(0))
        while pieces(both)[-1].op is not Op.FORGET:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert pieces(both)[-1].segment == 1
        assert both.sender._memory._pool.nbytes == 0


async def test_an_idle_ring_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "IDLE", 0.01)
    monkeypatch.setattr(receipts_module, "LATEST", 0.01)
    async with ends() as both, asyncio.timeout(30):
        view = both.sender._memory._segment.view
        for number in range(2):
            buffer = blank(MIB)
            await both.run(
                both.send([ramp(MIB, number)], lend=False), both.receiver.receive([buffer])
            )
            assert buffer.equal(ramp(MIB, number))
            assert view[1]
            while view[1]:
                both.carry()
                await asyncio.sleep(0.001)
            while both.sender._memory._aging is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_a_ring_gives_its_memory_back_after_a_peer_that_was_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "IDLE", 0.01)
    async with ends() as both, asyncio.timeout(30):
        memory = both.sender._memory
        taken = memory.take(MIB)
        assert taken is not None
        memory._segment.view[0] = 1
        while memory._aging is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert memory._segment.view[0]
        memory.give_back(taken[0])
        while memory._segment.view[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_the_ring_is_unmapped_by_the_close_and_not_by_the_collector() -> None:
    async with ends() as both, asyncio.timeout(30):
        memory = both.sender._memory
        mapped = weakref.ref(memory._segment)
        await both.sender.aclose()
        await until(lambda: mapped() is None)


@pytest.mark.parametrize(
    ("shm_bytes", "ring", "lend"),
    [(16 * 1024, 8 * 1024, 4 * 1024), (1 << 30, 32 * MIB, 496 * MIB)],
)
async def test_what_there_is_of_it_is_shared_out(shm_bytes: int, ring: int, lend: int) -> None:
    async with ends(shm_bytes) as both:
        memory = both.sender._memory
        assert (memory.ring_bytes, memory.lend_limit) == (ring, lend)
        assert memory.piece_limit == ring // 4
        assert both.receiver._leases.limit == lend
