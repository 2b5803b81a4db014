"""The life of one group: it connects, is lost, breaks, is attacked, and closes in every state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import RouteCount
from aiocomm.bulk import End
from aiocomm.errors import (
    AiocommError,
    ClosedError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
    RouteError,
)
from aiocomm.payload import Kind
from aiocomm.scheduler.envelope import credit_head, envelope_head
from aiocomm.testing import MemoryStore
from aiocomm.transport.base import FrameKind

from .pairs import LARGE, MEMBERS, each_route, each_wire, options_for, pair, ramp, ready, until

pytestmark = pytest.mark.asyncio


async def failure(work: Any) -> BaseException | None:
    await asyncio.wait([work])
    error: BaseException | None = work.exception()
    return error


# --- connecting ---


@each_route
async def test_ready_connects_and_sets_the_bulk_route_up(route: str) -> None:
    async with pair(route) as (a, b):
        assert a.statistics().state == b.statistics().state == "new"
        await a.ready()
        assert a.statistics().state == "up"
        assert a.statistics().bulk_route == (None if route == "memory" else route)
        await until(lambda: b.statistics().state == "up")
        await ready(a, b)


async def test_closing_while_the_peer_is_looked_for_drops_what_it_cannot_deliver(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = options_for("link", close_timeout=0.1)
    async with aiocomm.open("a:0", store=MemoryStore(), options=options) as collective:
        group = collective.create_collective_group(MEMBERS)
        send, recv = group.send(1), group.recv()
        waiting = asyncio.create_task(group.ready())
        await asyncio.sleep(0)
        assert group.statistics().state == "connecting"
        await group.aclose()
        assert group.statistics().state == "closed"
        assert "sends dropped at close: 1; b:0 did not" in caplog.text
        for work in (send, recv, waiting):
            assert isinstance(await failure(work), ClosedError)


@pytest.mark.parametrize("route", ["shm", "gloo"])
@pytest.mark.parametrize(("who", "kind"), [("own", ClosedError), ("peer", PeerLostError)])
async def test_what_waits_to_be_ready_hears_why_there_will_be_no_route(
    route: str, who: str, kind: type[AiocommError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(route) as (a, b):
        await asyncio.gather(a.send(1), b.recv())
        mine, theirs = a._session._bulk, b._session._bulk
        assert mine is not None
        assert theirs is not None
        monkeypatch.setattr(theirs, "frame_received", lambda _: None)  # the set-up takes its time
        waiting = asyncio.create_task(a.ready())
        await until(lambda: mine._opening is not None)
        if who == "own":
            await a.abort()
        else:
            assert b._session._link is not None
            b._session._link.abort()
        error = await failure(waiting)
        assert isinstance(error, kind)
        assert error.group == a.name


async def test_a_board_that_fails_in_its_own_way_fails_the_works() -> None:
    class Broken(MemoryStore):
        async def get(self, key: str, timeout: float) -> bytes:
            raise OSError("disk full")

    async with aiocomm.open("a:0", store=Broken()) as collective:
        group = collective.create_collective_group(MEMBERS)
        error = await failure(group.send(1))
        assert isinstance(error, RendezvousError)
        assert "OSError: disk full" in str(error)
        assert isinstance(error.__cause__, OSError)
        with pytest.raises(RendezvousError, match="disk full"):
            await group.ready()


async def test_aborting_while_connecting_is_quiet_and_quick() -> None:
    async with aiocomm.open("a:0", store=MemoryStore()) as collective:
        group = collective.create_collective_group(MEMBERS)
        send, recv = group.send(1), group.recv()
        async with asyncio.timeout(5):
            await group.abort()
            await group.abort()
            await group.aclose()
        assert isinstance(send.exception(), ClosedError)
        assert isinstance(recv.exception(), ClosedError)


async def test_a_close_while_connecting_still_delivers_to_a_peer_that_comes() -> None:
    store = MemoryStore()
    async with aiocomm.open("a:0", store=store) as first:
        group = first.create_collective_group(MEMBERS)
        send = group.send("patience")
        closing = asyncio.create_task(group.aclose())
        await asyncio.sleep(0)
        async with aiocomm.open("b:0", store=store) as second:
            assert await second.create_collective_group(MEMBERS).recv() == "patience"
            await closing
            assert send.done()


async def test_closing_a_group_that_was_never_used() -> None:
    async with pair("link") as (a, b):
        await a.aclose()
        await b.abort()
        with pytest.raises(ClosedError, match="makes a new one"):
            a.send(1)
        with pytest.raises(ClosedError):
            await b.ready()


async def test_nothing_is_left_of_the_dial_that_the_peer_overtook() -> None:
    async with pair("link") as (a, b):
        await ready(a, b)
        sessions = [a._session, b._session]
        await until(lambda: all(session._connecting is None for session in sessions))


@pytest.mark.parametrize(
    ("route", "eager_limit", "by_link"),
    [
        ("shm", 64 << 10, [16 << 10]),  # above that the socket's copies cost more than the ring
        ("shm", 1 << 10, []),
        ("gloo", 64 << 10, [16 << 10, (16 << 10) + 1, 64 << 10]),
    ],
)
async def test_what_rides_in_its_envelope_depends_on_the_route(
    route: str, eager_limit: int, by_link: list[int]
) -> None:
    sizes = [16 << 10, (16 << 10) + 1, 64 << 10]
    async with pair(route, eager_limit=eager_limit) as (a, b):
        for _ in range(2):  # before there is a bulk route, and with one
            before = a.statistics().sent
            for size in sizes:
                sent = a.send(ramp(size))
                assert torch.equal(await b.recv(), ramp(size))
                await sent
            after = a.statistics().sent
            link, bulk = (_messages(after, n) - _messages(before, n) for n in ("link", route))
            assert (link, bulk) == (len(by_link), len(sizes) - len(by_link))
            large = a.send(ramp(65 << 10))
            await b.recv()
            await large


def _messages(sent: Mapping[str, RouteCount], route: str) -> int:
    return sent[route].messages if route in sent else 0


# --- goodbye ---


@each_route
async def test_whole_messages_outlive_a_goodbye(route: str) -> None:  # F14
    async with pair(route) as (a, b):
        waiting = b.recv()
        sends = [a.send(number) for number in range(3)] + [a.send(ramp(LARGE)), a.send("last")]
        assert await waiting == 0
        await a.aclose()
        assert all(send.done() for send in sends)
        await until(lambda: b.statistics().state == "lost")
        assert [await b.recv() for _ in range(2)] == [1, 2]
        assert torch.equal(await b.recv(), ramp(LARGE))
        assert await b.recv() == "last"
        for work in (b.recv(), b.send(1), b.recv_tensor(torch.empty(1))):
            error = await failure(work)
            assert isinstance(error, PeerClosedError)
            assert (error.group, error.peer) == (b.name, "a:0")
        with pytest.raises(PeerClosedError):
            await b.ready()


@each_route
async def test_closing_fails_receives_that_wait_and_lets_sends_go(route: str) -> None:
    async with pair(route) as (a, b):
        await ready(a, b)
        recv, send = a.recv(), a.send(ramp(LARGE))
        closing = asyncio.create_task(a.aclose())
        assert torch.equal(await b.recv(), ramp(LARGE))
        await closing
        assert send.result() is None
        assert isinstance(recv.exception(), ClosedError)
        for call in (lambda: a.send(1), a.recv):
            with pytest.raises(ClosedError, match="closed on this side"):
                call()


@pytest.mark.parametrize("linked", [True, False])
@each_route
async def test_two_that_close_at_once_do_not_wait_for_each_other(
    route: str, linked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # More than the window lets go, and nothing moves in before somebody asks.
    settings = {"close_timeout": 600.0, "window_messages": 4, "prefetch_bytes": 0}
    async with pair(route, **settings) as groups:
        if linked:
            await ready(*groups)
        sends = [[group.send(ramp(LARGE)) for _ in range(8)] for group in groups]
        async with asyncio.timeout(20):
            await asyncio.gather(*(group.aclose() for group in groups))
    errors = [[work.exception() for work in works] for works in sends]
    assert [None] * 8 in errors  # whoever is done first says goodbye
    left = [error for each in errors for error in each if error is not None]
    assert all(isinstance(error, PeerClosedError) for error in left)
    assert caplog.messages == []


async def test_the_warning_tells_sends_that_were_dropped_from_receives_that_were_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair("link", close_timeout=0.1) as (a, b):
        await ready(a, b)
        a._session.receiving._inbound = 1  # a transfer of the peer that never ends
        await a.aclose()
    assert caplog.messages == [
        "group a:0|b:0: transfers cut at close: 1; b:0 did not end them within 0.1 s"
    ]


@each_route
async def test_a_closed_pair_can_meet_again(route: str) -> None:
    async with pair(route) as (a, b):
        await asyncio.gather(a.send(1), b.recv())
        first, second = a._runtime, b._runtime
        await asyncio.gather(a.aclose(), b.aclose())
        again = [aiocomm.current(name).create_collective_group(MEMBERS) for name in MEMBERS]
        assert again[0] is not a
        assert [again[0]._runtime, again[1]._runtime] == [first, second]
        await again[1].send("again")
        assert await again[0].recv() == "again"


@each_wire
async def test_a_receiver_that_closes_in_mid_transfer_leaves_nothing(route: str) -> None:
    async with pair(route, stall_timeout=600.0) as (a, b):
        await ready(a, b)
        size = 16 << 20
        recv = b.recv_tensor(torch.empty(size, dtype=torch.uint8))
        send = a.send_tensor(ramp(size))
        await until(lambda: b._session.receiving.moving, pause=0)
        async with asyncio.timeout(10):
            await b.aclose()
            assert isinstance(await failure(recv), ClosedError)
            await asyncio.wait([send])


# --- losing ---


@each_route
async def test_a_dropped_link_fails_what_is_pending(route: str) -> None:
    async with pair(route, window_messages=2) as (a, b):
        await ready(a, b)
        works = [a.send(number) for number in range(4)] + [a.recv(), a.recv()]
        await until(lambda: b.statistics().unreceived == 2)
        b._session._link.abort()
        errors = [await failure(work) for work in works]
        assert errors[:2] == [None, None]
        for error in errors[2:]:
            assert isinstance(error, PeerLostError)
            assert not isinstance(error, PeerClosedError)
        b._session._lose(PeerLostError("dropped above"))  # an end that aborts is not told
        assert [await b.recv() for _ in range(2)] == [0, 1]


@each_wire
async def test_a_broken_route_ends_its_direction_alone(
    route: str,
) -> None:
    async with pair(route) as (a, b):
        await ready(a, b)
        a._session._bulk.sever(End.SENDING)
        send, recv = a.send(ramp(LARGE)), b.recv()
        async with asyncio.timeout(10):
            for call in (lambda: send, lambda: recv, lambda: a.send("small"), b.recv):
                error = await failure(call())
                assert isinstance(error, RouteError)
                assert error.group == a.name
            await b.send({"the other": ramp(LARGE)})
            assert torch.equal((await a.recv())["the other"], ramp(LARGE))
        assert a.statistics().state == b.statistics().state == "up"


# --- a peer that breaks the protocol ---

HOSTILE: dict[str, tuple[FrameKind, int, bytes, bytes]] = {
    "an empty envelope": (FrameKind.ENVELOPE, 0, b"", b""),
    "an unknown kind": (FrameKind.ENVELOPE, 0, b"\xff" * 40, b""),
    "a wrong sequence": (
        FrameKind.ENVELOPE,
        7,
        envelope_head(Kind.OBJECT, b"", 0, bulk=False),
        b"",
    ),
    "a tensor without meta": (
        FrameKind.ENVELOPE,
        0,
        envelope_head(Kind.TENSOR, b"", 0, bulk=False),
        b"",
    ),
    "sizes from hell": (
        FrameKind.ENVELOPE,
        0,
        envelope_head(Kind.OBJECT, b"\xff" * 64, 0, bulk=True),
        b"",
    ),
    "bulk without a route": (
        FrameKind.ENVELOPE,
        0,
        envelope_head(Kind.OBJECT, b"", 0, bulk=True),
        b"",
    ),
    "an empty credit": (FrameKind.CREDIT, 0, b"", b""),
    "a second window": (FrameKind.CREDIT, 0, credit_head(9, 9, first=True), b""),
    "credit for nothing": (FrameKind.CREDIT, 0, credit_head(9, 9), b""),
    "an empty route frame": (FrameKind.ROUTE, 0, b"", b""),
    "an unknown step": (FrameKind.ROUTE, 0, b"\x77", b""),
    "chunks out of the blue": (FrameKind.CHUNK, 0, b"", b"x" * 10),
    "a grant out of the blue": (FrameKind.GRANT, 0, b"", b""),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_frames_that_break_the_protocol_cost_the_link_and_no_more(
    case: str, complaints: list[Any]
) -> None:
    async with pair("link") as (a, b):
        await asyncio.gather(a.ready(), b.recv().then(id), a.send(1))
        kind, sequence, head, body = HOSTILE[case]
        if case != "a wrong sequence" and kind is FrameKind.ENVELOPE:
            sequence = 1  # the next one: message 0 has gone
        recv = b.recv()
        # Their own route is agreed on towards b; an end that has none is asked about.
        a._session._link.send(kind, sequence, head, body)
        async with asyncio.timeout(10):
            error = await failure(recv)
        assert isinstance(error, PeerLostError | ProtocolError), error
        if isinstance(error, PeerLostError):
            assert isinstance(error.__cause__, ProtocolError), error
            assert b.statistics().state == "lost"
        complaints.clear()  # the loop of a peer that lies may say so


async def test_an_unknown_route_is_refused_and_the_next_one_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiocomm.bulk.candidates", lambda *_, **__: ("carrier pigeon", "link"))
    async with pair("link") as (a, b):
        await asyncio.gather(a.send(ramp(LARGE)), b.recv())
        assert a.statistics().bulk_route == "link"
        assert "route carrier pigeon cannot be set up, falling back" in caplog.text


async def test_without_any_route_large_sends_fail_and_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiocomm.bulk.candidates", lambda *_, **__: ("carrier pigeon",))
    async with pair("link") as (a, b):
        await asyncio.gather(a.send("small"), b.recv())
        async with asyncio.timeout(10):
            error = await failure(a.send(ramp(LARGE)))
        assert isinstance(error, RouteError)
        assert "carrier pigeon" in str(error)
        with pytest.raises(RouteError):
            await a.ready()
