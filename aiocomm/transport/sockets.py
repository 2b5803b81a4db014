"""Sockets of links: how they are bound, connected and tuned, and their errors in our words.

The one place where an error of the operating system becomes one of this package. Knows nothing of
handshakes or frames.

Rejected: uvloop's and asyncio's own Unix connect (the one cuts abstract names at the zero byte, the
other takes a full backlog for a connection).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import socket

from ..errors import NetworkError, UsageError

LONGEST_TIMEOUT = 2e6
"""Seconds: the kernel counts milliseconds in 31 bits."""


def translate(error: OSError, what: str, *, peer: str | None = None) -> NetworkError:
    """The error of the operating system in the words of this package, with its cause chained."""
    translated = NetworkError(f"{what}: {error.strerror or error}", peer=peer)
    translated.__cause__ = error
    return translated


def tune(transport: asyncio.BaseTransport, peer_timeout: float) -> None:
    """Let the kernel notice a vanished host even while a loop is busy; send frames at once."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        # Not less than the time a stalled loop has to come back: with its receive window full it
        # answers probes, and the kernel would give it up all the same.
        ("TCP_USER_TIMEOUT", max(1, int(min(peer_timeout, LONGEST_TIMEOUT) * 1000))),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def local_host(transport: asyncio.BaseTransport) -> str:
    """Numeric address of this side of the connection; the loopback for a Unix socket."""
    name = transport.get_extra_info("sockname")
    return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"


def is_unix(transport: asyncio.BaseTransport) -> bool:
    """Whether the connection is one of Unix sockets, which never leave a host."""
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.family == getattr(socket, "AF_UNIX", None)


async def connect_unix(name: str) -> socket.socket:
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


def bind_tcp(host: str, port: int) -> socket.socket:
    """A socket bound to a numeric address, not listening yet.

    Raises:
        NetworkError: the address cannot be bound.
        UsageError: it is not numeric.
    """
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


def bind_unix() -> tuple[socket.socket | None, str]:
    """An abstract Unix socket and its name; None and nothing where there is no such thing."""
    name = f"aiocomm-{secrets.token_hex(16)}"
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
