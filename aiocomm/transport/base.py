"""What a control link and a bulk route are, seen from above: frames, their kinds, two contracts.

A link carries frames in order between two members and tells of the peer's end, exactly once. A
route moves the bytes of messages that are too large for a frame. Nothing here knows sockets, Gloo
or what a frame means; the layers above know nothing else of the transports.

Rejected: an awaitable ``send`` (a task switch per message; ``drain`` is awaited only by those who
stream), and a queue of received frames (the handler is called where the bytes arrive).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ClosedError, PeerLostError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    import torch


MAX_HEAD = 16 * 1024 * 1024 + 4096
"""Bytes of the head of a frame, at most: meta of 16 MiB and the fixed fields that go with it."""

MAX_BODY = 16 * 1024 * 1024
"""Bytes of the body of a frame, at most."""


class FrameKind(enum.IntEnum):
    """What a frame is for; HEARTBEAT and GOODBYE are the link's own and never reach a handler."""

    ENVELOPE = 1
    CHUNK = 2
    GRANT = 3
    CREDIT = 4
    REJECT = 5
    ROUTE = 6
    STORE = 7
    HEARTBEAT = 8
    GOODBYE = 9


@dataclass(slots=True)
class Frame:
    """One frame as it arrived; head and body are the receiver's to keep.

    Args:
        kind: what it is for.
        sequence: number of the message that it belongs to.
        head: bytes of the head.
        body: bytes of the body; on a memory link whatever object was sent.
    """

    kind: FrameKind
    sequence: int
    head: bytes
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who speaks at one end of a link, and to whom.

    Args:
        group: name of the group that the link is for.
        sender: address of the member who says it, as text.
        recipient: address of the member that it is meant for, as text.
        incarnation: unique name of this life of the sender.
        target: incarnation of the recipient that is meant; filled in by ``dial``.
        heartbeat: seconds between the sender's heartbeats; filled in by ``dial``.
    """

    group: str
    sender: str
    recipient: str
    incarnation: str
    target: str = ""
    heartbeat: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """What went over a link so far, heartbeats included; bytes count headers too."""

    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int


class LinkHandler(Protocol):
    """Who takes what a link brings. Both are called on the link's loop and must not block."""

    def frame_received(self, frame: Frame) -> None:
        """The next frame. May call ``send`` and ``abort``. Raising is a bug: it loses the link."""

    def link_lost(self, error: PeerLostError) -> None:
        """The link is down, and this side did not close it. The last call, exactly once.

        ``PeerClosedError`` where the peer said goodbye.
        """


class Link(ABC):
    """A control link to one peer. Used on its own loop's thread only.

    Attributes:
        peer: what the other end said of itself.
        local_host: numeric address for data sockets of this side towards that peer.
        in_process: both ends live in this process, so bodies travel by reference.
        same_host: both ends live on this host, and Unix sockets of one meet those of the other.
    """

    peer: Hello
    local_host: str
    in_process: bool
    same_host: bool

    @abstractmethod
    def attach(self, handler: LinkHandler) -> None:
        """Take frames from here on.

        What came before is delivered first, in order and before this returns; so is the loss of a
        link that went down meanwhile.

        Raises:
            UsageError: there is a handler already.
        """

    @abstractmethod
    def send(
        self, kind: FrameKind, sequence: int, head: bytes | memoryview = b"", body: Any = b""
    ) -> None:
        """Queue one frame. Never blocks, never calls the handler.

        Head and body are kept by reference until they are written: they must not change after.

        Args:
            kind: what it is for.
            sequence: number of the message, 0 to 2**64 - 1.
            head: at most ``MAX_HEAD`` bytes.
            body: at most ``MAX_BODY`` bytes; on a memory link any object.

        Raises:
            ClosedError: this side closed the link.
            PeerLostError: the peer is gone.
            UsageError: head or body is too long.
        """

    @property
    @abstractmethod
    def writable(self) -> bool:
        """Whether ``drain`` would return at once."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the peer has taken so much that sending more does not pile up memory.

        Raises:
            ClosedError: this side closed the link.
            PeerLostError: the peer is gone.

        Cancellation: safe, nothing is lost.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Write what was sent, say goodbye, and wait until the peer has read it all, or time is up.

        The handler is not called any more. Idempotent; never raises for the peer's sake: see
        ``error`` for whether the peer took everything.

        Cancellation: the link is aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop the link at once, without goodbye. The handler is not called any more."""

    @property
    @abstractmethod
    def error(self) -> PeerLostError | None:
        """Why the link went down, if not by this side's will; None while it is up."""

    @property
    @abstractmethod
    def statistics(self) -> LinkStatistics:
        """What went over it so far."""


class LinkEnd(Link):
    """What every kind of link keeps of itself: who waits for room, what went over it, how it ended.

    Args:
        peer: what the other end said of itself.
    """

    def __init__(self, peer: Hello) -> None:
        self.peer = peer
        self._closed_here = False
        self._error: PeerLostError | None = None
        self._drainers: list[asyncio.Future[None]] = []
        self._frames_in = self._frames_out = self._bytes_in = self._bytes_out = 0

    @property
    def error(self) -> PeerLostError | None:
        return self._error

    @property
    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            frames_in=self._frames_in,
            frames_out=self._frames_out,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
        )

    def _wake(self) -> None:
        drainers, self._drainers = self._drainers, []
        for waiter in drainers:
            if not waiter.done():
                waiter.set_result(None)

    def _context(self) -> dict[str, Any]:
        return {"group": self.peer.group, "peer": self.peer.sender}

    def _refusal(self) -> ClosedError | PeerLostError:
        # A new one each time: an exception that is raised twice collects the tracebacks of both.
        if self._error is None or self._closed_here:
            return ClosedError("this side closed the link", **self._context())
        refusal = type(self._error)(self._error.message, **self._context())
        refusal.__cause__ = self._error
        return refusal


class Held(Protocol):
    """A whole message in memory of a route.

    Attributes:
        view: its bytes; valid until ``release``.
        address: where they begin.
    """

    view: memoryview
    address: int

    def release(self) -> None:
        """Its memory is not needed any more. Idempotent."""


class Route(Protocol):
    """One end of what carries bulk bytes in one direction of one group.

    Nothing of it ever blocks the loop.
    """

    @property
    def name(self) -> str:
        """Which kind of route it is, as statistics show it."""

    async def open(self) -> None:
        """Set the route up together with the peer.

        Raises:
            RouteError: it cannot be set up; the text has the reason.

        Cancellation: what was set up is torn down.
        """

    @property
    def survives(self) -> bool:
        """Whether what the peer has sent can be taken in though the peer is gone."""

    @property
    def trails(self) -> bool:
        """Whether what the peer has sent may come in after its goodbye."""

    def sever(self) -> None:
        """Make pending operations fail soon, whatever the peer does. Idempotent."""

    async def aclose(self) -> None:
        """Leave no thread and no socket, in bounded time.

        Cancellation: the route is severed, and the rest is cleaned up in the background.
        """


class SendingRoute(Route, Protocol):
    """The end that sends. A buffer is a 1-D uint8 tensor; the order of the calls is kept."""

    def staged_bytes(self, buffers: Sequence[torch.Tensor]) -> int:
        """Bytes that ``stage`` would copy."""

    def stage(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What ``send`` is to be given for a message of these buffers. Any thread may call it."""

    def place(self, buffers: Sequence[torch.Tensor]) -> bytes | None:
        """Copy a small message to where the peer can reach it, here and now.

        Returns:
            What its envelope must hold for ``hold``; the buffers are the caller's again. None,
            and nothing has happened, where it has to go by ``send``.
        """

    def send(
        self, staged: Sequence[torch.Tensor], *, envelope: Callable[[bytes], None], lend: bool
    ) -> asyncio.Future[None]:
        """Send one message; done when its buffers are the caller's again.

        Args:
            staged: what ``stage`` made of its buffers.
            envelope: sends its envelope, with some bytes for ``announced`` in it. Called once,
                now or when there is room, before anything else of this message goes out; no other
                message is sent before that. Never raises.
            lend: the receiver has no memory for it, and may be lent the route's own.
        """


class ReceivingRoute(Route, Protocol):
    """The end that receives, in the order of the calls."""

    def hold(self, body: bytes, sizes: Sequence[int]) -> Held | None:
        """Take a message whose envelope says where all of it lies.

        Args:
            body: of the envelope.
            sizes: of the buffers of the message, in bytes.

        Returns:
            The message; None where it comes by ``receive`` or ``fetch``, which then find what the
            envelope says.

        Raises:
            ProtocolError: it says what cannot be.
        """

    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Take the next message, which has a single buffer, into the caller's memory."""

    def fetch(self, sizes: Sequence[int]) -> tuple[Sequence[torch.Tensor], asyncio.Future[None]]:
        """Take the next message, in memory of the route's choice.

        Args:
            sizes: of its buffers, in bytes.

        Returns:
            The buffers, and a future: the buffers are there and full when it is done.

        Raises:
            RuntimeError: there is not that much memory (torch's own error).
        """

    def discard(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drain the next message, whose buffers have these sizes, in bounded memory."""

    def end(self, upcoming: Iterable[Sequence[int]]) -> int | None:
        """The peer sends nothing more: fail what can never be whole.

        Args:
            upcoming: sizes of the buffers of each message that nobody has asked for yet.

        Returns:
            How many of these are here whole, and can be asked for as ever. None where nothing can
            be taken in without the peer.
        """
