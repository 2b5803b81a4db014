"""The blocking half of a Gloo route: a ProcessGroupGloo of two, made and destroyed off the loop.

Knows nothing of event loops; ``GlooRoute`` is the other half. It exists because Gloo offers no way
out of three places where it blocks: its constructor while the peer does not connect, an operation
whose peer has stopped (``abort()`` does nothing for it: measured), and its destructor while such an
operation is pending. The way out of the last two is to shut down the pair's own TCP connection,
which every blocked call notices at once, whatever the peer does. Its socket is found once, by the
addresses that both sides published, and a duplicate of it is kept. Out of the first it is helped by
knocking: a connection to Gloo's own listener with the number it waits for. Rejected: guessing the
socket by comparing descriptors before and after (racy when pairs are made concurrently), short
operation time-outs (they cannot tell a slow receiver from a dead one; that is the link's business).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import os
import socket
import stat
import struct
import termios
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from ..errors import ClosedError, RouteError
from .gloo_store import LinkStore, PairRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# Gloo tries to connect five times, each as long as the time-out it was given (measured).
CONNECT_TRIES = 5
# Two, since one operation's handshake then runs beside another's payload. Matching is by tag, given
# at the issue, so it does not depend on the threads; measured 3.5 x one thread at 1 MiB, and 1.15 x
# from 16 MiB.
THREADS = 2
# What close waits, in seconds: for a constructor to notice that it was cut, and for the peer to
# have taken the last bytes.
GIVE_UP = 5.0
LEAVE = 2.0  # what a pair that was never closed may hold the end of the interpreter, in seconds
LINGER = 1.0
EXIT_MARGIN = 1.5  # that the end of the interpreter stays away from Gloo's time-out
LINGER_STEP = 0.002  # nothing wakes whoever waits for an acknowledgement


_closers: dict[threading.Thread, float] = {}  # and when Gloo lets go of its last chunk


@atexit.register
def _outlast_closers() -> None:
    # Gloo's time-out throws where nobody catches it when the interpreter goes under it.
    for thread, deadline in list(_closers.items()):
        left = deadline - time.monotonic()
        if left < EXIT_MARGIN:
            thread.join(max(0.0, left) + EXIT_MARGIN)


class GlooPair:
    """One process group of two ranks, rank 0 sending.

    Args:
        name: the same on both sides, different for every pair of a link.
        rank: 0 sends, 1 receives.
        local_host: numeric address to bind.
        publish: as in ``LinkStore``.
        timeout: seconds that construction may take.
        stall_timeout: seconds that one operation may take.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        local_host: str,
        publish: Callable[[str, bytes], None],
        timeout: float,
        stall_timeout: float,
    ) -> None:
        self.store = LinkStore(publish, timeout)
        self._name = name
        self._rank = rank
        self._local_host = local_host
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: Any = None  # torch's stubs lack most of ProcessGroupGloo
        self._socket: socket.socket | None = None
        self._cut: BaseException | None = None
        self._constructing: threading.Thread | None = None
        self._broadcast = BroadcastOptions()
        self._broadcast.rootRank = 0
        self._broadcast.rootTensor = 0
        self._broadcast.timeout = datetime.timedelta(seconds=stall_timeout)

    def start(self, done: Callable[[BaseException | None], None]) -> None:
        """Construct in a fresh thread (a pool would deadlock when pairs form a ring: F21).

        Args:
            done: called from that thread with None or the error, as the last thing it does.
        """
        self.store.start_clock()
        # A daemon: a constructor that cannot be interrupted must not keep the process alive.
        self._constructing = threading.Thread(
            target=self._run, args=(done,), name=f"aiocomm-gloo-{self._name}", daemon=True
        )
        self._constructing.start()

    def _run(self, done: Callable[[BaseException | None], None]) -> None:
        try:
            self._construct()
        except Exception as error:
            done(error)
        else:
            done(None)

    def _construct(self) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [_device(gloo, self._local_host)]
        options._timeout = datetime.timedelta(seconds=max(1.0, self._timeout / CONNECT_TRIES))
        options._threads = THREADS
        try:
            group = gloo(PrefixStore(self._name, self.store), self._rank, 2, options)
        except Exception as error:
            # C++ has flattened what the store raised to a text.
            if self.store.failure is not None:
                raise self.store.failure from error
            raise
        finally:
            del options  # it owns Gloo's listener, and the traceback owns this frame
        try:
            with self._lock:
                if self._cut is not None:
                    raise ClosedError("the Gloo pair was given up") from self._cut
                self._socket = self._find_connection()
                self._group = group
        finally:
            del group  # destroyed here if it was not kept; a traceback must not keep it either

    def _find_connection(self) -> socket.socket:
        own, theirs = self.store.own_values, self.store.peer_values
        if len(own) != 1 or len(theirs) != 1:
            raise RouteError("Gloo's rendezvous is not the one this route was written for")
        found = find_connection(PairRecord.parse(own[0]), PairRecord.parse(theirs[0]))
        if found is None:
            raise RouteError("the connection of the Gloo pair is not to be found: already closed?")
        return found

    def broadcast(self, chunk: torch.Tensor) -> dist.Work:
        """Issue one transfer; does not block.

        Args:
            chunk: uint8, 1-D, contiguous, CPU.

        Raises:
            RuntimeError: Gloo refuses, or the pair is cut.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the Gloo pair is closed")
        work: dist.Work = group.broadcast([chunk], self._broadcast)
        return work

    def cut(self, reason: BaseException) -> None:
        """End whatever blocks: waits in the store now, operations as soon as Gloo notices.

        Idempotent, from any thread. Waits for nothing, except for a search for the socket that
        is going on (microseconds to milliseconds).
        """
        self.store.abort(reason)
        with self._lock:
            self._cut = reason
            if self._socket is not None:
                _shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> bool:
        """Destroy the group. Blocks, bounded: call it from a thread of its own.

        Without a ``cut`` before, the last bytes still reach the peer. True when nothing is left,
        False when the constructor could not be ended in time (it goes when its own time-out ends).
        """
        thread = self._constructing
        deadline = time.monotonic() + GIVE_UP
        while thread is not None and thread.is_alive():
            if time.monotonic() > deadline:
                return False
            self._knock()
            thread.join(0.05)
        with self._lock:
            group, self._group = self._group, None
            connection, self._socket = self._socket, None
        del group  # joins Gloo's threads, without the interpreter lock
        if connection is not None:
            with connection:
                if self._cut is None:
                    _linger(connection)
        return True

    def close_in_thread(self, done: Callable[[], None]) -> threading.Thread:
        """Close, in a fresh thread, which calls ``done`` as the last thing it does."""

        def run() -> None:
            try:
                self.close()
            finally:
                _closers.pop(thread, None)
                done()

        name = f"aiocomm-gloo-close-{self._name}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        _closers[thread] = time.monotonic() + self._broadcast.timeout.total_seconds()
        thread.start()
        return thread

    def give_up(self) -> None:
        """End a pair that nobody closed, as far as that takes ``LEAVE`` at most."""
        if self._constructing is None:  # never started
            return
        self.cut(RouteError("the Gloo route was never closed"))
        self.close_in_thread(lambda: None).join(LEAVE)

    def _knock(self) -> None:
        # Only the side that listens needs it, and only between its publication and the peer's
        # connection; a knock that comes too early or late is dropped by the listener.
        for blob in self.store.own_values:
            record = PairRecord.parse(blob)
            host = socket.inet_ntop(record.family, record.host)
            for number in record.identifiers:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((host, record.port), timeout=0.2) as knock,
                ):
                    knock.sendall(struct.pack("=q", number))


def _device(gloo: Any, local_host: str) -> object:
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return gloo.create_device(interface=interfaces[0], lazy_init=False)
    return gloo.create_device(hostname=local_host, lazy_init=False)


def find_connection(own: PairRecord, peer: PairRecord) -> socket.socket | None:
    """Find this process's connection between two Gloo listeners and return a duplicate of it.

    One of the two dialled the other's listener, so either the local end is our listener's address
    or the remote end is the peer's; both ports are taken while the pair lives, so nothing else has
    them. Duplicating first and asking then makes it safe against descriptors closed meanwhile.
    """
    ours, theirs = (own.host, own.port), (peer.host, peer.port)
    # The newest descriptors first: a search among thousands then ends soon.
    for number in sorted(map(int, os.listdir("/dev/fd")), reverse=True):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            candidate = socket.socket(fileno=os.dup(number))
        except OSError as error:
            if error.errno in (errno.EBADF, errno.ENOTSOCK, errno.ENOTCONN):
                continue
            raise
        if _connects(candidate, ours, theirs):
            return candidate
        candidate.close()
    return None


def _connects(candidate: socket.socket, ours: tuple[bytes, int], theirs: tuple[bytes, int]) -> bool:
    family = candidate.family
    if family not in (socket.AF_INET, socket.AF_INET6) or candidate.type != socket.SOCK_STREAM:
        return False
    try:
        local, remote = candidate.getsockname(), candidate.getpeername()
    except OSError:  # a listener, or not connected any more
        return False
    return ours == (_packed(family, local[0]), local[1]) or theirs == (
        _packed(family, remote[0]),
        remote[1],
    )


def _packed(family: int, host: str) -> bytes:
    return socket.inet_pton(family, host.partition("%")[0])


def _shutdown(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the peer was quicker
        connection.shutdown(how)


def _linger(connection: socket.socket) -> None:
    # Gloo has closed its end, the duplicate keeps the connection. Say that there is no more, and
    # wait until the peer's kernel has all of it; take what the peer still sends meanwhile, since
    # a close with unread bytes is a reset, and that would drop what is not sent yet.
    _shutdown(connection, socket.SHUT_WR)
    deadline = time.monotonic() + LINGER
    connection.settimeout(LINGER_STEP)
    with contextlib.suppress(OSError):  # a reset ends it just as well
        while time.monotonic() < deadline:
            if _unsent(connection) == 0:
                connection.setblocking(False)
            try:
                if not connection.recv(65536):
                    return
            except TimeoutError:
                continue


def _unsent(connection: socket.socket) -> int:
    """Bytes that the peer's kernel has not acknowledged."""
    answer = fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0))
    return int(struct.unpack("i", answer)[0])
