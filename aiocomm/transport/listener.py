"""The end that is dialled: one listener per worker serves all its groups.

It listens on an abstract Unix socket (no file to leave behind) for the same host, on TCP at the
address that the board chose, and is found by dials within this very process. The connection
changes its protocol object when the handshake is done. A handshake holds no task, has a time-out,
and only so many may be under way at once, so a peer that says nothing costs one socket for a
while. Knows nothing of groups: who is welcome is asked.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from ..errors import AuthenticationError, HandshakeError, Refusal, RefusedError
from ..options import Options
from .base import Hello
from .endpoint import Endpoint, configured_secret, host_identity
from .handshake import DENIAL, MAX_HELLO, Acceptor
from .memory import MemoryLink, pair
from .socket_link import SocketLink
from .sockets import bind_tcp, bind_unix, tune

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Link
    from .heart import Heart

log = logging.getLogger("aiocomm.link")

BACKLOG = 1024
"""Connections that the kernel keeps for a listener whose loop is busy."""

MAX_PENDING = 256
"""Handshakes under way per listener; one more drops the oldest."""

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a peer that connected has to say who it is."""

_listeners: dict[tuple[int, str], Listener] = {}
_listeners_lock = threading.Lock()


def find(incarnation: str) -> Listener | None:
    """The open listener of that worker if it lives in this process, not in its parent."""
    with _listeners_lock:
        return _listeners.get((os.getpid(), incarnation))


class HandshakeProtocol(asyncio.BufferedProtocol, ABC):
    """What the two ends of a handshake share: a small buffer, and word of the end."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(MAX_HELLO))
        self.transport: asyncio.Transport | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received(bytes(self._buffer[:nbytes]))

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Bytes of the other end, in whatever pieces they come."""

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Incoming(HandshakeProtocol):
    """A connection that somebody made to the listener and that is no link yet."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._acceptor = Acceptor(listener.secret)
        self._timer: asyncio.TimerHandle | None = None
        self._counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so no isinstance here.
        self.transport = cast("asyncio.Transport", transport)
        self._counted = self._listener._admit(self)
        if not self._counted:
            self.abort()
            return
        timeout = self._listener.handshake_timeout
        self._timer = asyncio.get_running_loop().call_later(timeout, self.abort)
        self.transport.write(self._acceptor.greeting)

    def received(self, data: bytes) -> None:
        assert self.transport is not None
        try:
            hello = self._acceptor.receive(data)
        except AuthenticationError as error:
            log.warning("a link was refused: %s", error)
            self.transport.write(DENIAL)
            self.transport.close()
        except HandshakeError as error:
            log.warning("a connection was dropped: %s", error)
            self.transport.abort()
        else:
            if hello is not None:
                self._decide(hello)

    def _decide(self, hello: Hello) -> None:
        assert self.transport is not None
        listener = self._listener
        reply = listener._reply(hello)
        refusal = listener._judge(hello)
        if refusal is not None:
            self.transport.write(self._acceptor.refuse(refusal))
            self.transport.close()
            return
        self._leave()
        self.transport.write(self._acceptor.welcome(reply))
        tune(self.transport, listener.options.peer_timeout)
        link = SocketLink(self.transport, hello, listener.heart, listener.options.close_timeout)
        self.transport.set_protocol(link)
        listener._announce(link)

    def connection_lost(self, exc: Exception | None) -> None:
        # Whoever it was has not proven anything: its going is nobody's business.
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._counted:
            self._counted = False
            self._listener._dismiss(self)


class Listener:
    """Takes the links that others dial to this worker. Made by ``Listener.open``.

    Attributes:
        endpoint: the record for the board.
        secret: what links to this worker are proven with.
    """

    endpoint: Endpoint

    def __init__(
        self,
        *,
        secret: bytes,
        accept: Callable[[Hello], Refusal | None],
        connected: Callable[[Link], None],
        heart: Heart,
        options: Options,
        handshake_timeout: float,
    ) -> None:
        self.secret = secret
        self.heart = heart
        self.options = options
        self.handshake_timeout = handshake_timeout
        self._accept = accept
        self._connected = connected
        self.loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._pending: dict[_Incoming, None] = {}
        self._alive = 0  # handshakes whose sockets are open: those pending, and those dropped
        self._closed = False
        self._quiet = asyncio.Event()
        self._quiet.set()

    @classmethod
    async def open(
        cls,
        host: str,
        *,
        incarnation: str,
        accept: Callable[[Hello], Refusal | None],
        connected: Callable[[Link], None],
        heart: Heart,
        options: Options | None = None,
        secret: bytes | None = None,
        port: int = 0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> Listener:
        """Listen at ``host`` and for this host's own processes.

        Args:
            host: numeric address to bind, the one that the board chose.
            incarnation: unique name of this life of the worker.
            accept: asked on the loop for every peer that has proven itself; returns why it is
                refused, or None. The link follows at once, within the same callback.
            connected: given every link on the loop; it attaches a handler, now or later.
            heart: beats for the links.
            options: ``peer_timeout`` and ``close_timeout``.
            secret: None takes ``AIOCOMM_SECRET``, else a fresh one that goes into the endpoint.
            port: TCP port to bind; 0 lets the kernel choose.
            handshake_timeout: seconds that a peer has to say who it is.

        Raises:
            NetworkError: the address cannot be bound.
            UsageError: ``host`` is not a numeric address.

        Cancellation: nothing is left open.
        """
        configured = secret or configured_secret()
        listener = cls(
            secret=configured or secrets.token_bytes(32),
            accept=accept,
            connected=connected,
            heart=heart,
            options=options or Options(),
            handshake_timeout=handshake_timeout,
        )
        try:
            await listener._bind(host, port, incarnation, published=configured is None)
        except BaseException:
            listener._shut()
            raise
        with _listeners_lock:
            _listeners[os.getpid(), incarnation] = listener
        return listener

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Listener {state} at {self.endpoint.host}:{self.endpoint.port}>"

    async def aclose(self) -> None:
        """Stop listening and drop handshakes under way; links that were made stay. Idempotent.

        Cancellation: listening has stopped already.
        """
        self._shut()
        await self._quiet.wait()

    async def _bind(self, host: str, port: int, incarnation: str, *, published: bool) -> None:
        bound = bind_tcp(host, port)
        address = bound.getsockname()
        # They serve later: a cancellation while one begins would lose the server and its socket.
        self._servers.append(
            await self.loop.create_server(
                lambda: _Incoming(self), sock=bound, backlog=BACKLOG, start_serving=False
            )
        )
        unix, name = bind_unix()
        if unix is not None:
            self._servers.append(
                await self.loop.create_unix_server(
                    lambda: _Incoming(self), sock=unix, backlog=BACKLOG, start_serving=False
                )
            )
        for server in self._servers:
            await server.start_serving()
        self.endpoint = Endpoint(
            incarnation=incarnation,
            host_id=host_identity(),
            unix=name,
            host=host,
            port=address[1],
            secret=self.secret if published else b"",
        )

    def _shut(self) -> None:
        if self._closed:
            return
        self._closed = True
        for server in self._servers:
            server.close()
        if hasattr(self, "endpoint"):
            with _listeners_lock:
                _listeners.pop((os.getpid(), self.endpoint.incarnation), None)
        for handshake in tuple(self._pending):
            handshake.abort()

    # --- what the handshakes ask ---

    def _admit(self, handshake: _Incoming) -> bool:
        if self._closed:
            return False
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.abort()
        self._pending[handshake] = None
        self._alive += 1
        self._quiet.clear()
        return True

    def _dismiss(self, handshake: _Incoming) -> None:
        self._pending.pop(handshake, None)
        self._alive -= 1
        if not self._alive:
            self._quiet.set()

    def _judge(self, hello: Hello) -> Refusal | None:
        if self._closed:
            return Refusal.CLOSED
        if hello.target != self.endpoint.incarnation:
            return Refusal.STALE
        try:
            return self._accept(hello)
        except Exception as error:
            self._report("accept", error)
            return Refusal.BAD_REQUEST

    def _reply(self, hello: Hello) -> Hello:
        return Hello(
            group=hello.group,
            sender=hello.recipient,
            recipient=hello.sender,
            incarnation=self.endpoint.incarnation,
            target=hello.incarnation,
            heartbeat=self.heart.interval,
        )

    def _announce(self, link: Link) -> None:
        try:
            self._connected(link)
        except Exception as error:
            self._report("connected", error)
            link.abort()

    def _report(self, what: str, error: Exception) -> None:
        self.loop.call_exception_handler(
            {"message": f"the {what} callback of {self!r} raised", "exception": error}
        )

    def link_in_process(
        self, hello: Hello, secret: bytes, loop: asyncio.AbstractEventLoop
    ) -> MemoryLink:
        """The other half of a dial within this process; runs on the listener's loop."""
        if not hmac.compare_digest(secret, self.secret):
            raise AuthenticationError(
                "the secret of this dial is not the listener's, though both are in one process"
            )
        refusal = self._judge(hello)
        if refusal is not None:
            raise RefusedError(refusal, group=hello.group, peer=hello.recipient)
        theirs, ours = pair(loop, self.loop, first_hello=hello, second_hello=self._reply(hello))
        ours.start(self.heart)
        self._announce(ours)
        return theirs
