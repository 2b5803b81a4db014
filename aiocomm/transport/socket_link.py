"""A control link over one connected socket, TCP or Unix, on asyncio or uvloop.

It is the protocol object of its transport and takes it over when the handshake is done. A small
frame is one write and one call of the handler; there is no task, queue or timer per link (the
``Heart`` beats for all).

Closing is a half-close: goodbye and end-of-file go out behind everything that was sent, and the
bytes of the peer are read and dropped until it closes too. Closing at once instead would make the
kernel reset the connection whenever the peer had bytes under way, and a reset discards what the
peer has not read yet, the goodbye included.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import (
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    UsageError,
)
from .base import MAX_BODY, MAX_HEAD, FrameKind, LinkEnd
from .frames import HEADER, HEADER_SIZE, MAGIC, VERSION, Decoder, receive_buffer
from .sockets import is_unix, local_host, translate

if TYPE_CHECKING:
    from .base import Frame, Hello, LinkHandler
    from .heart import Heart

log = logging.getLogger("aiocomm")

ONE_WRITE = 32 * 1024
"""Frames up to this many bytes are joined and written as one piece; larger ones are not copied."""

HIGH_WATER = 256 * 1024
LOW_WATER = 64 * 1024
BACKLOG = 1024 * 1024
"""Bytes taken in for a handler that is not attached yet; past that the socket is left to fill."""

# One for all links of a loop. Both asyncio and uvloop ask for the buffer, fill it and say so in one
# go, so nobody comes between.
_receive_buffers: WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview] = WeakKeyDictionary()

_pack_header = HEADER.pack
_join = b"".join
_OWN_KINDS = FrameKind.HEARTBEAT  # this kind and those after it are the link's own


class SocketLink(LinkEnd, asyncio.BufferedProtocol):
    """A link over a transport whose handshake is done; the caller sets it as the protocol.

    Args:
        transport: the connected transport.
        peer: what the other end said of itself.
        heart: beats for this link until it is down.
        close_timeout: seconds that ``aclose`` gives the peer to read what was sent.
    """

    in_process = False

    def __init__(
        self, transport: asyncio.Transport, peer: Hello, heart: Heart, close_timeout: float
    ) -> None:
        super().__init__(peer)
        self.local_host = local_host(transport)
        self.same_host = is_unix(transport)
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._write = transport.write
        self._is_closing = transport.is_closing
        if self._loop not in _receive_buffers:
            _receive_buffers[self._loop] = receive_buffer()
        self._decoder = Decoder(_receive_buffers[self._loop])
        self._handler: LinkHandler | None = None
        self._backlog: list[Frame] = []
        self._backlog_bytes = 0
        self._held = False  # reading is paused because the backlog is full
        self._up = True
        self._told = False
        self._close_timeout = close_timeout
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._congested = False
        self._heart = heart
        self._beaten_in = self._beaten_out = 0  # the counts at the last beat
        self._silent = 0.0
        transport.set_write_buffer_limits(high=HIGH_WATER, low=LOW_WATER)
        heart.add(self)

    def __repr__(self) -> str:
        if self._up:
            state = "open"
        elif self._error is not None:
            state = "lost"
        else:
            state = "closed" if self._gone.done() else "closing"
        return f"<SocketLink {state} to {self.peer.sender} for {self.peer.group}>"

    # --- the contract of Link ---

    def attach(self, handler: LinkHandler) -> None:
        if self._handler is not None:
            raise UsageError("this link has a handler already")
        self._handler = handler
        backlog, self._backlog = self._backlog, []
        for frame in backlog:
            try:
                handler.frame_received(frame)
            except Exception as error:
                self._failed(frame, error)
                break
            if self._closed_here:
                return
        if self._error is not None:
            self._tell(self._error)
        elif self._held and self._up:
            self._held = False
            self._transport.resume_reading()

    def send(
        self, kind: FrameKind, sequence: int, head: bytes | memoryview = b"", body: Any = b""
    ) -> None:
        if not self._up:
            raise self._refusal()
        if self._is_closing():  # a write has failed just now; the loop warns of each one after it
            return
        head_size = len(head)
        body_size = len(body)
        size = HEADER_SIZE + head_size + body_size
        if size <= ONE_WRITE:
            header = _pack_header(MAGIC, VERSION, kind, sequence, head_size, body_size)
            data = _join((header, head, body))
            if len(data) != size:
                raise UsageError("head and body of a frame must be bytes or views of single bytes")
            self._write(data)
        else:
            self._send_large(kind, sequence, head, body)
        self._frames_out += 1
        self._bytes_out += size

    @property
    def writable(self) -> bool:
        return not self._congested

    async def drain(self) -> None:
        if not self._up:
            raise self._refusal()
        if not self._congested:
            return
        waiter = self._loop.create_future()
        self._drainers.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._drainers:
                self._drainers.remove(waiter)
        if not self._up:
            raise self._refusal()

    async def aclose(self) -> None:
        if self._up:
            self._begin_close()
        if self._gone.done():
            return
        try:
            await asyncio.wait((self._gone,), timeout=self._close_timeout)
        except asyncio.CancelledError:
            self.abort()
            raise
        if not self._gone.done():
            self._error = self._lost(
                f"did not read what was sent before the close within {self._close_timeout} s"
            )
            self._transport.abort()
            await asyncio.wait((self._gone,))

    def abort(self) -> None:
        self._closed_here = True
        self._backlog.clear()
        if self._up:
            self._shut()
        self._transport.abort()

    # --- called by the heart ---

    def beat(self, interval: float, timeout: float) -> None:
        """See ``Beating``. A peer with a slower heart than this side's patience gets more of it."""
        if self._bytes_in != self._beaten_in or self._held:
            self._beaten_in = self._bytes_in
            self._silent = 0.0
        else:
            self._silent += interval
            patience = max(timeout, 3 * self.peer.heartbeat)
            if self._silent >= patience:
                self._lose(self._lost(f"has been silent for {self._silent:.3g} s"))
                return
        if not self._up:
            return
        # What waits in the write buffer is a sign of life itself, once the peer reads again.
        if self._frames_out == self._beaten_out and not self._transport.get_write_buffer_size():
            self.send(FrameKind.HEARTBEAT, 0)
        self._beaten_out = self._frames_out

    # --- called by the handshake and the transport ---

    def begin(self, rest: bytes) -> None:
        """Take the bytes that came right behind the handshake."""
        if rest:
            self._bytes_in += len(rest)
            self._take(self._decoder.feed(rest))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._bytes_in += nbytes
        if self._up:
            self._take(self._decoder.advance(nbytes))
        # Else this side is closing: the bytes are dropped, the buffer is filled again.

    def eof_received(self) -> None:
        if self._up:
            where = " in the middle of a frame" if self._decoder.in_frame else ""
            self._lose(self._lost(f"closed the connection{where} without goodbye: did it die?"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._up and exc is not None:
            self._take_rest()
        if self._up or (self._error is None and exc is not None):
            error = self._lost("is gone: the connection broke")
            error.__cause__ = exc
            if isinstance(exc, OSError):
                error.__cause__ = translate(exc, "the connection broke", peer=self.peer.sender)
            if self._up:
                self._lose(error)
            else:
                self._error = error  # while closing: the peer did not take everything
        self._heart.remove(self)
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        self._congested = True

    def resume_writing(self) -> None:
        self._congested = False
        self._wake()

    # --- inside ---

    def _take_rest(self) -> None:
        """Take what the peer has sent before the connection broke.

        Where a write finds out first that the peer is gone, the loop reads no more; but sends that
        have completed may lie in the socket still, and the goodbye.
        """
        try:
            descriptor = self._transport.get_extra_info("socket").fileno()
            while self._up and (count := os.readv(descriptor, (self._decoder.buffer(),))):
                self.buffer_updated(count)
        except OSError as error:
            log.debug("%r: no more can be read: %s", self, error)

    def _take(self, frames: list[Frame]) -> None:
        self._frames_in += len(frames)
        handler = self._handler
        for frame in frames:
            if frame.kind >= _OWN_KINDS:
                if frame.kind is FrameKind.GOODBYE:
                    self._lose(PeerClosedError("the peer said goodbye", **self._context()))
            elif handler is not None:
                try:
                    handler.frame_received(frame)
                except Exception as error:
                    self._failed(frame, error)
                    return
            else:
                self._keep(frame)
            if not self._up:
                return
        if self._decoder.error is not None:
            self._lose(self._lost("broke the protocol"), self._decoder.error)

    def _failed(self, frame: Frame, error: Exception) -> None:
        """The handler raised, which is a bug on one side or the other: say so, and end the link."""
        self._report("frame_received", error)
        broken = ProtocolError(
            f"a frame of kind {frame.kind.name} could not be handled: {error}",
            sequence=frame.sequence,
        )
        broken.__cause__ = error
        self._lose(self._lost("sent what could not be handled"), broken)

    def _keep(self, frame: Frame) -> None:
        self._backlog.append(frame)
        self._backlog_bytes += HEADER_SIZE + len(frame.head) + len(frame.body)
        if self._backlog_bytes > BACKLOG and not self._held:
            self._held = True
            self._transport.pause_reading()

    def _send_large(self, kind: int, sequence: int, head: Any, body: Any) -> None:
        head_size, body_size = len(head), len(body)
        if head_size > MAX_HEAD or body_size > MAX_BODY:
            raise UsageError(
                f"a frame of {head_size} and {body_size} bytes is too long: {MAX_HEAD} of head and "
                f"{MAX_BODY} of body fit"
            )
        if memoryview(head).nbytes != head_size or memoryview(body).nbytes != body_size:
            raise UsageError("head and body of a frame must be bytes or views of single bytes")
        header = _pack_header(MAGIC, VERSION, kind, sequence, head_size, body_size)
        if head_size <= ONE_WRITE:
            self._write(_join((header, head)))
        else:
            self._write(header)
            self._write(head)
        if body_size:
            self._write(body)

    def _begin_close(self) -> None:
        self.send(FrameKind.GOODBYE, 0)
        self._shut()
        self._closed_here = True
        self._backlog.clear()
        if self._held:
            self._held = False
            self._transport.resume_reading()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _shut(self) -> None:
        self._up = False
        self._heart.remove(self)
        self._wake()

    def _lose(self, error: PeerLostError, cause: BaseException | None = None) -> None:
        if not self._up:
            return
        if cause is not None:
            error.__cause__ = cause
        self._error = error
        self._shut()
        # Nothing more comes from the peer, and what is still to be written cannot reach anybody.
        self._transport.abort()
        self._tell(error)

    def _tell(self, error: PeerLostError) -> None:
        handler = self._handler
        if handler is None or self._told or self._closed_here:
            return
        self._told = True
        try:
            handler.link_lost(error)
        except Exception as failure:
            self._report("link_lost", failure)

    def _report(self, method: str, error: Exception) -> None:
        self._loop.call_exception_handler(
            {
                "message": f"{method} of the handler of {self!r} raised",
                "exception": error,
                "protocol": self,
                "transport": self._transport,
            }
        )

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"the peer {what}", **self._context())
