"""Two ends of bulk on a wire that the test plays, with routes that open when the test says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiocomm import bulk as bulk_module
from aiocomm.bulk import BulkRoutes, End, Step
from aiocomm.errors import AiocommError, PeerLostError, ProtocolError, RouteError
from aiocomm.options import Options
from aiocomm.transport.base import Frame, FrameKind
from aiocomm.transport.select import ROUTES
from aiocomm.transport.stream import StreamRoute


class FakeRoute:
    """Opens, or fails to, when its ``opening`` is settled; severing fails it."""

    def __init__(self, name: str, sending: bool, publish: Any) -> None:
        self.name = name
        self.survives = self.trails = False
        self.sending = sending
        self.publish = publish
        self.opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.keys: list[tuple[str, bytes]] = []
        self.severed = self.closed = self.cancelled = self.stubborn = False

    async def open(self) -> None:
        try:
            await asyncio.shield(self.opening)
        except asyncio.CancelledError:
            self.cancelled = True
            if self.stubborn:
                raise RouteError("it failed before it could be cancelled") from None
            raise

    def deliver(self, key: str, value: bytes) -> None:
        self.keys.append((key, value))

    def sever(self) -> None:
        self.severed = True
        if not self.opening.done():
            self.opening.set_exception(RouteError("severed"))
            self.opening.exception()

    async def aclose(self) -> None:
        self.closed = True


class Side:
    """One member: its bulk, its end of the wire, and what it was told."""

    def __init__(self, rank: int, **settings: Any) -> None:
        self.opened: list[Any] = []
        self.broken: list[tuple[End, RouteError]] = []
        self.frames: list[Frame] = []  # sent, and not carried yet
        self.sent: list[Frame] = []
        self.down: AiocommError | None = None
        self.routes: list[Any] = []
        loop = asyncio.get_running_loop()
        runtime: Any = SimpleNamespace(loop=loop, options=Options(**settings), off_loop=None)
        self.bulk = BulkRoutes(
            runtime,
            self,  # type: ignore[arg-type]
            "g",
            rank,
            opened=self.opened.append,
            opened_device=self.opened.append,
            broken=lambda end, error: self.broken.append((end, error)),
        )

    # as a link

    local_host = "127.0.0.1"
    same_host = False  # so gloo is the first to be proposed
    writable = True

    def send(self, kind: FrameKind, sequence: int, head: bytes = b"", body: Any = b"") -> None:
        if self.down is not None:
            raise self.down
        frame = Frame(kind, sequence, head, body)
        self.frames.append(frame)
        self.sent.append(frame)

    def lose(self) -> None:
        self.down = PeerLostError("gone")

    # for the test

    @property
    def said(self) -> list[str]:
        """The steps it has told, with the route that each is about and the reason."""
        lines = []
        for frame in self.sent:
            if frame.kind is FrameKind.ROUTE:
                name, _, reason = frame.head[1:].decode().partition("\0")
                lines.append(f"{Step(frame.head[0]).name} {name} {reason}".strip())
        return lines


class Wire:
    """Both sides, and what goes between them when ``carry`` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.first, self.second = Side(0, **settings), Side(1, **settings)
        monkeypatch.setattr(bulk_module, "make_route", self._make)

    def _make(
        self, name: str, *, link: Any, loop: Any, sending: bool, publish: Any, **_: Any
    ) -> Any:
        if name not in ROUTES:
            raise ProtocolError(f"route {name!r} is not known here")
        route: Any
        if name == "link":
            route = StreamRoute(link, loop, sending=sending)
        else:
            route = FakeRoute(name, sending, publish)
        link.routes.append(route)
        return route

    async def carry(self) -> None:
        """Deliver until nobody has anything to say."""
        quiet = 0
        while quiet < 5:
            quiet += 1
            for side, other in ((self.first, self.second), (self.second, self.first)):
                while side.frames:
                    quiet = 0
                    other.bulk.frame_received(side.frames.pop(0))
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        await self.first.bulk.aclose()
        await self.second.bulk.aclose()


def route_frame(step: int, name: str = "", reason: str = "") -> Frame:
    return Frame(FrameKind.ROUTE, 0, bytes((step,)) + f"{name}\0{reason}".encode(), b"")
