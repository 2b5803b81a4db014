"""The contract of a link, one body over every way to link two members."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.errors import (
    ClosedError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    UsageError,
)
from aiocomm.transport.base import Frame, FrameKind, Hello

from ..loops import Context
from .links import HELLO, WAYS, Recorder, linked

each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@pytest.mark.asyncio
async def test_frames_arrive_whole_and_in_order_both_ways(way: str) -> None:
    async with linked(way) as pair:
        ours, theirs = Recorder(), Recorder()
        pair.ours.attach(ours)
        pair.theirs.attach(theirs)
        sent = [
            Frame(FrameKind.ENVELOPE, n, b"h" * (n % 7), bytes([n % 256]) * (n * 97))
            for n in range(300)
        ]
        for frame in sent:
            pair.ours.send(frame.kind, frame.sequence, frame.head, frame.body)
            pair.theirs.send(frame.kind, frame.sequence, frame.head, frame.body)
        for _ in sent:
            await ours.frame()
            await theirs.frame()
        assert ours.frames == sent
        assert theirs.frames == sent
        assert {type(frame.body) for frame in theirs.frames} == {bytes}


@each_way
@pytest.mark.asyncio
async def test_both_ends_know_whom_they_talk_to(way: str) -> None:
    async with linked(way) as pair:
        incarnation = pair.listener.endpoint.incarnation
        assert pair.theirs.peer == Hello(
            group="g",
            sender="a:0",
            recipient="b:0",
            incarnation="life of a",
            target=incarnation,
            heartbeat=1.0,
        )
        assert pair.ours.peer == Hello(
            group="g",
            sender="b:0",
            recipient="a:0",
            incarnation=incarnation,
            target=HELLO.incarnation,
            heartbeat=1.0,
        )
        for link in (pair.ours, pair.theirs):
            assert link.local_host == "127.0.0.1"
            assert link.in_process == (way == "memory")
            assert link.error is None
            assert " open to " in repr(link)


@each_way
@pytest.mark.asyncio
async def test_what_came_before_a_handler_is_delivered_by_attach(way: str) -> None:
    async with linked(way) as pair:
        for n in range(5):
            pair.ours.send(FrameKind.CHUNK, n)
        await pair.ours.aclose()
        while pair.theirs.error is None:  # noqa: ASYNC110  (without a handler, no event)
            await asyncio.sleep(0)
        handler = Recorder()
        pair.theirs.attach(handler)
        assert [frame.sequence for frame in handler.frames] == [0, 1, 2, 3, 4]
        (loss,) = handler.losses
        assert isinstance(loss, PeerClosedError)


@each_way
@pytest.mark.asyncio
async def test_a_second_handler_is_refused(way: str) -> None:
    async with linked(way) as pair:
        pair.ours.attach(Recorder())
        with pytest.raises(UsageError, match="handler already"):
            pair.ours.attach(Recorder())


@each_way
@pytest.mark.asyncio
async def test_a_goodbye_follows_everything_that_was_sent(way: str) -> None:
    async with linked(way) as pair:
        handler = Recorder()
        pair.theirs.attach(handler)
        for n in range(40):
            pair.ours.send(FrameKind.CHUNK, n, b"", bytes(200_000))
        await pair.ours.aclose()
        loss = await handler.loss()
        assert isinstance(loss, PeerClosedError)
        assert (loss.group, loss.peer) == ("g", "a:0")
        assert [len(frame.body) for frame in handler.frames] == [200_000] * 40
        assert pair.ours.error is None
        with pytest.raises(ClosedError):
            pair.ours.send(FrameKind.CHUNK, 0)
        with pytest.raises(ClosedError):
            await pair.ours.drain()
        with pytest.raises(PeerClosedError):
            pair.theirs.send(FrameKind.CHUNK, 0)
        with pytest.raises(PeerClosedError):
            await pair.theirs.drain()
        await pair.ours.aclose()
        await pair.theirs.aclose()
        assert handler.losses == [loss]


@each_way
@pytest.mark.asyncio
async def test_an_abort_is_death_to_the_peer_and_silence_here(way: str) -> None:
    async with linked(way) as pair:
        ours, theirs = Recorder(), Recorder()
        pair.ours.attach(ours)
        pair.theirs.attach(theirs)
        pair.ours.abort()
        pair.ours.abort()
        loss = await theirs.loss()
        assert type(loss) is PeerLostError
        with pytest.raises(ClosedError):
            pair.ours.send(FrameKind.CHUNK, 0)
        await pair.ours.aclose()
        await pair.theirs.aclose()
        assert ours.losses == []
        assert theirs.losses == [loss]
        assert " closed to " in repr(pair.ours)
        assert " lost to " in repr(pair.theirs)


@each_way
@pytest.mark.asyncio
async def test_both_sides_say_goodbye_at_once(way: str) -> None:
    async with linked(way) as pair:
        ours, theirs = Recorder(), Recorder()
        pair.ours.attach(ours)
        pair.theirs.attach(theirs)
        async with asyncio.timeout(5):
            await asyncio.gather(pair.ours.aclose(), pair.theirs.aclose())
        assert ours.losses == theirs.losses == []
        assert pair.ours.error is pair.theirs.error is None


@each_way
@pytest.mark.asyncio
async def test_a_handler_may_answer_and_the_stack_does_not_grow(way: str) -> None:
    async with linked(way) as pair:
        done = asyncio.get_running_loop().create_future()

        def ping(frame: Frame) -> None:
            if frame.sequence < 3000:
                pair.ours.send(FrameKind.ENVELOPE, frame.sequence + 1)
            else:
                done.set_result(None)

        pair.ours.attach(Recorder(ping))
        pair.theirs.attach(
            Recorder(lambda frame: pair.theirs.send(FrameKind.ENVELOPE, frame.sequence + 1))
        )
        pair.ours.send(FrameKind.ENVELOPE, 0)
        await done


@each_way
@pytest.mark.asyncio
async def test_a_handler_may_abort_and_gets_nothing_more(way: str) -> None:
    async with linked(way) as pair:
        handler = Recorder(lambda frame: pair.theirs.abort())
        peer = Recorder()
        pair.ours.attach(peer)
        for n in range(5):
            pair.ours.send(FrameKind.CHUNK, n)
        pair.theirs.attach(handler)
        await peer.loss()
        assert [frame.sequence for frame in handler.frames] == [0]
        assert handler.losses == []


@each_way
@pytest.mark.parametrize("late", [False, True], ids=["attached", "backlog"])
@pytest.mark.asyncio
async def test_a_handler_that_raises_loses_the_link_and_is_reported(
    way: str, late: bool, complaints: list[Context]
) -> None:
    def fail(frame: Frame) -> None:
        raise ZeroDivisionError("a bug")

    async with linked(way) as pair:
        peer, handler = Recorder(), Recorder(fail)
        pair.ours.attach(peer)
        if not late:
            pair.theirs.attach(handler)
        pair.ours.send(FrameKind.CHUNK, 11)
        pair.ours.send(FrameKind.CHUNK, 12)
        if late:
            if way != "memory":
                while pair.theirs.statistics.frames_in < 2:  # noqa: ASYNC110  (the same)
                    await asyncio.sleep(0)
            pair.theirs.attach(handler)
        loss = await handler.loss()
        assert isinstance(loss.__cause__, ProtocolError)
        assert loss.__cause__.sequence == 11
        assert isinstance(loss.__cause__.__cause__, ZeroDivisionError)
        assert len(handler.frames) == 1
        assert handler.losses == [loss]
        assert type(await peer.loss()) is PeerLostError
        (complaint,) = complaints
        assert "frame_received" in complaint["message"]
        assert isinstance(complaint["exception"], ZeroDivisionError)
        complaints.clear()
        with pytest.raises(PeerLostError):
            pair.theirs.send(FrameKind.CHUNK, 0)


@each_way
@pytest.mark.asyncio
async def test_a_link_lost_that_raises_is_reported(way: str, complaints: list[Context]) -> None:
    class Careless(Recorder):
        def link_lost(self, error: PeerLostError) -> None:
            super().link_lost(error)
            raise ZeroDivisionError("a bug")

    async with linked(way) as pair:
        handler = Careless()
        pair.theirs.attach(handler)
        pair.ours.abort()
        await handler.loss()
        (complaint,) = complaints
        assert "link_lost" in complaint["message"]
        complaints.clear()
        await pair.theirs.aclose()


@each_way
@pytest.mark.asyncio
async def test_drain_waits_for_a_slow_reader(way: str) -> None:
    async with linked(way) as pair:
        assert pair.ours.writable
        await pair.ours.drain()
        sent = 0
        while pair.ours.writable:  # nobody is attached over there: it fills up
            pair.ours.send(FrameKind.CHUNK, sent, b"", bytes(100_000))
            sent += 1
            await asyncio.sleep(0)
        drained = asyncio.create_task(pair.ours.drain())
        dropped = asyncio.create_task(pair.ours.drain())
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.wait([dropped])
        assert not drained.done()
        handler = Recorder()
        pair.theirs.attach(handler)
        await drained
        assert pair.ours.writable
        while len(handler.frames) < sent:
            await handler.frame()
        assert [frame.sequence for frame in handler.frames] == list(range(sent))


@each_way
@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.asyncio
async def test_drain_fails_with_the_link(way: str, whose: str) -> None:
    async with linked(way) as pair:
        while pair.ours.writable:
            pair.ours.send(FrameKind.CHUNK, 0, b"", bytes(100_000))
            await asyncio.sleep(0)
        drained = asyncio.create_task(pair.ours.drain())
        await asyncio.sleep(0)
        getattr(pair, whose).abort()
        with pytest.raises(ClosedError if whose == "ours" else PeerLostError):
            await drained


@each_way
@pytest.mark.asyncio
async def test_statistics_count_both_ways(way: str) -> None:
    async with linked(way) as pair:
        handler = Recorder()
        pair.theirs.attach(handler)
        pair.ours.send(FrameKind.CHUNK, 0, b"head", b"body")
        await handler.frame()
        out, into = pair.ours.statistics, pair.theirs.statistics
        assert (out.frames_out, out.frames_in, out.bytes_in) == (1, 0, 0)
        assert (into.frames_in, into.frames_out, into.bytes_out) == (1, 0, 0)
        assert out.bytes_out == into.bytes_in == (8 if way == "memory" else 32)
