"""Dialling: the way that is taken, everything that can be at the other end, and giving up."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from aiocomm.errors import HandshakeError, NetworkError
from aiocomm.options import Options
from aiocomm.transport.base import FrameKind, Link
from aiocomm.transport.endpoint import Endpoint, host_identity
from aiocomm.transport.handshake import PREAMBLE, Acceptor
from aiocomm.transport.link import Heart, dial
from aiocomm.transport.memory import MemoryLink
from aiocomm.transport.sockets import bind_tcp, bind_unix

from .links import HELLO, WAYS, Recorder, apart, by_way, listening

SECRET = b"secret"


@asynccontextmanager
async def fake(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> AsyncIterator[Endpoint]:
    """An endpoint where something else than a listener answers; ``talk`` is awaited."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)  # type: ignore[misc]
        finally:
            writer.close()
            done.set()

    sock = bind_tcp("127.0.0.1", 0)
    server = await asyncio.start_server(serve, sock=sock)
    host, port = sock.getsockname()
    try:
        yield Endpoint("life of b", "another host", "", host, port, SECRET)
        await done.wait()
    finally:
        server.close()
        await server.wait_closed()


async def dial_raw(endpoint: Endpoint, **more: float) -> Link:
    return await dial(endpoint, HELLO, heart=Heart(Options()), **more)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_the_shortest_way_is_taken() -> None:
    links: list[Link] = []
    async with listening(connected=links.append) as listener:
        heart = listener.heart
        links.append(await dial(listener.endpoint, HELLO, heart=heart))
        assert isinstance(links[1], MemoryLink)
        with apart():
            unix = await dial(listener.endpoint, HELLO, heart=heart)
            links.append(unix)
            elsewhere = replace(listener.endpoint, host_id="another host")
            tcp = await dial(elsewhere, HELLO, heart=heart)
            links.append(tcp)
            gone = replace(listener.endpoint, unix=secrets.token_hex(8))
            fallen = await dial(gone, HELLO, heart=heart)
            links.append(fallen)
        families = [
            link._transport.get_extra_info("socket").family.name  # type: ignore[attr-defined]
            for link in (unix, tcp, fallen)
        ]
        assert families == ["AF_UNIX", "AF_INET", "AF_INET"]
        for link in links:
            link.abort()
            await link.aclose()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.tight
@pytest.mark.asyncio
async def test_64_dials_at_once(way: str) -> None:
    theirs: list[Link] = []
    handlers: dict[str, Recorder] = {}

    def connected(link: Link) -> None:
        theirs.append(link)
        handlers[link.peer.group] = handler = Recorder()
        link.attach(handler)

    async with listening(connected=connected) as listener:
        endpoint = by_way(listener.endpoint, way)
        hellos = [replace(HELLO, group=f"g{n}") for n in range(64)]
        with apart(way):
            ours = await asyncio.gather(
                *(dial(endpoint, hello, heart=listener.heart) for hello in hellos)
            )
        for n, link in enumerate(ours):
            link.send(FrameKind.CHUNK, n)
        for n in range(64):
            assert (await handlers[f"g{n}"].frame()).sequence == n
        await asyncio.gather(*(link.aclose() for link in ours))
        await asyncio.gather(*(handler.loss() for handler in handlers.values()))
        await asyncio.gather(*(link.aclose() for link in theirs))
        assert repr(listener.heart).startswith("<Heart of 0 links")


@pytest.mark.asyncio
async def test_nobody_listens() -> None:
    with bind_tcp("127.0.0.1", 0) as sock:  # bound, so that nobody else takes it
        endpoint = Endpoint(
            "x", host_identity(), "nobody", "127.0.0.1", sock.getsockname()[1], SECRET
        )
        with pytest.raises(NetworkError, match="cannot connect") as caught:
            await dial_raw(endpoint)
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)
        assert (caught.value.group, caught.value.peer) == ("g", "b:0")


@pytest.mark.asyncio
async def test_something_else_answers() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")

    async with fake(talk) as endpoint:
        with pytest.raises(HandshakeError, match="no aiocomm worker"):
            await dial_raw(endpoint)


@pytest.mark.parametrize("after", ["nothing", "part", "greeting", "claim"])
@pytest.mark.asyncio
async def test_the_peer_ends_the_connection_in_the_handshake(after: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        acceptor = Acceptor(SECRET)
        if after == "part":
            writer.write(PREAMBLE)
        elif after != "nothing":
            writer.write(acceptor.greeting)
        if after == "claim":
            while acceptor.receive(await reader.read(1)) is None:
                pass

    where = "before it said" if after in ("nothing", "part") else "after this side proved"
    async with fake(talk) as endpoint:
        with pytest.raises(HandshakeError, match=f"closed the connection.*{where}"):
            await dial_raw(endpoint)


@pytest.mark.asyncio
async def test_the_peer_says_nothing() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""  # until the dialler gives up

    async with fake(talk) as endpoint:
        with pytest.raises(HandshakeError, match=r"within 0.05 s"):
            await dial_raw(endpoint, timeout=0.05)


@pytest.mark.parametrize("change", [{"incarnation": "somebody"}, {"group": "another"}], ids=str)
@pytest.mark.asyncio
async def test_the_peer_that_answers_is_another_one(change: dict[str, str]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        acceptor = Acceptor(SECRET)
        writer.write(acceptor.greeting)
        while (hello := acceptor.receive(await reader.read(1))) is None:
            pass
        answer = replace(
            hello, sender=hello.recipient, recipient=hello.sender, incarnation=hello.target
        )
        writer.write(acceptor.welcome(replace(answer, **change)))  # type: ignore[arg-type]

    async with fake(talk) as endpoint:
        with pytest.raises(HandshakeError, match="not the one"):
            await dial_raw(endpoint)


@pytest.mark.tight
@pytest.mark.asyncio
async def test_a_dial_given_up_in_the_handshake_leaves_no_socket() -> None:
    greeted = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Acceptor(SECRET).greeting)
        await reader.readexactly(32)
        greeted.set()
        await reader.read()  # until the dialler is gone

    async with fake(talk) as endpoint:
        dialling = asyncio.create_task(dial_raw(endpoint))
        await greeted.wait()
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.tight
@pytest.mark.asyncio
async def test_a_dial_given_up_at_any_moment_leaves_nothing(way: str) -> None:
    handlers: list[Recorder] = []

    def connected(link: Link) -> None:
        handlers.append(Recorder())
        link.attach(handlers[-1])

    async with listening(connected=connected) as listener:
        endpoint = by_way(listener.endpoint, way)
        outcomes = set()
        with apart(way):
            for steps in range(25):
                dialling = asyncio.create_task(dial(endpoint, HELLO, heart=listener.heart))
                for _ in range(steps):
                    await asyncio.sleep(0)
                dialling.cancel()
                await asyncio.wait([dialling])
                outcomes.add(dialling.cancelled())
                if not dialling.cancelled():
                    dialling.result().abort()
                    await dialling.result().aclose()
            link = await dial(endpoint, HELLO, heart=listener.heart)
        await link.aclose()
        assert True in outcomes
        for handler in handlers:
            await handler.loss()


@pytest.mark.asyncio
async def test_a_frozen_peer_with_a_full_backlog() -> None:
    sock, name = bind_unix()
    assert sock is not None
    with sock:
        sock.listen(0)
        endpoint = Endpoint("x", host_identity(), name, "127.0.0.1", 9, SECRET)
        for _ in range(2):
            with pytest.raises(HandshakeError, match=r"within 0.05 s"):
                await dial_raw(endpoint, timeout=0.05)
