"""The receiving end: where the bytes end, what is kept, what is given back."""

from __future__ import annotations

import asyncio
import gc
import struct
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from aiocomm.errors import PeerLostError, ProtocolError, RouteError
from aiocomm.packing import LARGE
from aiocomm.transport.base import Frame, FrameKind
from aiocomm.transport.shm.shared import REGISTRY
from aiocomm.transport.shm.wire import Op, Piece, unpack_numbers

from .ends import LABEL, MIB, Ends, blank, ends, ramp

pytestmark = pytest.mark.asyncio

SIZES = [1, 100, LARGE, MIB + 1, 3 * MIB]


def given_back(both: Ends) -> list[int]:
    return [number for frame in both.theirs.sent for number in unpack_numbers(frame.head)]


def chunk(op: Op, segment: int, offset: int, nbytes: int) -> Frame:
    return Frame(FrameKind.CHUNK, 0, Piece(op, segment, offset, nbytes).pack(), b"")


@pytest.mark.parametrize("shm_bytes", [256 * 1024, 64 * MIB])
@pytest.mark.parametrize("first", ["send", "receive"])
async def test_messages_of_every_kind_come_in_order(first: str, shm_bytes: int) -> None:
    async with ends(shm_bytes) as both:
        sent: list[Any] = []
        received: list[Any] = []
        buffers = [blank(size) for size in SIZES]
        fetched = []

        def send() -> None:
            for number, size in enumerate(SIZES):
                sent.append(both.send([ramp(size, number)], lend=False))
                message = [ramp(size, number + 1), blank(0), ramp(7), ramp(LARGE, number)]
                sent.append(both.send(message, lend=True))
                sent.append(both.send(message, lend=True))

        def receive() -> None:
            for buffer in buffers:
                size = buffer.numel()
                received.append(both.receiver.receive([buffer]))
                received.append(both.receiver.discard([size, 0, 7, LARGE]))
                fetched.append(both.receiver.fetch([size, 0, 7, LARGE]))
                received.append(fetched[-1][1])

        for step in (send, receive) if first == "send" else (receive, send):
            step()
            both.carry()
        await both.run(*sent, *received)
        for number, (buffer, (parts, _)) in enumerate(zip(buffers, fetched, strict=True)):
            size = SIZES[number]
            assert buffer.equal(ramp(size, number))
            assert parts[0].equal(ramp(size, number + 1))
            assert [part.numel() for part in parts] == [size, 0, 7, LARGE]
            assert parts[2].equal(ramp(7))
            assert parts[3].equal(ramp(LARGE, number))


async def lend(both: Ends, nbytes: int, start: int = 0) -> torch.Tensor:
    sent = both.send([ramp(nbytes, start)], lend=True)
    buffers, received = both.receiver.fetch([nbytes])
    await both.run(sent, received)
    (buffer,) = buffers
    assert buffer.equal(ramp(nbytes, start))
    return buffer


async def test_what_is_lent_is_not_copied_and_comes_back_with_the_last_tensor() -> None:
    async with ends() as both:
        tensor = await lend(both, 2 * MIB)
        segment = both.receiver._segments[1]
        assert segment.address <= tensor.data_ptr() < segment.address + segment.nbytes
        assert given_back(both) == []
        tensor[0] = 99  # it is the receiver's own
        part = tensor.view(torch.int32)[1000:]
        del tensor
        gc.collect()
        assert given_back(both) == []
        keep = [part]
        del part
        dropping = threading.Thread(target=keep.clear)
        dropping.start()
        dropping.join()
        await asyncio.sleep(0)
        assert given_back(both) == [0]
        both.carry()
        again = await lend(both, 2 * MIB, 5)
        assert again.data_ptr() == segment.address


async def test_a_user_who_keeps_what_came_stops_nobody() -> None:
    async with ends(16 * MIB) as both:  # 8 MiB to lend, 4 of them for the user to keep
        kept = [await lend(both, 2 * MIB, number) for number in range(8)]
        assert given_back(both) == [2, 3, 4, 5, 6, 7]
        for number, tensor in enumerate(kept):
            assert tensor.equal(ramp(2 * MIB, number))
        assert both.receiver._leases.nbytes == 4 * MIB
        kept.clear()
        gc.collect()
        await asyncio.sleep(0)
        assert both.receiver._leases.nbytes == 0


async def test_what_is_lent_outlives_the_route() -> None:
    async with ends() as both:
        tensor = await lend(both, 2 * MIB)
    assert tensor.equal(ramp(2 * MIB))
    del tensor
    gc.collect()
    await asyncio.sleep(0)
    assert given_back(both) == []


async def test_an_aliased_tensor_is_the_senders_own() -> None:
    async with ends() as both:
        view = REGISTRY.make(2 * LARGE, aliased=True)
        ours = torch.frombuffer(view, dtype=torch.uint8)
        sent = both.send([ramp(5), ours[LARGE:], ramp(LARGE)], lend=True)
        buffers, received = both.receiver.fetch([5, LARGE, LARGE])
        await both.run(sent, received)
        ours[LARGE] = 7
        assert buffers[1][0] == 7
        buffers[1][1] = 8
        assert ours[LARGE + 1] == 8
        assert buffers[0].equal(ramp(5))
        assert buffers[2].equal(ramp(LARGE))
        into = blank(2 * LARGE)
        await both.run(both.send([ours], lend=False), both.receiver.receive([into]))
        assert into.equal(ours)
        into[0] = 100
        assert ours[0] == 0


async def test_what_nobody_asked_for_waits_in_the_ring() -> None:
    async with ends(2 * MIB) as both:
        sent = [both.send([ramp(MIB, number)], lend=False) for number in range(2)]
        both.carry()
        assert [each.done() for each in sent] == [True, False]
        assert given_back(both) == []
        buffers = [blank(MIB), blank(MIB)]
        await both.run(*[both.receiver.receive([buffer]) for buffer in buffers], *sent)
        assert buffers[1].equal(ramp(MIB, 1))


async def test_small_pieces_are_given_back_together() -> None:
    async with ends(512 * 1024) as both:  # a ring of 256 KiB
        for number in range(8):
            both.send([ramp(16 * 1024)], lend=False)
            received = both.receiver.receive([blank(16 * 1024)])
            both.carry(back=False)
            assert received.done()
            assert len(both.theirs.sent) == (number + 1) // 4


async def test_no_memory_fails_that_message_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends(2 * MIB) as both:
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        sent = [both.send([ramp(2 * MIB)], lend=True) for _ in range(2)]
        _, failed = both.receiver.fetch([2 * MIB])
        monkeypatch.setattr(torch, "empty", empty)
        while not failed.done():
            both.carry()
            await asyncio.sleep(0)
        monkeypatch.setattr(torch, "empty", real)
        with pytest.raises(RuntimeError, match="allocate"):
            await failed
        buffers, received = both.receiver.fetch([2 * MIB])
        await both.run(received, *sent)
        assert buffers[0].equal(ramp(2 * MIB))


async def test_forgetting_what_was_never_known_is_nothing() -> None:
    async with ends() as both:
        both.receiver.chunk_received(chunk(Op.FORGET, 5, 0, 0))


async def test_severing_fails_what_is_pending_once_nothing_is_written() -> None:
    async with ends() as both:
        both.send([ramp(8 * MIB)], lend=False)
        buffer = blank(8 * MIB)
        received = both.receiver.receive([buffer])
        later = both.receiver.fetch([10])[1]
        while not both.receiver._copies.busy:
            both.carry()
            await asyncio.sleep(0)
        both.receiver.sever()
        both.receiver.sever()
        assert not received.done()
        for each in (received, later, both.receiver.receive([blank(1)])):
            with pytest.raises(RouteError, match="severed"):
                await each
        both.receiver.chunk_received(chunk(Op.COPY, 9, 0, 1))  # late


async def test_a_link_that_is_down_is_left_to_the_group() -> None:
    async with ends(512 * 1024) as both:
        both.theirs.down = PeerLostError("gone")
        both.send([ramp(256 * 1024)], lend=False)
        received = both.receiver.receive([blank(256 * 1024)])
        both.carry()
        await received


async def test_only_a_ring_is_delivered() -> None:
    both = Ends()
    with pytest.raises(ProtocolError, match="nobody can say"):
        both.receiver.deliver(f"{LABEL}/mailbox", b"")
    both.receiver.deliver(f"{LABEL}/ring", struct.pack("<QQ", MIB, MIB))
    with pytest.raises(RouteError, match="courier has not come"):
        await both.receiver.open()
    await both.aclose()


async def test_without_the_peer_whole_messages_can_still_be_taken() -> None:
    async with ends(8 * MIB) as both:
        for size in (100, 300_000):
            both.send([ramp(size)], lend=False)
        torn = both.send([ramp(5 * MIB)], lend=False)  # more than the ring takes
        while len(both.ours.sent) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        both.carry(back=False)
        assert not torn.done()
        assert both.receiver.end([[100], [300_000], [5 * MIB], [1]]) == 2
        for size in (100, 300_000):
            buffer = blank(size)
            await both.receiver.receive([buffer])
            assert buffer.equal(ramp(size))


async def test_without_the_peer_a_message_of_parts_fails_once_nothing_is_written() -> None:
    async with ends(8 * MIB) as both:
        both.send([ramp(5 * MIB)], lend=False)
        received = both.receiver.receive([blank(5 * MIB)])
        while not both.receiver._copies.busy:
            both.carry(back=False)
            await asyncio.sleep(0)
        assert both.receiver.end([]) == 0
        assert not received.done()
        with pytest.raises(RouteError, match="before it had sent it all"):
            await received
        both.receiver.sever()
        assert both.receiver.end([]) is None


async def test_a_small_message_stays_where_it_is_until_it_is_released() -> None:
    async with ends(512 * 1024) as both:  # a ring of 256 KiB
        messages = [[ramp(60 * 1024, number), ramp(5)] for number in range(4)]
        held = []
        for message in messages:
            body = both.sender.place(message)
            assert body is not None
            held.append(both.receiver.hold(body, [60 * 1024, 5]))
        assert both.sender.place(messages[0]) is None  # the ring is full
        assert given_back(both) == []
        for number in (2, 0, 3, 1):
            each = held[number]
            assert each.view[0] == number
            each.release()
            each.release()
        both.carry()
        assert sorted(given_back(both)) == [0, 1, 2, 3]
        assert both.sender.place(messages[0]) is not None


async def test_held_and_other_messages_keep_their_numbers_apart() -> None:
    async with ends(64 * MIB) as both:
        large = both.send([ramp(2 * MIB)], lend=False)  # one piece, and nobody has asked for it
        while not large.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        both.carry()
        body = both.sender.place([ramp(100)])
        assert body is not None
        held = both.receiver.hold(body, [100])
        assert held is not None
        held.release()
        buffer = blank(2 * MIB)
        await both.receiver.receive([buffer])
        assert buffer.equal(ramp(2 * MIB))
        both.receiver._receipts._late()
        assert given_back(both) == [1, 0]
        both.carry()


async def test_what_is_held_outlives_the_route() -> None:
    async with ends() as both:
        body = both.sender.place([ramp(1000)])
        assert body is not None
        held = both.receiver.hold(body, [1000])
        assert held is not None
    assert bytes(held.view) == ramp(1000).numpy().tobytes()
    with mock.patch.object(both.loop, "call_later", side_effect=AssertionError):  # and no timer
        held.release()
    assert given_back(both) == []
    assert both.receiver.hold(body, [1000]) is None
