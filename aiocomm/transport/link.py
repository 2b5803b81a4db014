"""Links as the layers above use them: ``Listener`` to be dialled, ``dial`` to dial.

The shortest way is taken: hand-over within this process, a Unix socket on this host, else TCP.
Knows nothing of groups or of the board that the endpoint came from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ..errors import HandshakeError, NetworkError
from ..options import Options
from .endpoint import Endpoint, host_identity, secret_for
from .handshake import Dialer
from .heart import Heart
from .listener import HandshakeProtocol, Listener, find
from .socket_link import SocketLink
from .sockets import connect_unix, translate, tune

if TYPE_CHECKING:
    from .base import Hello, Link
    from .memory import MemoryLink

__all__ = ["Endpoint", "Heart", "Listener", "dial"]

log = logging.getLogger("aiocomm.link")


class _Outgoing(HandshakeProtocol):
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
    local = find(endpoint.incarnation)
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
            outcome.set_result(listener.link_in_process(hello, secret, loop))
        except Exception as error:
            outcome.set_exception(error)

    try:
        listener.loop.call_soon_threadsafe(accept)
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
            sock = await connect_unix(endpoint.unix)
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
