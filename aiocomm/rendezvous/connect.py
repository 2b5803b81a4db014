"""From a host and a port to a connected torch store, serving it where nobody else does.

Blocking; runs on a thread of the board. It may not know keys, waiters or event loops. The listening
socket is bound here, to exactly the address that was asked for, and handed to torch, because torch
itself binds every interface. Rejected: probing whether a port is free before binding it (the answer
is stale when it arrives), and leaving the wait for a late server to torch (it cannot be
interrupted and writes a warning for each attempt). torch asks the resolver
for the peer's name each time it connects, prints itself or fails, as an IPv4 address in IPv6 form,
which no numeric host avoids (an entry ``::ffff:10.0.0.1 name`` in /etc/hosts does); so connections
are made early and kept, and not printed. Where no name server answers, the first one takes ten
seconds (``RES_OPTIONS=timeout:1`` makes it two), after which torch 2.13 asks no more.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed

from ..errors import ClosedError, RendezvousError, RendezvousTimeout

if TYPE_CHECKING:
    import threading

logger = logging.getLogger(__name__)

RETRY_FIRST, RETRY_MOST = 0.02, 0.25
"""Seconds between attempts to reach a server that is not there yet: nothing tells of its coming."""

DIAL_TIMEOUT = 3.0
"""Seconds for one attempt; a host that drops packets would else hold the thread for minutes."""

KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 2, 3
"""The kernel finds a vanished server host in about 5 + 2 * 3 seconds (torch sets no keep-alive)."""

_PROC_FDS = Path("/proc/self/fd")

# The stub does not export it, and torch.distributed has no __all__.
_TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Site:
    """Where the board is to be, and who may serve it.

    Args:
        host: name or numeric address.
        port: 0 for a free one (only when serving).
        serve: True must, False may not, None whoever comes first.
        shared: let torch's own ``init_process_group`` in this process use the server too.
        timeout: seconds to wait for a server.
    """

    host: str
    port: int
    serve: bool | None
    shared: bool
    timeout: float

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a board was found.

    Args:
        host: numeric address of the board.
        port: its port.
        serving: whether this process serves it.
        local_host: numeric address of this process as seen from the board.
    """

    host: str
    port: int
    serving: bool
    local_host: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A socket that belongs to somebody else: its number, and the inode that tells if it still is.

    Args:
        number: file descriptor.
        inode: of the socket.
    """

    number: int
    inode: int

    def borrow(self) -> socket.socket:
        """A socket object of one's own for it; OSError if it is closed, or another by now."""
        sock = _duplicate(self.number)
        if os.fstat(sock.fileno()).st_ino != self.inode:
            sock.close()
            raise OSError(errno.EBADF, "the descriptor was closed and used again")
        return sock


class Client(Protocol):
    """What the board uses of torch's store (whose type stub lacks half of it)."""

    def set(self, key: str, value: str) -> None: ...
    def append(self, key: str, value: str) -> None: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection to the board: a store, used by one thread at a time.

    Args:
        store: torch's client, and the server too where ``serving``.
        host: numeric address of the board.
        port: its port.
        serving: whether this process serves the board.
        native: the client's socket, if it could be told from others.
    """

    store: Client
    host: str
    port: int
    serving: bool
    native: Descriptor | None

    def place(self) -> Place:
        """Where the board is, and where this process is as seen from it."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # datagram: chooses a route, sends nothing
            local = str(probe.getsockname()[0])
        return Place(self.host, self.port, self.serving, local)

    def another(self) -> Connection:
        """A further connection to the same board, as a client."""
        return _client(self.host, self.port)

    @property
    def ended(self) -> bool:
        """Whether the server is seen to be gone; asking first spares torch's own report of it."""
        if self.native is None:
            return False
        try:
            with self.native.borrow() as sock:
                return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # nothing to read: as it should be between two calls
            return False
        except OSError:
            return True

    def sever(self) -> bool:
        """Break the connection, from any thread; a call that hangs in it fails. True if done.

        torch's client has no time-out of its own for an answer, and no close.
        """
        if self.native is None:
            return False
        with contextlib.suppress(OSError), self.native.borrow() as sock:
            sock.shutdown(socket.SHUT_RDWR)  # OSError: gone already, which is what was wanted
        return True


def establish(site: Site, stop: threading.Event) -> Connection:
    """Serve the board or connect to it, waiting for a server that comes later.

    Args:
        site: where.
        stop: ends the waiting when set.

    Raises:
        RendezvousTimeout: no server within ``site.timeout``.
        RendezvousError: ``serve=True`` and the address cannot be bound.
        ClosedError: stopped.
    """
    deadline = time.monotonic() + site.timeout
    pause = RETRY_FIRST
    while True:
        found, reason = _attempt(site)
        if found is not None:
            return found
        left = deadline - time.monotonic()
        if left <= 0:
            raise RendezvousTimeout(
                f"no board answered at {site} within {site.timeout:g} s ({reason}); start the "
                "worker that is to serve it, or correct host and port"
            )
        if stop.wait(min(pause, left)):
            raise ClosedError(f"the board at {site} was closed while it was being opened")
        pause = min(pause * 1.5, RETRY_MOST)


def _attempt(site: Site) -> tuple[Connection | None, str]:
    """Serve or connect once; else the reason why neither worked."""
    try:
        hosts = _resolve(site.host, site.port)
    except OSError as error:  # a name may come to exist later, as its host starts
        return None, f"the name does not resolve: {error}"
    reasons = []
    if site.serve is not False:
        try:
            return _serve(site, hosts), ""
        except OSError as error:
            if site.serve:
                raise RendezvousError(
                    f"cannot serve the board at {site}: {error}; choose another port, port 0, or "
                    "serve=None to be the client of whoever serves there"
                ) from error
            reasons.append(f"serving: {error}")
    for host in hosts:
        try:
            _dial(host, site.port)
        except OSError as error:
            reasons.append(f"connecting: {error}")
        else:
            return _client(host, site.port), ""
    return None, "; ".join(reasons)


def _resolve(host: str, port: int) -> list[str]:
    """Numeric addresses, IPv4 first, in the same order in every process of one host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in ordered))


def _serve(site: Site, hosts: list[str]) -> Connection:
    host = hosts[0]
    listener = _listen(host, site.port)
    port = int(listener.getsockname()[1])
    _warn_of_loopback(site.host, host)
    before = _sockets_to(host, port)
    try:
        store = _TCPStore(
            host,
            port,
            None,
            True,
            timeout=_ANSWER,
            wait_for_workers=False,
            multi_tenant=site.shared,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        raise RendezvousError(f"torch cannot serve the board at {site}: {_line(error)}") from error
    return Connection(store, host, port, True, _native(store, host, port, before))


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # So that a board can follow an earlier one on its port. Two cannot listen there all the
        # same: between two that bind at once, listen() decides.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def _warn_of_loopback(name: str, host: str) -> None:
    numeric = ipaddress.ip_address(host.partition("%")[0])
    if numeric.is_loopback and name != host and not name.startswith("localhost"):
        logger.warning(
            "the board is served at %s, to which %r resolves on this host: workers on other hosts "
            "cannot reach it; give the address of a network interface",
            host,
            name,
        )


def _dial(host: str, port: int) -> None:
    """See that somebody listens; OSError says who does not."""
    with socket.create_connection((host, port), timeout=DIAL_TIMEOUT) as sock:
        # Linux connects a socket to itself when its own port happens to be the one it dials.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")


def _client(host: str, port: int) -> Connection:
    before = _sockets_to(host, port)
    try:
        store = _TCPStore(host, port, None, False, timeout=_ANSWER, wait_for_workers=False)
    except RuntimeError as error:
        raise RendezvousError(
            f"what listens at {host}:{port} is no board: {_line(error)}"
        ) from error
    native = _native(store, host, port, before)
    connection = Connection(store, host, port, False, native)
    if native is not None:
        with contextlib.suppress(OSError), native.borrow() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
                ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
                ("TCP_KEEPCNT", KEEPALIVE_COUNT),
            ):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _sockets_to(host: str, port: int) -> dict[int, int]:
    """This process' sockets that lead there: descriptor by inode. Empty where there is no /proc."""
    found = {}
    for entry in _PROC_FDS.iterdir() if _PROC_FDS.is_dir() else ():
        with contextlib.suppress(OSError), _duplicate(int(entry.name)) as sock:
            if _leads_to(sock, host, port):
                found[os.fstat(sock.fileno()).st_ino] = int(entry.name)
    return found


def _duplicate(descriptor: int) -> socket.socket:
    """A socket object of one's own for a descriptor; OSError if it is not a socket."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _leads_to(sock: socket.socket, host: str, port: int) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    peer = sock.getpeername()
    return bool(peer[1] == port and peer[0].removeprefix("::ffff:") == host)


def _native(store: Any, host: str, port: int, before: dict[int, int]) -> Descriptor | None:
    """The descriptor of a client that was made after ``before`` was taken.

    It is among the new ones that lead to the board, so if there is only one it is the one. Else
    (two boards opened at once) torch's repr tells; it is not asked first because it looks up names.
    """
    new = [Descriptor(fd, ino) for ino, fd in _sockets_to(host, port).items() if ino not in before]
    if len(new) > 1:
        match = re.search(r"TCPClient\(SocketImpl\(fd=(\d+)", repr(store))
        new = [each for each in new if match is not None and each.number == int(match[1])]
    return new[0] if len(new) == 1 else None


def _line(error: BaseException) -> str:
    """The first line: torch adds a C++ stack."""
    return str(error).partition("\n")[0]


_ANSWER = timedelta(seconds=30)
"""torch's time-out for connecting to a server that was seen to listen."""
