"""Bulk over the control link: over real links, and with a link that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiocomm.errors import PeerLostError, ProtocolError, RouteError
from aiocomm.transport.base import Frame, FrameKind, Link
from aiocomm.transport.stream import CHUNK, StreamRoute

from .links import linked

pytestmark = pytest.mark.asyncio

each_way = pytest.mark.parametrize("way", ["memory", "unix", "tcp"])


GRANT = Frame(FrameKind.GRANT, 0, b"", b"")


def chunk(body: bytes) -> Frame:
    return Frame(FrameKind.CHUNK, 0, b"", body)


def ramp(size: int, start: int = 0) -> torch.Tensor:
    return ((torch.arange(size) + start) % 251).to(torch.uint8)


def blank(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


class End:
    """One end of a link that carries nothing but one direction of a link route."""

    def __init__(self, link: Link, *, sending: bool) -> None:
        self.route = StreamRoute(link, asyncio.get_running_loop(), sending=sending)
        link.attach(self)

    def frame_received(self, frame: Frame) -> None:
        if frame.kind is FrameKind.GRANT:
            self.route.grant_received(frame)
        else:
            assert frame.kind is FrameKind.CHUNK
            self.route.chunk_received(frame)

    def link_lost(self, error: PeerLostError) -> None:
        self.route.sever()


@asynccontextmanager
async def routes(way: str) -> AsyncIterator[tuple[StreamRoute, StreamRoute]]:
    async with linked(way) as pair:
        ends = End(pair.ours, sending=True), End(pair.theirs, sending=False)
        for end in ends:
            await end.route.open()
        yield ends[0].route, ends[1].route
        for end in ends:
            await end.route.aclose()


class FakeLink:
    """A link that takes down what is sent; congested or down when the test says so."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameKind, Any]] = []
        self.down: PeerLostError | None = None
        self.room = asyncio.Event()
        self.room.set()

    @property
    def writable(self) -> bool:
        return self.room.is_set()

    async def drain(self) -> None:
        await self.room.wait()
        if self.down is not None:
            raise self.down

    def send(self, kind: FrameKind, sequence: int, head: bytes = b"", body: Any = b"") -> None:
        if self.down is not None:
            raise self.down
        self.frames.append((kind, body))

    def lose(self) -> None:
        self.down = PeerLostError("gone")
        self.room.set()


def fake(*, sending: bool) -> tuple[FakeLink, StreamRoute]:
    link = FakeLink()
    return link, StreamRoute(link, asyncio.get_running_loop(), sending=sending)  # type: ignore[arg-type]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@each_way
@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [CHUNK],
        [CHUNK + 1],
        [3, 0, CHUNK - 1, 5 * CHUNK + 7, 0, 2],
    ],
    ids=str,
)
async def test_blocks_arrive_as_they_went(way: str, sizes: list[int]) -> None:
    async with routes(way) as (sender, receiver):
        blocks, into = [ramp(size, size) for size in sizes], blank(*sizes)
        received = receiver.receive(into)
        await sender.send_blocks(blocks)
        await received
        assert all(map(torch.equal, blocks, into))


@each_way
async def test_messages_of_any_size_keep_their_order_whoever_comes_first(way: str) -> None:
    sizes = [5, 2 * CHUNK, 0, 1, CHUNK, 70_000]
    async with routes(way) as (sender, receiver):
        sent = [sender.send_blocks([ramp(size, number)]) for number, size in enumerate(sizes[:3])]
        into = [blank(size) for size in sizes]
        received = [receiver.receive(blocks) for blocks in into]
        for number, size in enumerate(sizes[3:], start=3):
            sent.append(sender.send_blocks([ramp(size, number)]))
        await asyncio.gather(*sent, *received)
        for number, (blocks, size) in enumerate(zip(into, sizes, strict=True)):
            assert torch.equal(blocks[0], ramp(size, number))


@each_way
async def test_a_discarded_message_takes_nothing_of_its_neighbours(way: str) -> None:
    async with routes(way) as (sender, receiver):
        first, third = blank(10), blank(20)
        ends = [
            receiver.receive(first),
            receiver.discard_blocks([3 * CHUNK, 0, 17]),
            receiver.receive(third),
            sender.send_blocks([ramp(10)]),
            sender.send_blocks([ramp(3 * CHUNK), *blank(0), ramp(17)]),
            sender.send_blocks([ramp(20, 9)]),
        ]
        await asyncio.gather(*ends)
        assert torch.equal(first[0], ramp(10))
        assert torch.equal(third[0], ramp(20, 9))


@each_way
async def test_severed_in_the_middle_both_ends_fail(way: str) -> None:
    async with routes(way) as (sender, receiver):
        sent = sender.send_blocks([ramp(64 * CHUNK)])
        behind = sender.send_blocks([ramp(1)])
        received = receiver.receive(blank(64 * CHUNK))
        while not receiver._jobs[0].moved:  # noqa: ASYNC110
            await asyncio.sleep(0)
        receiver.sever()
        with pytest.raises(RouteError, match="the link route was severed"):
            await received
        sender.sever()
        for each in (sent, behind):
            with pytest.raises(RouteError, match="the link route was severed"):
                await each
        for each in (
            sender.send_blocks([ramp(1)]),
            receiver.receive(blank(1)),
            receiver.discard_blocks([1]),
        ):
            with pytest.raises(RouteError, match="severed"):
                await each
        sender.sever()


async def test_nothing_leaves_before_the_receiver_has_memory() -> None:
    link, route = fake(sending=True)
    first, second = route.send_blocks([ramp(2)]), route.send_blocks([ramp(3)])
    await turns()
    assert link.frames == []
    route.grant_received(GRANT)
    await first
    await turns()
    assert link.frames == [(FrameKind.CHUNK, b"\0\1")]
    assert not second.done()
    route.grant_received(GRANT)
    await second
    assert link.frames[1:] == [(FrameKind.CHUNK, b"\0\1\2")]
    await route.aclose()


async def test_a_congested_link_holds_the_chunks_back() -> None:
    link, route = fake(sending=True)
    link.room.clear()
    sent = route.send_blocks([ramp(3 * CHUNK)])
    route.grant_received(GRANT)
    await turns()
    assert link.frames == []
    link.room.set()
    await sent
    assert [len(body) for _, body in link.frames] == [CHUNK] * 3
    await route.aclose()


async def test_a_link_that_takes_everything_does_not_hold_the_loop() -> None:
    link, route = fake(sending=True)
    sent = route.send_blocks([ramp(20 * CHUNK)])
    route.grant_received(GRANT)
    seen: list[int] = []
    while not sent.done():
        await asyncio.sleep(0)
        seen.append(len(link.frames))
    assert max(map(int.__sub__, seen[1:], seen)) == 1
    await route.aclose()


async def test_what_was_sent_may_change_afterwards() -> None:
    link, route = fake(sending=True)
    block = ramp(4)
    sent = route.send_blocks([block])
    route.grant_received(GRANT)
    await sent
    block.zero_()
    assert link.frames == [(FrameKind.CHUNK, bytes([0, 1, 2, 3]))]
    await route.aclose()


async def test_every_message_with_bytes_is_granted_once() -> None:
    link, route = fake(sending=False)
    await asyncio.gather(route.receive(blank(0)), route.discard_blocks([0, 0]), route.receive([]))
    assert link.frames == []
    received = [route.receive(blank(1)), route.discard_blocks([1])]
    assert link.frames == [(FrameKind.GRANT, b"")] * 2
    route.chunk_received(chunk(b"1"))
    route.chunk_received(chunk(b"2"))
    await asyncio.gather(*received)


async def test_bytes_that_nobody_announced_are_refused() -> None:
    _, route = fake(sending=False)
    with pytest.raises(ProtocolError, match="bytes that it has not announced"):
        route.chunk_received(chunk(b"x"))
    into = blank(3)
    received = route.receive(into)
    with pytest.raises(ProtocolError):
        route.chunk_received(chunk(b"1234"))
    assert into[0].tolist() == [0, 0, 0]
    route.chunk_received(chunk(b"12"))
    with pytest.raises(ProtocolError):
        route.chunk_received(chunk(b"34"))
    route.chunk_received(chunk(b"3"))
    await received
    assert into[0].tolist() == [*b"123"]
    with pytest.raises(ProtocolError):
        route.chunk_received(chunk(b"4"))
    route.sever()
    route.chunk_received(chunk(b"late: on its way when this side severed"))


async def test_grants_that_nobody_asked_for_are_refused() -> None:
    _, route = fake(sending=True)
    with pytest.raises(ProtocolError, match="grants a message that was not announced"):
        route.grant_received(GRANT)
    sent = route.send_blocks([ramp(2 * CHUNK)])
    route.grant_received(GRANT)
    await turns(2)
    assert not sent.done()
    with pytest.raises(ProtocolError):
        route.grant_received(GRANT)
    await sent
    with pytest.raises(ProtocolError):
        route.grant_received(GRANT)
    route.sever()
    route.grant_received(GRANT)  # late


async def test_a_link_that_goes_down_fails_what_is_sent() -> None:
    link, route = fake(sending=True)
    sent, behind = route.send_blocks([ramp(9 * CHUNK)]), route.send_blocks([ramp(1)])
    route.grant_received(GRANT)
    await turns(4)
    link.lose()
    for each in (sent, behind):
        with pytest.raises(RouteError, match="the link went down under its bulk route") as caught:
            await each
        assert caught.value.__cause__ is link.down
    await route.aclose()


async def test_a_link_that_is_down_fails_what_is_received() -> None:
    link, route = fake(sending=False)
    waiting = route.receive(blank(1))
    link.lose()
    for each in (route.receive(blank(1)), route.discard_blocks([1]), waiting):
        with pytest.raises(RouteError, match="the link went down under its bulk route"):
            await each
    await route.aclose()


async def test_cancelled_futures_move_all_the_same() -> None:
    link, sender = fake(sending=True)
    sent = sender.send_blocks([ramp(2)])
    sent.cancel()
    sender.grant_received(GRANT)
    await turns()
    assert link.frames == [(FrameKind.CHUNK, b"\0\1")]
    _, receiver = fake(sending=False)
    into = blank(2)
    receiver.receive(into).cancel()
    receiver.chunk_received(chunk(b"ab"))
    assert into[0].tolist() == [*b"ab"]
    for route in (sender, receiver):
        pending = route.receive(blank(1)) if route is receiver else route.send_blocks([ramp(1)])
        pending.cancel()
        await route.aclose()
