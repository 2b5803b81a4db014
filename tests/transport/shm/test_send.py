"""The sending end: what it announces, when it waits, when a send is done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiocomm.errors import PeerLostError, ProtocolError, RouteError
from aiocomm.packing import LARGE
from aiocomm.runtime import COPY_LIMIT
from aiocomm.transport.shm.shared import REGISTRY
from aiocomm.transport.shm.wire import RING_NUMBER, Op, Piece

from .ends import LABEL, MIB, Ends, blank, ends, grant, pieces, ramp

pytestmark = pytest.mark.asyncio


def shared(size: int, *, aliased: bool = False) -> torch.Tensor:
    return torch.frombuffer(REGISTRY.make(size, aliased=aliased), dtype=torch.uint8)


async def test_a_small_message_is_announced_and_done_at_once() -> None:
    async with ends() as both:
        sent = both.send([ramp(100), ramp(7)], lend=True)
        assert sent.done()
        assert pieces(both) == [Piece(Op.COPY, RING_NUMBER, 0, 128 + 7)]


async def test_a_large_one_goes_in_four_pieces_of_the_ring() -> None:
    async with ends(8 * MIB) as both:  # a ring of 4 MiB
        sent = both.send([ramp(6 * MIB)], lend=False)
        assert not sent.done()
        while len(both.ours.sent) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [(piece.op, piece.offset, piece.nbytes) for piece in pieces(both)] == [
            (Op.COPY, number * MIB, MIB) for number in range(4)
        ]
        both.sender.grant_received(grant(0, 1))
        while not sent.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [piece.offset for piece in pieces(both)[4:]] == [0, MIB]


async def test_what_the_receiver_has_no_memory_for_is_lent_whole() -> None:
    async with ends() as both:
        await both.send([ramp(COPY_LIMIT), ramp(5)], lend=True)
        assert pieces(both) == [Piece(Op.LEND, 1, 0, COPY_LIMIT + 5)]
        await both.send([ramp(COPY_LIMIT), ramp(5)], lend=True)
        assert pieces(both)[1].segment == 2
        both.sender.grant_received(grant(0))
        await both.send([ramp(COPY_LIMIT), ramp(9)], lend=True)
        assert pieces(both)[2] == Piece(Op.LEND, 1, 0, COPY_LIMIT + 9)


async def test_a_message_larger_than_the_pool_goes_through_the_ring() -> None:
    async with ends(16 * 1024) as both:
        assert not both.send([ramp(COPY_LIMIT + 1)], lend=True).done()
        while not pieces(both):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert {piece.op for piece in pieces(both)} == {Op.COPY}


async def test_nobody_overtakes_a_message_that_waits() -> None:
    async with ends(2 * MIB) as both:  # a ring of 1 MiB
        first = both.send([ramp(MIB)], lend=False)
        second = both.send([ramp(100)], lend=False)
        third = both.send([ramp(10)], lend=False)
        assert (first.done(), second.done(), third.done()) == (True, False, False)
        both.sender.grant_received(grant(0))
        assert second.done()
        assert third.done()
        assert [piece.nbytes for piece in pieces(both)] == [MIB // 4] * 4 + [100, 10]


@pytest.mark.parametrize("aliased", [False, True])
async def test_shared_memory_is_not_copied_and_is_the_callers_when_it_comes_back(
    aliased: bool,
) -> None:
    async with ends() as both:
        size = LARGE if aliased else 2 * MIB
        tensor = shared(2 * size, aliased=aliased)
        part = tensor[size:]
        sent = both.send([ramp(5), part, ramp(9)], lend=True)
        while len(pieces(both)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        op = Op.ALIAS if aliased else Op.COPY
        assert pieces(both) == [
            Piece(Op.COPY, RING_NUMBER, 0, 64),  # what it is followed by is aligned
            Piece(op, 1, size, size),
            Piece(Op.COPY, RING_NUMBER, 64, 9),
        ]
        both.sender.grant_received(grant(0, 2))
        assert sent.done() is aliased
        both.sender.grant_received(grant(1))
        assert sent.done()
        both.send([tensor], lend=False)
        assert pieces(both)[-1] == Piece(op, 1, 0, 2 * size)  # handed over once


async def test_small_parts_of_shared_memory_are_copied_like_any_other() -> None:
    async with ends() as both:
        assert both.send([shared(LARGE)[1:]], lend=True).done()
        assert pieces(both)[0].segment == RING_NUMBER


@pytest.mark.parametrize("numbers", [(1,), (0, 0), (2**64 - 1,)])
async def test_what_the_peer_does_not_have_it_cannot_give_back(numbers: tuple[int, ...]) -> None:
    async with ends() as both:
        both.send([ramp(5)], lend=False)
        with pytest.raises(ProtocolError, match="does not have"):
            both.sender.grant_received(grant(*numbers))


async def test_severing_fails_what_is_pending_once_nothing_is_read() -> None:
    async with ends() as both:
        sent = both.send([ramp(8 * MIB)], lend=False)
        both.sender.sever()
        both.sender.sever()
        assert not sent.done()  # its memory is being copied
        with pytest.raises(RouteError, match="severed"):
            await sent
        with pytest.raises(RouteError, match="severed"):
            await both.send([ramp(1)], lend=False)
        both.sender.grant_received(grant(77))  # late


async def test_a_link_that_is_down_is_left_to_the_group() -> None:
    async with ends() as both:
        both.ours.down = PeerLostError("gone")
        with pytest.raises(PeerLostError):
            both.send([ramp(10)], lend=False)  # the envelope itself
        await both.sender.send([ramp(2 * MIB)], envelope=lambda body: None, lend=True)


async def test_an_empty_message_is_done_and_says_nothing() -> None:
    async with ends() as both:
        assert both.send([blank(0)], lend=True).done()
        assert both.receiver.receive([blank(0)]).done()
        buffers, fetched = both.receiver.fetch([0, 0])
        assert fetched.done()
        assert [buffer.numel() for buffer in buffers] == [0, 0]
        assert both.ours.sent == []


async def test_another_host_is_refused() -> None:
    both = Ends()
    both.ours.same_host = both.theirs.same_host = False  # type: ignore[misc]
    for end in (both.sender, both.receiver):
        opening: Any = end.open()
        with pytest.raises(RouteError, match="on another host"):
            await opening
    await both.aclose()


@pytest.mark.parametrize("early", [True, False])
async def test_severing_ends_the_opening(early: bool) -> None:
    both = Ends()
    openings = [asyncio.ensure_future(end.open()) for end in (both.sender, both.receiver)]
    if not early:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    both.sender.sever()
    both.receiver.sever()
    for opening in openings:
        with pytest.raises(RouteError, match="severed"):
            await opening
    await both.aclose()


async def test_only_a_mailbox_is_delivered() -> None:
    both = Ends()
    with pytest.raises(ProtocolError, match="nobody can say"):
        both.sender.deliver(f"{LABEL}/ring", b"")
    both.sender.deliver(f"{LABEL}/mailbox", b"nonsense")
    with pytest.raises(ProtocolError, match="no usable name"):
        await both.sender.open()
    await both.aclose()


async def test_the_envelope_goes_with_the_first_piece_and_waits_for_it() -> None:
    async with ends(2 * MIB) as both:  # a ring of 1 MiB
        bodies: list[bytes] = []
        for size in (100, MIB, 100, 0):
            both.sender.send([ramp(size)], envelope=bodies.append, lend=False)
        assert [len(body) for body in bodies] == [21, 21, 0]  # the one of 0 bytes needs no room
        assert [Piece.unpack(body).nbytes for body in bodies[:2]] == [100, MIB // 4]
        assert [piece.nbytes for piece in pieces(both)] == [MIB // 4] * 2
        both.sender.grant_received(grant(0, 1))
        assert [Piece.unpack(body).nbytes for body in bodies[3:]] == [100]


async def test_a_small_message_is_placed_in_the_ring_unless_another_one_waits() -> None:
    async with ends(2 * MIB) as both:  # a ring of 1 MiB
        body = both.sender.place([ramp(100), blank(0), ramp(7)])
        assert body is not None
        assert Piece.unpack(body) == Piece(Op.COPY, RING_NUMBER, 0, 128 + 7)
        assert both.sender.place([ramp(MIB)]) is None  # more than a piece
        assert both.sender.place([blank(0)]) is None
        held = both.receiver.hold(body, [100, 0, 7])
        assert held is not None
        assert bytes(held.view[128:]) == ramp(7).numpy().tobytes()
        waits = both.send([ramp(MIB)], lend=False)
        assert not waits.done()
        assert both.sender.place([ramp(1)]) is None
        assert both.sender.place([shared(LARGE, aliased=True)]) is None


async def test_a_message_that_was_let_in_by_another_one_is_sent_in_its_turn() -> None:
    async with ends(2 * MIB) as both:
        sent: list[int] = []

        def send(number: int) -> None:
            """As the lane does: the envelope of one lets the next one be sent."""
            if number < 6:

                def envelope(body: bytes) -> None:
                    sent.append(number)
                    send(number + 1)

                both.sender.send([ramp(MIB // 4, number)], envelope=envelope, lend=False)

        send(0)
        assert sent == [0, 1, 2, 3]
        both.sender.grant_received(grant(0, 1))
        assert sent == [0, 1, 2, 3, 4, 5]
        assert not both.sender._open
