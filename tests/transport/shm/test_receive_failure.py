"""The receiving end: peers that lie, and memory that is not to be had."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.errors import ProtocolError, RouteError
from aiocomm.transport.base import Frame, FrameKind
from aiocomm.transport.shm.mailbox import Mailbox
from aiocomm.transport.shm.segment import Segment
from aiocomm.transport.shm.wire import RING_NUMBER, Op, Piece

from .ends import MIB, blank, ends

pytestmark = pytest.mark.asyncio


def chunk(op: Op, segment: int, offset: int, nbytes: int) -> Frame:
    return Frame(FrameKind.CHUNK, 0, Piece(op, segment, offset, nbytes).pack(), b"")


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        pytest.param(chunk(Op.COPY, 9, 0, 10), "segment 9, which it has not shared", id="vanished"),
        pytest.param(chunk(Op.COPY, RING_NUMBER, 0, 2**63), "does not lie", id="long"),
        pytest.param(chunk(Op.COPY, RING_NUMBER, 2**64 - 1, 10), "does not lie", id="far"),
        pytest.param(chunk(Op.COPY, RING_NUMBER, 0, 0), "does not lie", id="empty"),
        pytest.param(chunk(Op.COPY, RING_NUMBER, 0, 101), "more bytes than", id="more"),
        pytest.param(chunk(Op.LEND, RING_NUMBER, 0, 101), "more bytes than", id="lends more"),
        pytest.param(chunk(Op.COPY, RING_NUMBER, 0, 99), "leaves bytes", id="less"),
        pytest.param(chunk(Op.ALIAS, RING_NUMBER, 0, 99), "no buffer of its", id="alias"),
        pytest.param(Frame(FrameKind.CHUNK, 0, b"x", b""), "cannot be read", id="noise"),
    ],
)
async def test_a_peer_that_lies_is_told_so(frame: Frame, match: str) -> None:
    async with ends() as both:
        both.receiver.fetch([100])
        with pytest.raises(ProtocolError, match=match):
            both.receiver.chunk_received(frame)


@pytest.mark.parametrize("how", ["forgets", "shares another"])
async def test_a_segment_stays_mapped_while_a_piece_of_it_is_read(how: str) -> None:
    async with ends() as both:
        memory = both.sender._memory
        assert memory is not None
        courier = memory._courier
        assert courier is not None
        segment = Segment.create(64 * MIB)
        courier.send(7, segment)
        buffers = [blank(64 * MIB), blank(64 * MIB)]
        received = [both.receiver.receive([buffers[0]])]
        for _ in buffers:  # one is under way, the other one waits for somebody who wants it
            both.receiver.chunk_received(chunk(Op.COPY, 7, 0, 64 * MIB))
        if how == "forgets":
            both.receiver.chunk_received(chunk(Op.FORGET, 7, 0, 0))
        else:
            courier.send(7, Segment.create(4096))
            courier.send(8, Segment.create(4096))
            with pytest.raises(ProtocolError):
                both.receiver.chunk_received(chunk(Op.COPY, 8, 0, 4097))
        received.append(both.receiver.receive([buffers[1]]))
        await asyncio.gather(*received)


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        pytest.param(chunk(Op.COPY, RING_NUMBER, 0, 201), "more bytes than", id="more"),
        pytest.param(chunk(Op.COPY, RING_NUMBER, 0, 63), "leaves bytes of its", id="less"),
    ],
)
async def test_a_lie_found_when_somebody_asks_fails_the_work_and_not_the_call(
    frame: Frame, match: str
) -> None:
    async with ends() as both:
        both.receiver.chunk_received(frame)
        for _ in range(2):
            with pytest.raises(RouteError, match=match):
                await both.receiver.receive([blank(200)])


async def test_memory_that_cannot_be_mapped_ends_the_route_and_is_no_fault_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ends() as both:

        def collect(self: Mailbox) -> None:
            raise RouteError("cannot be mapped")

        monkeypatch.setattr(Mailbox, "collect", collect)
        received = both.receiver.receive([blank(100)])
        both.receiver.chunk_received(chunk(Op.COPY, 7, 0, 100))
        assert both.receiver.hold(Piece(Op.COPY, 7, 0, 100).pack(), [100]) is None
        for future in (received, both.receiver.receive([blank(100)])):
            with pytest.raises(RouteError, match="cannot be mapped"):
                await future


@pytest.mark.parametrize(
    "piece",
    [Piece(Op.COPY, 9, 0, 100), Piece(Op.COPY, 0, 2**63, 100), Piece(Op.LEND, 0, 0, 2**63)],
)
async def test_an_envelope_that_lies_is_told_so(piece: Piece) -> None:
    async with ends() as both:
        with pytest.raises(ProtocolError):
            both.receiver.hold(piece.pack(), [100])
