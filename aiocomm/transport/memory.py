"""Control links between two members in one process: frames are handed over, nothing is copied.

The two ends may live on loops of different threads. A frame is appended to the other end's inbox
and that end's loop is woken if it is not awake already; the handler is never called inside
``send``. Also the test double for whatever stands upon a link. Knows no bytes: the body of a frame
arrives as the very object that was sent.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from ..errors import PeerClosedError, PeerLostError, ProtocolError, UsageError
from .base import Frame, FrameKind, LinkEnd

if TYPE_CHECKING:
    import asyncio

    from .base import Hello, LinkHandler
    from .heart import Heart

HIGH_WATER = 1024
"""Frames that wait at the other end; past that the link is not writable."""


class _End:
    """The last thing in an inbox: the other end is gone, with a goodbye or without."""

    def __init__(self, *, goodbye: bool) -> None:
        self.goodbye = goodbye


class MemoryLink(LinkEnd):
    """One end of a pair; see ``pair``.

    Args:
        loop: the loop that this end is used on.
        peer: the hello of the other end.
    """

    in_process = True
    same_host = True
    local_host = "127.0.0.1"

    _other: MemoryLink

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: Hello) -> None:
        super().__init__(peer)
        self._loop = loop
        self._inbox: deque[Frame | _End] = deque()
        self._awake = False  # a delivery is scheduled
        self._wanted = False  # the other end waits for room in the inbox
        self._handler: LinkHandler | None = None
        self._up = True
        self._deaf = False  # the handler is not called any more
        self._heart: Heart | None = None

    def __repr__(self) -> str:
        state = "open" if self._up else "lost" if self._error is not None else "closed"
        return f"<MemoryLink {state} to {self.peer.sender} for {self.peer.group}>"

    def start(self, heart: Heart) -> None:
        """Let the heart watch whether the other end's loop still exists; on the own loop."""
        if self._up:
            self._heart = heart
            heart.add(self)

    # --- the contract of Link ---

    def attach(self, handler: LinkHandler) -> None:
        if self._handler is not None:
            raise UsageError("this link has a handler already")
        self._handler = handler
        self._deliver_up_to(len(self._inbox))
        if self._error is not None:
            self._tell(self._error)

    def send(
        self, kind: FrameKind, sequence: int, head: bytes | memoryview = b"", body: Any = b""
    ) -> None:
        if not self._up:
            raise self._refusal()
        self._frames_out += 1
        self._bytes_out += _size(head, body)
        self._post(Frame(kind, sequence, head if type(head) is bytes else bytes(head), body))

    @property
    def writable(self) -> bool:
        return len(self._other._inbox) < HIGH_WATER

    async def drain(self) -> None:
        if not self._up:
            raise self._refusal()
        while len(self._other._inbox) >= HIGH_WATER:
            waiter = self._loop.create_future()
            self._drainers.append(waiter)
            self._other._wanted = True
            if len(self._other._inbox) < HIGH_WATER:
                self._wake()  # it made room before it could see the wish
            try:
                await waiter
            finally:
                if waiter in self._drainers:
                    self._drainers.remove(waiter)
            if not self._up:
                raise self._refusal()

    async def aclose(self) -> None:
        # What was sent is with the other end already: there is nothing to wait for.
        self._close(goodbye=True)

    def abort(self) -> None:
        self._close(goodbye=False)

    # --- called by the heart ---

    def beat(self, interval: float, timeout: float) -> None:
        """See ``Beating``: a loop that was closed under the other end cannot say so itself."""
        if self._other._loop.is_closed():
            self._lose(_End(goodbye=False))

    # --- inside ---

    def _post(self, item: Frame | _End) -> None:
        """Put it into the other end's inbox and wake that end's loop."""
        other = self._other
        other._inbox.append(item)
        if other._awake:
            return
        other._awake = True
        try:
            if other._loop is self._loop:
                self._loop.call_soon(other._deliver)
            else:
                other._loop.call_soon_threadsafe(other._deliver)
        except RuntimeError:
            # That loop is closed. The handler hears of it as of every loss: not inside ``send``.
            other._awake = False
            if self._up and not self._loop.is_closed():
                self._loop.call_soon(self._lose, _End(goodbye=False))

    def _deliver(self) -> None:
        # First, so that whoever appends from here on wakes this end again.
        self._awake = False
        if self._deaf:
            self._inbox.clear()
        elif self._handler is not None:
            # No more than is there now: two ends that answer each other must not hold the loop.
            self._deliver_up_to(len(self._inbox))
        elif self._inbox and isinstance(self._inbox[-1], _End):
            self._lose(self._inbox.pop())  # type: ignore[arg-type]
        self._make_room()

    def _deliver_up_to(self, count: int) -> None:
        handler = self._handler
        inbox = self._inbox
        assert handler is not None
        while count and inbox:
            count -= 1
            item = inbox.popleft()
            if not isinstance(item, Frame):
                self._lose(item)
                break
            self._frames_in += 1
            self._bytes_in += _size(item.head, item.body)
            try:
                handler.frame_received(item)
            except Exception as error:
                self._failed(item, error)
            if self._deaf:
                inbox.clear()
        if inbox and not self._awake:
            # The handler, or this call, was shorter than what came meanwhile.
            self._awake = True
            self._loop.call_soon(self._deliver)
        self._make_room()

    def _make_room(self) -> None:
        if self._wanted and len(self._inbox) < HIGH_WATER:
            self._wanted = False
            # If that loop is closed, nobody waits there any more.
            with contextlib.suppress(RuntimeError):
                self._other._loop.call_soon_threadsafe(self._other._wake)

    def _failed(self, frame: Frame, error: Exception) -> None:
        """The handler raised, which is a bug on one side or the other: say so, and end the link."""
        self._report("frame_received", error)
        broken = ProtocolError(
            f"a frame of kind {frame.kind.name} could not be handled: {error}",
            sequence=frame.sequence,
        )
        broken.__cause__ = error
        if self._up:
            self._post(_End(goodbye=False))
        self._lose(_End(goodbye=False), broken)
        if self._error is not None:
            self._tell(self._error)

    def _close(self, *, goodbye: bool) -> None:
        self._closed_here = self._deaf = True
        self._inbox.clear()
        self._make_room()
        if self._up:
            self._up = False
            self._post(_End(goodbye=goodbye))
            self._rest()

    def _lose(self, end: _End, cause: BaseException | None = None) -> None:
        if not self._up:
            return
        self._up = False
        context = self._context()
        if end.goodbye:
            self._error = PeerClosedError("the peer said goodbye", **context)
        else:
            self._error = PeerLostError(
                "the peer dropped the link: was it aborted, or a second worker opened under its "
                "address or this one's?",
                **context,
            )
        self._error.__cause__ = cause
        self._rest()
        if self._handler is not None:
            self._tell(self._error)

    def _tell(self, error: PeerLostError) -> None:
        if self._deaf or self._handler is None:
            return
        self._deaf = True  # it was the last call
        try:
            self._handler.link_lost(error)
        except Exception as failure:
            self._report("link_lost", failure)

    def _rest(self) -> None:
        if self._heart is not None:
            self._heart.remove(self)
        self._wake()

    def _report(self, method: str, error: Exception) -> None:
        self._loop.call_exception_handler(
            {
                "message": f"{method} of the handler of {self!r} raised",
                "exception": error,
            }
        )


def _size(head: Any, body: Any) -> int:
    return len(head) + (len(body) if isinstance(body, bytes) else 0)


def pair(
    first: asyncio.AbstractEventLoop,
    second: asyncio.AbstractEventLoop,
    *,
    first_hello: Hello,
    second_hello: Hello,
) -> tuple[MemoryLink, MemoryLink]:
    """Two ends that are linked: the first used on the first loop, the second on the second."""
    one, two = MemoryLink(first, second_hello), MemoryLink(second, first_hello)
    one._other, two._other = two, one
    return one, two
