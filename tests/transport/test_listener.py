"""The end that is dialled, against peers that lie, stall, flood or say nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace

import pytest

from aiocomm.errors import (
    AuthenticationError,
    HandshakeError,
    NetworkError,
    Refusal,
    RefusedError,
    UsageError,
)
from aiocomm.options import Options
from aiocomm.transport import listener as listener_module
from aiocomm.transport.base import Frame, FrameKind, Hello, Link
from aiocomm.transport.handshake import DENIAL, GREETING_SIZE, MAX_HELLO, Dialer
from aiocomm.transport.link import Heart, Listener, dial

from ..loops import Context
from .links import HELLO, Recorder, accept_all, apart, by_way, linked, listening, raw_peer

WAYS = ("unix", "tcp")
each_way = pytest.mark.parametrize("way", WAYS)


def refuse_link(link: Link) -> None:
    pytest.fail("a link was made")


async def assert_still_serves(listener: Listener, way: str) -> None:
    """A good peer is still welcome."""
    with apart():
        link = await dial(by_way(listener.endpoint, way), HELLO, heart=listener.heart)
    link.abort()
    await link.aclose()


@each_way
@pytest.mark.asyncio
async def test_a_wrong_secret(way: str, caplog: pytest.LogCaptureFixture) -> None:
    accepted: list[Hello] = []
    async with listening(
        accept=lambda hello: accepted.append(hello), connected=refuse_link
    ) as listener:
        endpoint = by_way(listener.endpoint, way)
        with apart(), pytest.raises(AuthenticationError, match="AIOCOMM_SECRET") as caught:
            await dial(endpoint, HELLO, heart=listener.heart, secret=b"guess")
        assert (caught.value.group, caught.value.peer) == ("g", "b:0")
        assert accepted == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@each_way
@pytest.mark.asyncio
async def test_a_claim_that_was_recorded_and_is_replayed(way: str) -> None:
    links: list[Link] = []
    async with listening(connected=links.append) as listener:
        hello = replace(HELLO, target=listener.endpoint.incarnation)
        async with raw_peer(listener, way) as peer:
            dialer = Dialer(listener.secret, hello)
            recorded = dialer.receive(await peer.reader.readexactly(GREETING_SIZE))
            peer.writer.write(recorded)
            while dialer.answer is None:
                dialer.receive(await peer.reader.read(1))
        async with raw_peer(listener, way) as thief:
            await thief.reader.readexactly(GREETING_SIZE)
            thief.writer.write(recorded)
            assert await thief.reader.read() == DENIAL
        assert len(links) == 1
        links[0].abort()
        await links[0].aclose()


@each_way
@pytest.mark.parametrize(
    "hostile",
    [
        bytes(64) + (MAX_HELLO + 1).to_bytes(4, "big"),
        bytes(64) + b"\xff\xff\xff\xff",
        b"\xff" * 300,
    ],
    ids=["oversized", "2^32-1", "noise"],
)
@pytest.mark.asyncio
async def test_hostile_claims(way: str, hostile: bytes) -> None:
    async with listening() as listener:
        async with raw_peer(listener, way) as peer:
            await peer.reader.readexactly(GREETING_SIZE)
            peer.writer.write(hostile)
            assert await peer.ended()
        await assert_still_serves(listener, way)


@each_way
@pytest.mark.asyncio
async def test_frames_before_the_welcome(way: str) -> None:
    async with listening(connected=refuse_link) as listener, raw_peer(listener, way) as peer:
        hello = replace(HELLO, target=listener.endpoint.incarnation)
        claim = Dialer(listener.secret, hello).receive(await peer.reader.readexactly(GREETING_SIZE))
        peer.writer.write(claim + b"x")
        assert await peer.ended()


@each_way
@pytest.mark.parametrize("cut", [0, 1, 68, -1])
@pytest.mark.asyncio
async def test_a_handshake_cut_short(way: str, cut: int) -> None:
    async with listening() as listener:
        async with raw_peer(listener, way) as peer:
            hello = replace(HELLO, target=listener.endpoint.incarnation)
            claim = Dialer(listener.secret, hello).receive(
                await peer.reader.readexactly(GREETING_SIZE)
            )
            peer.writer.write(claim[:cut])
            peer.writer.write_eof()
            assert await peer.ended()
        await assert_still_serves(listener, way)


@each_way
@pytest.mark.asyncio
async def test_a_peer_that_resets_in_the_handshake(way: str) -> None:
    async with listening() as listener:
        async with raw_peer(listener, way) as peer:
            peer.writer.write(b"x")
            peer.reset()
        await assert_still_serves(listener, way)


@each_way
@pytest.mark.parametrize("drip", [False, True], ids=["silent", "slowloris"])
@pytest.mark.asyncio
async def test_a_peer_that_does_not_say_who_it_is_is_dropped(way: str, drip: bool) -> None:
    async with listening(handshake_timeout=0.1) as listener, raw_peer(listener, way) as peer:
        await peer.reader.readexactly(GREETING_SIZE)

        async def run_drip() -> None:
            while True:
                peer.writer.write(b"\0")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(run_drip()) if drip else None
        listener.handshake_timeout = listener_module.HANDSHAKE_TIMEOUT  # for those who do
        await assert_still_serves(listener, way)  # it holds up nobody
        assert await peer.ended()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


@each_way
@pytest.mark.asyncio
async def test_a_flood_of_silent_peers_is_bounded(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "MAX_PENDING", 3)
    async with (
        listening() as listener,
        raw_peer(listener, way) as one,
        raw_peer(listener, way) as two,
        raw_peer(listener, way) as three,
    ):
        greetings = [await peer.reader.readexactly(GREETING_SIZE) for peer in (one, two, three)]
        await assert_still_serves(listener, way)  # it takes the place of the oldest
        assert await one.ended()
        await two.prove(listener, greeting=greetings[1])
        await three.prove(listener, greeting=greetings[2])
        assert len(listener._pending) == 0


@each_way
@pytest.mark.parametrize("code", [Refusal.CROSSED, Refusal.NOT_A_MEMBER])
@pytest.mark.asyncio
async def test_a_refusal_by_the_layer_above(way: str, code: Refusal) -> None:
    asked: list[Hello] = []

    def accept(hello: Hello) -> Refusal:
        asked.append(hello)
        return code

    async with listening(accept=accept, connected=refuse_link) as listener:
        with apart(), pytest.raises(RefusedError) as caught:
            await dial(by_way(listener.endpoint, way), HELLO, heart=listener.heart)
        assert caught.value.code is code
        assert [hello.sender for hello in asked] == ["a:0"]


@pytest.mark.parametrize("way", ["memory", *WAYS])
@pytest.mark.asyncio
async def test_a_dial_meant_for_an_earlier_life(way: str) -> None:
    async with listening(connected=refuse_link) as listener:
        listener.endpoint = replace(listener.endpoint, incarnation="a later life")
        old = replace(by_way(listener.endpoint, way), incarnation="the life before")
        with apart(), pytest.raises(RefusedError) as caught:
            await dial(old, HELLO, heart=listener.heart)
        assert caught.value.code is Refusal.STALE


@pytest.mark.parametrize("way", ["memory", *WAYS])
@pytest.mark.asyncio
async def test_an_accept_that_raises_refuses(way: str, complaints: list[Context]) -> None:
    def accept(hello: Hello) -> None:
        raise ZeroDivisionError("a bug")

    async with listening(accept=accept, connected=refuse_link) as listener:
        with apart(way), pytest.raises(RefusedError) as caught:
            await dial(by_way(listener.endpoint, way), HELLO, heart=listener.heart)
        assert caught.value.code is Refusal.BAD_REQUEST
        (complaint,) = complaints
        assert isinstance(complaint["exception"], ZeroDivisionError)
        complaints.clear()


@pytest.mark.parametrize("way", ["memory", *WAYS])
@pytest.mark.asyncio
async def test_a_connected_that_raises_drops_the_link(way: str, complaints: list[Context]) -> None:
    def connected(link: Link) -> None:
        raise ZeroDivisionError("a bug")

    async with listening(connected=connected) as listener:
        with apart(way):
            link = await dial(by_way(listener.endpoint, way), HELLO, heart=listener.heart)
        handler = Recorder()
        link.attach(handler)
        await handler.loss()
        (complaint,) = complaints
        assert "connected" in complaint["message"]
        complaints.clear()
        await link.aclose()


@each_way
@pytest.mark.asyncio
async def test_a_listener_may_speak_first(way: str) -> None:
    """Frames sent inside ``connected`` come right behind the answer of the handshake."""
    links: list[Link] = []

    def connected(link: Link) -> None:
        links.append(link)
        for n in range(3):
            link.send(FrameKind.CREDIT, n, b"", bytes(20_000))

    async with listening(connected=connected) as listener:
        with apart():
            link = await dial(by_way(listener.endpoint, way), HELLO, heart=listener.heart)
        handler = Recorder()
        link.attach(handler)
        for n in range(3):
            assert await handler.frame() == Frame(FrameKind.CREDIT, n, b"", bytes(20_000))
        for each in (link, *links):
            each.abort()
            await each.aclose()


@pytest.mark.tight
@each_way
@pytest.mark.asyncio
async def test_closing_drops_handshakes_and_keeps_links(way: str) -> None:
    async with linked(way) as pair, raw_peer(pair.listener, way) as peer:
        await peer.reader.readexactly(GREETING_SIZE)
        await pair.listener.aclose()
        await pair.listener.aclose()
        assert await peer.ended()
        handler = Recorder()
        pair.theirs.attach(handler)
        pair.ours.send(FrameKind.CHUNK, 1)
        assert (await handler.frame()).sequence == 1
        with apart(), pytest.raises(NetworkError):
            await dial(by_way(pair.listener.endpoint, way), HELLO, heart=pair.listener.heart)
        with pytest.raises(NetworkError):  # it is not found in this process any more either
            await dial(pair.listener.endpoint, HELLO, heart=pair.listener.heart)


@pytest.mark.asyncio
async def test_the_port_may_be_chosen_and_not_twice() -> None:
    async with listening() as first:
        port = first.endpoint.port
        with pytest.raises(NetworkError, match=str(port)):
            async with listening(port=port):
                pass
    async with listening(port=port) as again:
        assert again.endpoint.port == port
        assert again.endpoint.host == "127.0.0.1"
        assert f"open at 127.0.0.1:{port}" in repr(again)


@pytest.mark.asyncio
async def test_a_host_name_is_no_address() -> None:
    options = Options()
    with pytest.raises(UsageError, match="numeric"):
        await Listener.open(
            "localhost",
            incarnation="x",
            accept=accept_all,
            connected=refuse_link,
            heart=Heart(options),
        )


@pytest.mark.asyncio
async def test_a_configured_secret_is_not_put_on_the_board(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as listener:
        assert len(listener.endpoint.secret) == 32
    monkeypatch.setenv("AIOCOMM_SECRET", "tell nobody")
    async with listening() as listener:
        assert listener.endpoint.secret == b""
        assert b"tell nobody" not in listener.endpoint.to_bytes()
        await assert_still_serves(listener, "unix")
        monkeypatch.setenv("AIOCOMM_SECRET", "something else")
        with apart(), pytest.raises(HandshakeError):
            await dial(listener.endpoint, HELLO, heart=listener.heart)


@pytest.mark.asyncio
async def test_a_listener_is_found_by_its_own_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as listener:
        incarnation = listener.endpoint.incarnation
        assert listener_module.find(incarnation) is listener
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: pid + 1)
            assert listener_module.find(incarnation) is None
    assert listener_module.find(incarnation) is None
