"""Links over real sockets: death of every kind, hostile frames, heartbeats, closing under load.

What holds for every kind of link is in test_base.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest

from aiocomm.errors import (
    ClosedError,
    NetworkError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    UsageError,
)
from aiocomm.options import Options
from aiocomm.transport.base import MAX_BODY, MAX_HEAD, FrameKind, Hello, Link
from aiocomm.transport.frames import encode, encode_header
from aiocomm.transport.socket_link import BACKLOG, ONE_WRITE

from .links import Recorder, linked, listening, raw_peer, ticks

WAYS = ("unix", "tcp")
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@pytest.mark.parametrize("head", [0, 5, ONE_WRITE + 1])
@pytest.mark.parametrize("body", [ONE_WRITE - 24, ONE_WRITE, 1_000_000, MAX_BODY])
@pytest.mark.asyncio
async def test_large_frames(way: str, head: int, body: int) -> None:
    async with linked(way) as pair:
        handler = Recorder()
        pair.theirs.attach(handler)
        content = bytearray(range(256)) * (body // 256 + 1)
        view = memoryview(content)[:body]
        pair.ours.send(FrameKind.CHUNK, 1, b"h" * head, view)
        pair.ours.send(FrameKind.CHUNK, 2, b"", b"end")
        frame = await handler.frame()
        assert (frame.head, type(frame.body)) == (b"h" * head, bytes)
        assert frame.body == view
        assert (await handler.frame()).body == b"end"


@each_way
@pytest.mark.asyncio
async def test_a_frame_too_long_is_refused_and_the_next_one_goes(way: str) -> None:
    async with linked(way) as pair:
        handler = Recorder()
        pair.theirs.attach(handler)
        with pytest.raises(UsageError, match="too long"):
            pair.ours.send(FrameKind.CHUNK, 1, b"", bytes(MAX_BODY + 1))
        with pytest.raises(UsageError, match="too long"):
            pair.ours.send(FrameKind.CHUNK, 1, bytes(MAX_HEAD + 1))
        for items in (10, 100_000):
            with pytest.raises(UsageError, match="single bytes"):
                pair.ours.send(FrameKind.CHUNK, 1, b"", memoryview(bytes(8 * items)).cast("q"))
        pair.ours.send(FrameKind.CHUNK, 2)
        assert (await handler.frame()).sequence == 2


@each_way
@pytest.mark.asyncio
async def test_end_of_file_in_the_middle_of_a_frame(way: str) -> None:
    handler = Recorder()
    async with (
        listening(connected=lambda link: link.attach(handler)) as listener,
        raw_peer(listener, way) as peer,
    ):
        await peer.prove(listener)
        peer.writer.write(encode(FrameKind.CHUNK, 1, b"", b"whole"))
        peer.writer.write(encode(FrameKind.CHUNK, 2, b"", b"half of it")[:-5])
        peer.writer.write_eof()
        loss = await handler.loss()
        assert type(loss) is PeerLostError
        assert "in the middle of a frame without goodbye" in str(loss)
        assert [frame.body for frame in handler.frames] == [b"whole"]
        assert await peer.ended()


@each_way
@pytest.mark.asyncio
async def test_a_reset_connection(way: str) -> None:
    handler = Recorder()
    linked_up: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    async with (
        listening(connected=linked_up.set_result) as listener,
        raw_peer(listener, way) as peer,
    ):
        await peer.prove(listener)
        link = await linked_up
        link.attach(handler)
        link.send(FrameKind.CHUNK, 0, b"", bytes(50_000))  # unread there when it closes
        peer.reset()
        loss = await handler.loss()
        assert type(loss) is PeerLostError
        if loss.__cause__ is not None:  # an end of file may have been seen first
            assert isinstance(loss.__cause__, NetworkError)
            assert isinstance(loss.__cause__.__cause__, OSError)
        await link.aclose()
        assert handler.losses == [loss]


@each_way
@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        encode_header(FrameKind.CHUNK, 0, 0, 2**63),
        encode_header(FrameKind.CHUNK, 0, 0, 2**64 - 1),
        encode_header(FrameKind.CHUNK, 0, 2**32 - 1, 0),
        encode_header(99, 0, 0, 0),
        b"\0" * 100,
    ],
    ids=["http", "2^63", "-1", "head", "kind", "zeros"],
)
@pytest.mark.asyncio
async def test_hostile_frames_end_the_link_and_nothing_else(way: str, hostile: bytes) -> None:
    handlers: list[Recorder] = []

    def connected(link: Link) -> None:
        handlers.append(Recorder())
        link.attach(handlers[-1])

    async with (
        listening(connected=connected) as listener,
        raw_peer(listener, way) as good,
        raw_peer(listener, way) as bad,
    ):
        await good.prove(listener)
        await bad.prove(listener)
        bad.writer.write(encode(FrameKind.ENVELOPE, 1, b"", b"fine") + hostile)
        loss = await handlers[1].loss()
        assert type(loss) is PeerLostError
        assert isinstance(loss.__cause__, ProtocolError)
        assert [frame.body for frame in handlers[1].frames] == [b"fine"]
        assert await bad.ended()
        good.writer.write(encode(FrameKind.ENVELOPE, 2))
        assert (await handlers[0].frame()).sequence == 2


@each_way
@pytest.mark.asyncio
async def test_a_backlog_is_bounded_and_nothing_of_it_is_lost(way: str) -> None:
    async with linked(way) as pair:
        count = 0
        while pair.ours.writable:
            while pair.ours.writable:
                pair.ours.send(FrameKind.CHUNK, count, b"", bytes(50_000))
                count += 1
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)  # nothing announces that the kernel takes no more
        drained = asyncio.create_task(pair.ours.drain())
        await asyncio.sleep(0)
        assert BACKLOG < pair.theirs.statistics.bytes_in < 2 * BACKLOG
        assert not drained.done()
        handler = Recorder()
        pair.theirs.attach(handler)
        while len(handler.frames) < count:
            await handler.frame()
        assert [frame.sequence for frame in handler.frames] == list(range(count))
        await drained


@each_way
@pytest.mark.asyncio
async def test_closing_writes_out_what_a_slow_reader_has_not_taken(way: str) -> None:
    async with linked(way) as pair:
        for n in range(30):
            pair.ours.send(FrameKind.CHUNK, n, b"", bytes(1_000_000))
        closing = asyncio.create_task(pair.ours.aclose())
        again = asyncio.create_task(pair.ours.aclose())
        handler = Recorder()
        await asyncio.sleep(0)
        assert not closing.done()
        pair.theirs.send(FrameKind.CHUNK, 0, b"", bytes(1_000_000))  # nobody takes it any more
        pair.theirs.attach(handler)
        await closing
        await again
        assert pair.ours.error is None
        assert len(handler.frames) == 30
        assert isinstance(handler.losses[0], PeerClosedError)


@each_way
@pytest.mark.asyncio
async def test_closing_is_bounded_when_the_peer_does_not_read(way: str) -> None:
    async with linked(way, Options(close_timeout=0.05)) as pair:
        handler = Recorder()
        for n in range(30):
            pair.ours.send(FrameKind.CHUNK, n, b"", bytes(1_000_000))
        await pair.ours.aclose()  # nobody is attached over there
        assert isinstance(pair.ours.error, PeerLostError)
        assert "0.05 s" in str(pair.ours.error)
        pair.theirs.attach(handler)
        assert type(await handler.loss()) is PeerLostError


@each_way
@pytest.mark.asyncio
async def test_closing_given_up_drops_the_link(way: str) -> None:
    async with linked(way) as pair:
        for n in range(30):
            pair.ours.send(FrameKind.CHUNK, n, b"", bytes(1_000_000))
        closing = asyncio.create_task(pair.ours.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        handler = Recorder()
        pair.theirs.attach(handler)
        assert type(await handler.loss()) is PeerLostError


@each_way
@pytest.mark.asyncio
async def test_a_peer_that_dies_while_this_side_closes(way: str) -> None:
    async with linked(way) as pair:
        for n in range(30):
            pair.ours.send(FrameKind.CHUNK, n, b"", bytes(1_000_000))
        closing = asyncio.create_task(pair.ours.aclose())
        await asyncio.sleep(0)
        pair.theirs.abort()
        await closing
        assert isinstance(pair.ours.error, PeerLostError)
        with pytest.raises(ClosedError):
            pair.ours.send(FrameKind.CHUNK, 0)


@each_way
@pytest.mark.asyncio
async def test_an_idle_link_beats_and_lives(way: str) -> None:
    options = Options(heartbeat_interval=0.02, peer_timeout=0.3)
    async with linked(way, options) as pair:
        handlers = Recorder(), Recorder()
        pair.ours.attach(handlers[0])
        pair.theirs.attach(handlers[1])
        await ticks(pair.listener.heart, 30)  # twice the time-out
        assert pair.ours.statistics.frames_in > 20
        assert [each.losses for each in handlers] == [[], []]
        assert handlers[0].frames == []  # heartbeats are no business of the handler


@each_way
@pytest.mark.asyncio
async def test_a_busy_link_does_not_beat(way: str) -> None:
    async with linked(way) as pair:
        handler = Recorder()
        pair.theirs.attach(handler)
        for n in range(3):
            pair.ours.send(FrameKind.CHUNK, n)
            pair.ours.beat(1.0, 30.0)  # type: ignore[attr-defined]
        assert pair.ours.statistics.frames_out == 3
        pair.ours.beat(1.0, 30.0)  # type: ignore[attr-defined]
        assert pair.ours.statistics.frames_out == 4


@each_way
@pytest.mark.asyncio
async def test_a_peer_that_falls_silent_is_lost(way: str) -> None:
    options = Options(heartbeat_interval=0.02, peer_timeout=0.1)
    handler = Recorder()
    hello = Hello(group="g", sender="a:0", recipient="b:0", incarnation="x", heartbeat=0.02)
    async with (
        listening(options=options, connected=lambda link: link.attach(handler)) as listener,
        raw_peer(listener, way) as peer,
    ):
        await peer.prove(listener, hello)
        loss = await handler.loss()
        assert type(loss) is PeerLostError
        assert "silent" in str(loss)
        assert listener.heart._timer is None


@each_way
@pytest.mark.asyncio
async def test_a_peer_with_a_slow_heart_is_given_more_time(way: str) -> None:
    async with linked(way) as pair:
        link = pair.ours
        link.peer = Hello(group="g", sender="b:0", recipient="a:0", incarnation="x", heartbeat=10.0)
        handler = Recorder()
        link.attach(handler)
        for _ in range(29):
            link.beat(1.0, 2.0)  # type: ignore[attr-defined]
        assert handler.losses == []
        link.beat(1.0, 2.0)  # type: ignore[attr-defined]
        assert len(handler.losses) == 1


@each_way
@pytest.mark.asyncio
async def test_links_of_a_loop_receive_into_one_buffer_and_keep_their_frames_apart(
    way: str,
) -> None:
    async with linked(way) as first, linked(way) as second:
        links = [first.theirs, second.theirs]
        assert links[0].get_buffer(-1) is links[1].get_buffer(-1)  # type: ignore[attr-defined]
        handlers = [Recorder(), Recorder()]
        for link, handler in zip(links, handlers, strict=True):
            link.attach(handler)
        for number in range(20):
            for who, link in enumerate((first.ours, second.ours)):
                link.send(FrameKind.CHUNK, number, b"", bytes([who]) * (40_000 + 7 * number))
        for who, handler in enumerate(handlers):
            for number in range(20):
                frame = await handler.frame()
                assert frame.body == bytes([who]) * (40_000 + 7 * number)


@pytest.mark.tight
@each_way
@pytest.mark.asyncio
async def test_nothing_is_left_of_a_closed_link(way: str) -> None:
    gone = []
    async with linked(way) as pair:
        pair.ours.attach(Recorder())
        gone = [weakref.ref(pair.ours), weakref.ref(pair.theirs)]
        sock = pair.ours._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        await pair.ours.aclose()
        assert sock.fileno() == -1 or sock.family == socket.AF_UNIX
        assert pair.listener.heart._timer is not None or pair.theirs.error is not None
    del pair, sock
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert [each() for each in gone] == [None, None]
