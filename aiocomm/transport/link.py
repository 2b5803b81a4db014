"""Listening for links, and dialling them: the shell around ``handshake.py``.

A worker listens once and serves all its groups: on an abstract Unix socket (no file to leave
behind) for the same host, on TCP at the address that the board chose, and by plain hand-over for
this very process. The connection changes its protocol object when the handshake is done. A
handshake holds no task, has a time-out, and only so many may be under way at once, so a peer that
says nothing costs one socket for a while. Knows nothing of groups: who is welcome is asked.

Rejected: uvloop's and asyncio's own Unix connect (the one cuts abstract names at the zero byte, the
other takes a full backlog for a connection).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets as _secrets
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ..errors import (
    AuthenticationError,
    HandshakeError,
    NetworkError,
    Refusal,
    RefusedError,
    UsageError,
)
from ..options import Options
from .base import Hello
from .endpoint import Endpoint, configured_secret, host_identity, secret_for
from .handshake import DENIAL, MAX_HELLO, Acceptor, Dialer
from .heart import Heart
from .memory import MemoryLink, pair
from .socket_link import SocketLink, translate, tune

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Link

__all__ = ["Endpoint", "Heart", "Listener", "dial"]

log = logging.getLogger("aiocomm.link")

BACKLOG = 1024
"""Connections that the kernel keeps for a listener whose loop is busy."""

MAX_PENDING = 256
"""Handshakes under way per listener; one more drops the oldest."""

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a peer that connected has to say who it is."""

_listeners: dict[tuple[int, str], Listener] = {}
_listeners_lock = threading.Lock()


class _Handshake(asyncio.BufferedProtocol):
    """What the two ends of a handshake share: a small buffer, and word of the end."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(MAX_HELLO))
        self.transport: asyncio.Transport | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received(bytes(self._buffer[:nbytes]))

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Incoming(_Handshake):
    """A connection that somebody made to the listener and that is no link yet."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._acceptor = Acceptor(listener.secret)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so no isinstance here.
        self.transport = cast("asyncio.Transport", transport)
        if not self._listener._admit(self):
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
        refusal = listener._judge(hello)
        if refusal is not None:
            self.transport.write(self._acceptor.refuse(refusal))
            self.transport.close()
            return
        self._leave()
        self.transport.write(self._acceptor.welcome(listener._reply(hello)))
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
        self._listener._dismiss(self)


class _Outgoing(_Handshake):
    """A connection that this side made and that is no link yet."""

    def __init__(self, secret: bytes, hello: Hello, heart: Heart, options: Options) -> None:
        super().__init__()
        self._dialer = Dialer(secret, hello)
        self._hello = hello
        self._heart = heart
        self._options = options
        self._link: SocketLink | None = None
        self.outcome: asyncio.Future[SocketLink] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        tune(transport, self._options.peer_timeout)

    def received(self, data: bytes) -> None:
        assert self.transport is not None
        if self.outcome.done():
            return
        try:
            reply = self._dialer.receive(data)
            if reply:
                self.transport.write(reply)
            answer = self._dialer.answer
            if answer is None:
                return
            if answer.incarnation != self._hello.target or answer.group != self._hello.group:
                raise HandshakeError("the peer that answers is not the one that was dialled")
        except HandshakeError as error:
            self._fail(error)
            return
        self._link = link = SocketLink(
            self.transport, answer, self._heart, self._options.close_timeout
        )
        self.transport.set_protocol(link)
        self.outcome.set_result(link)
        link.begin(self._dialer.rest)

    def eof_received(self) -> None:
        self._fail(self._ended(None))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(self._ended(exc))

    def abort(self) -> None:
        if self._link is not None:
            self._link.abort()
        else:
            super().abort()

    def _ended(self, exc: Exception | None) -> HandshakeError:
        where = "after this side proved itself" if self._dialer.started else "before it said a word"
        error = HandshakeError(f"the peer closed the connection in the handshake, {where}")
        if isinstance(exc, OSError):
            error.__cause__ = translate(exc, "the connection broke")
        return error

    def _fail(self, error: HandshakeError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)
        self.abort()


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
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._pending: dict[_Incoming, None] = {}
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
            secret=configured or _secrets.token_bytes(32),
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
        bound = _listen_tcp(host, port)
        address = bound.getsockname()
        self._servers.append(
            await self._loop.create_server(lambda: _Incoming(self), sock=bound, backlog=BACKLOG)
        )
        unix, name = _listen_unix()
        if unix is not None:
            self._servers.append(
                await self._loop.create_unix_server(
                    lambda: _Incoming(self), sock=unix, backlog=BACKLOG
                )
            )
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
            next(iter(self._pending)).abort()
        self._pending[handshake] = None
        self._quiet.clear()
        return True

    def _dismiss(self, handshake: _Incoming) -> None:
        self._pending.pop(handshake, None)
        if not self._pending:
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
        self._loop.call_exception_handler(
            {"message": f"the {what} callback of {self!r} raised", "exception": error}
        )

    def _link_in_process(
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
        theirs, ours = pair(loop, self._loop, first_hello=hello, second_hello=self._reply(hello))
        ours.start(self.heart)
        self._announce(ours)
        return theirs


async def dial(
    endpoint: Endpoint,
    hello: Hello,
    *,
    heart: Heart,
    options: Options | None = None,
    secret: bytes | None = None,
    timeout: float | None = None,
) -> Link:
    """Link up with the worker at ``endpoint``, by the shortest way there is.

    Args:
        endpoint: the worker's record from the board.
        hello: who dials, for which group; ``target`` and ``heartbeat`` are filled in here.
        heart: beats for the link.
        options: ``connect_timeout``, ``peer_timeout`` and ``close_timeout``.
        secret: None takes ``AIOCOMM_SECRET``, else the one in the endpoint.
        timeout: seconds for the whole of it; None takes ``connect_timeout``.

    Raises:
        AuthenticationError: the two do not share a secret.
        RefusedError: the worker refuses the link; ``code`` says why.
        HandshakeError: who answers is no such worker, or ends the connection, or says nothing.
        NetworkError: it cannot be reached.

    Cancellation: nothing is left open; the peer may see a link that is lost at once.
    """
    options = options or Options()
    hello = replace(hello, target=endpoint.incarnation, heartbeat=heart.interval)
    secret = secret or secret_for(endpoint)
    seconds = options.connect_timeout if timeout is None else timeout
    with _listeners_lock:
        local = _listeners.get((os.getpid(), endpoint.incarnation))
    try:
        async with asyncio.timeout(seconds):
            if local is not None:
                return await _dial_in_process(local, hello, secret, heart)
            handshake = _Outgoing(secret, hello, heart, options)
            return await _dial_socket(endpoint, handshake)
    except TimeoutError as error:
        raise HandshakeError(
            f"the peer did not answer within {seconds:g} s",
            group=hello.group,
            peer=hello.recipient,
        ) from error
    except (HandshakeError, NetworkError) as error:
        error.group, error.peer = hello.group, hello.recipient
        raise


async def _dial_in_process(
    listener: Listener, hello: Hello, secret: bytes, heart: Heart
) -> MemoryLink:
    loop = asyncio.get_running_loop()
    outcome: concurrent.futures.Future[MemoryLink] = concurrent.futures.Future()

    def accept() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(listener._link_in_process(hello, secret, loop))
        except Exception as error:
            outcome.set_exception(error)

    try:
        listener._loop.call_soon_threadsafe(accept)
    except RuntimeError as error:
        raise NetworkError("the peer's event loop in this process is closed") from error
    try:
        link = await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        outcome.add_done_callback(lambda done: _drop(done, loop))
        raise
    link.start(heart)
    return link


def _drop(outcome: concurrent.futures.Future[MemoryLink], loop: asyncio.AbstractEventLoop) -> None:
    """Abort a link that nobody waits for any more."""
    if not outcome.cancelled() and outcome.exception() is None:
        with contextlib.suppress(RuntimeError):  # the dialler's loop is closed: so is its link
            loop.call_soon_threadsafe(outcome.result().abort)


async def _dial_socket(endpoint: Endpoint, handshake: _Outgoing) -> SocketLink:
    try:
        await _connect(endpoint, handshake)
        return await handshake.outcome
    except BaseException:
        handshake.abort()
        raise
    finally:
        if not handshake.outcome.done():
            handshake.outcome.cancel()
        elif not handshake.outcome.cancelled():
            handshake.outcome.exception()  # seen: it was raised, or a cancellation went first


async def _connect(endpoint: Endpoint, handshake: _Outgoing) -> None:
    loop = asyncio.get_running_loop()
    if endpoint.unix and endpoint.host_id and endpoint.host_id == host_identity():
        try:
            sock = await _connect_unix(endpoint.unix)
        except OSError as error:
            log.debug("no way to a worker by its Unix socket, going by TCP: %s", error)
        else:
            try:
                await loop.create_unix_connection(lambda: handshake, sock=sock)
            except BaseException:
                if handshake.transport is None:
                    sock.close()
                raise
            return
    try:
        await loop.create_connection(lambda: handshake, endpoint.host, endpoint.port)
    except OSError as error:
        where = f"{endpoint.host}:{endpoint.port}"
        raise translate(error, f"cannot connect to the peer at {where}") from error


async def _connect_unix(name: str) -> socket.socket:
    """Connect to an abstract Unix socket; waits while its backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(b"\0" + name.encode())
            except BlockingIOError:
                # The kernel has no way to tell when there is room in the backlog.
                await asyncio.sleep(0.01)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise UsageError(f"{host!r} is not a numeric address: give one like 127.0.0.1") from error
    sock = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise translate(error, f"cannot listen at {host}:{port}") from error
    return sock


def _listen_unix() -> tuple[socket.socket | None, str]:
    """An abstract Unix socket and its name; None and nothing where there is no such thing."""
    name = f"aiocomm-{_secrets.token_hex(16)}"
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except (AttributeError, OSError):
        return None, ""
    try:
        sock.bind(b"\0" + name.encode())
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.EACCES, errno.EPERM):
            return None, ""
        raise translate(error, "cannot listen on a Unix socket") from error
    return sock, name
