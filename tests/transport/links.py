"""What the tests of links share: a handler that remembers, linked pairs, and peers made by hand."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from aiocomm.errors import PeerLostError, Refusal
from aiocomm.options import Options
from aiocomm.transport import link as link_module
from aiocomm.transport.base import Frame, Hello, Link
from aiocomm.transport.endpoint import Endpoint
from aiocomm.transport.handshake import Dialer
from aiocomm.transport.link import Heart, Listener, dial
from aiocomm.transport.sockets import connect_unix

WAYS = ("memory", "unix", "tcp")
HELLO = Hello(group="g", sender="a:0", recipient="b:0", incarnation="life of a")


class Recorder:
    """A handler that keeps what it is given, and calls ``then`` with each frame."""

    def __init__(self, then: Callable[[Frame], object] | None = None) -> None:
        self.frames: list[Frame] = []
        self.losses: list[PeerLostError] = []
        self._events: asyncio.Queue[Frame | PeerLostError] = asyncio.Queue()
        self._then = then

    def frame_received(self, frame: Frame) -> None:
        assert not self.losses, "a frame after the end"
        self.frames.append(frame)
        self._events.put_nowait(frame)
        if self._then is not None:
            self._then(frame)

    def link_lost(self, error: PeerLostError) -> None:
        self.losses.append(error)
        self._events.put_nowait(error)

    async def frame(self) -> Frame:
        event = await self._events.get()
        assert isinstance(event, Frame), event
        return event

    async def loss(self) -> PeerLostError:
        """Skip the frames and wait for the end."""
        while True:
            event = await self._events.get()
            if not isinstance(event, Frame):
                return event


def accept_all(hello: Hello) -> Refusal | None:
    return None


def by_way(endpoint: Endpoint, way: str) -> Endpoint:
    return endpoint.without_unix() if way == "tcp" else endpoint


def apart(way: str = "tcp") -> Any:
    """Within this block dials in one process take the socket they would take between two."""
    if way == "memory":
        return nullcontext()
    return mock.patch.object(link_module, "find", return_value=None)


@asynccontextmanager
async def listening(
    *,
    options: Options | None = None,
    accept: Callable[[Hello], Refusal | None] = accept_all,
    connected: Callable[[Link], None] = lambda link: None,
    **more: Any,
) -> AsyncIterator[Listener]:
    options = options or Options()
    listener = await Listener.open(
        "127.0.0.1",
        incarnation=secrets.token_hex(8),
        accept=accept,
        connected=connected,
        heart=Heart(options),
        options=options,
        **more,
    )
    try:
        yield listener
    finally:
        await listener.aclose()


@dataclass
class Pair:
    """Two ends of one link: ``ours`` dialled."""

    ours: Link
    theirs: Link
    listener: Listener


@asynccontextmanager
async def linked(way: str, options: Options | None = None) -> AsyncIterator[Pair]:
    """A link by one of ``WAYS``, nobody attached; both ends are dropped afterwards."""
    options = options or Options()
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    async with listening(options=options, connected=accepted.set_result) as listener:
        with apart(way):
            endpoint = by_way(listener.endpoint, way)
            ours = await dial(endpoint, HELLO, heart=listener.heart, options=options)
        theirs = await accepted
        try:
            yield Pair(ours, theirs, listener)
        finally:
            for each in (ours, theirs):
                each.abort()
                await each.aclose()


class _Ticks:
    def __init__(self, count: int) -> None:
        self.left = count
        self.over = asyncio.Event()

    def beat(self, interval: float, timeout: float) -> None:
        self.left -= 1
        if not self.left:
            self.over.set()


async def ticks(heart: Heart, count: int) -> None:
    """Wait for so many beats of the heart."""
    probe = _Ticks(count)
    heart.add(probe)
    await probe.over.wait()
    heart.remove(probe)


@dataclass
class RawPeer:
    """A connection to a listener that speaks bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def socket(self) -> Any:
        return self.writer.get_extra_info("socket")

    async def ended(self) -> bool:
        """Wait until the other end closes or resets; False if it said something first."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def prove(
        self, listener: Listener, hello: Hello = HELLO, *, greeting: bytes = b""
    ) -> None:
        """Go through the handshake as a good peer would; the greeting may be read already."""
        target = listener.endpoint.incarnation
        dialer = Dialer(listener.secret, replace(hello, target=target))
        self.writer.write(dialer.receive(greeting))
        while dialer.answer is None:
            self.writer.write(dialer.receive(await self.reader.read(1)))

    def reset(self) -> None:
        """Close so that the kernel sends RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def raw_peer(listener: Listener, way: str = "tcp") -> AsyncIterator[RawPeer]:
    endpoint = listener.endpoint
    if way == "unix":
        sock = await connect_unix(endpoint.unix)
        reader, writer = await asyncio.open_unix_connection(sock=sock)
    else:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        yield RawPeer(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):  # most of these peers are thrown out
            await writer.wait_closed()
