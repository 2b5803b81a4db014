"""The store over which one Gloo or NCCL pair finds itself: its keys travel on the control link.

Gloo's constructor asks a ``dist.Store`` for the peer's address and blocks until it is there. Here
that store is the link itself: what this side sets goes out as a STORE frame, what the peer sets
arrives by ``deliver``. So Gloo's rendezvous is authenticated, needs no port, and a wait in it can
be ended from outside (``abort``), which no built-in store allows. May not know of event loops: the
blocking calls come from the constructing thread, ``deliver`` and ``abort`` from anywhere. Rejected:
a ``TCPStore`` per pair (one more port and thread each, waits that nothing can interrupt).
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store  # what torch.distributed exports, typed

from ..errors import ClosedError, ProtocolError, RouteError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Sequence

# A pair exchanges one key of about 200 bytes; anything far beyond that is no Gloo at the other end.
MAX_KEYS = 16
MAX_VALUE = 64 * 1024


class LinkStore(Store):
    """Store of one pair.

    Args:
        publish: sends one key and value to the peer; called from the thread that calls ``set``.
        timeout: seconds to wait for a key of the peer, from now on, whatever Gloo asks for.
        backend: whose pair it is, for error texts.
    """

    def __init__(
        self, publish: Callable[[str, bytes], None], timeout: float, backend: str = "Gloo"
    ) -> None:
        super().__init__()
        self._backend = backend
        self._publish = publish
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._changed = threading.Condition()
        self._own: dict[str, bytes] = {}
        self._theirs: dict[str, bytes] = {}
        self._aborted: BaseException | None = None
        self.failure: BaseException | None = None  # what a blocked call raised: C++ flattens it

    def start_clock(self) -> None:
        """Let the time-out count from now."""
        self._deadline = time.monotonic() + self._timeout

    def deliver(self, key: str, value: bytes) -> None:
        """Take in a key that the peer has set. Never blocks.

        Raises:
            ProtocolError: more or larger values than any Gloo pair sends.
        """
        with self._changed:
            if len(value) > MAX_VALUE or (
                key not in self._theirs and len(self._theirs) >= MAX_KEYS
            ):
                raise ProtocolError(
                    f"the peer set more in the store of a {self._backend} pair than fits: {key!r}"
                )
            self._theirs[key] = bytes(value)
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Make every present and coming wait raise. Idempotent, never blocks."""
        with self._changed:
            if self._aborted is None:
                self._aborted = error
            self._changed.notify_all()

    @property
    def own_values(self) -> tuple[bytes, ...]:
        """What this side has set so far."""
        with self._changed:
            return tuple(self._own.values())

    @property
    def peer_values(self) -> tuple[bytes, ...]:
        """What the peer has set so far."""
        with self._changed:
            return tuple(self._theirs.values())

    # The calls of Gloo. Their names and signatures are those of dist.Store.

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._refuse_if_aborted()
            self._own[key] = raw
            self._changed.notify_all()
        try:
            self._publish(key, raw)
        except Exception as error:
            self.failure = error
            raise

    def get(self, key: str) -> bytes:
        with self._changed:
            while True:
                self._refuse_if_aborted()
                value = self._theirs.get(key, self._own.get(key))
                if value is not None:
                    return value
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    text = f"the peer did not set up its side within {self._timeout:g} s"
                    self.failure = TimeoutError(text)
                    raise TimeoutError(text)  # another: its traceback leads back to this store
                self._changed.wait(remaining)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._theirs or key in self._own for key in keys)

    def _refuse_if_aborted(self) -> None:
        if self._aborted is not None:
            self.failure = self._aborted
            raise ClosedError(f"the {self._backend} pair was given up") from self._aborted


@dataclass(frozen=True, slots=True)
class PairRecord:
    """What Gloo publishes of one side of a pair, as far as it is needed to reach its sockets.

    Args:
        family: ``socket.AF_INET`` or ``AF_INET6``, in the host's numbers.
        host: the packed address, 4 or 16 bytes.
        port: of Gloo's own listener.
        identifiers: number by which the listener tells its expected connections apart.
    """

    family: int
    host: bytes
    port: int
    identifiers: tuple[int, ...]

    @classmethod
    def parse(cls, blob: bytes) -> PairRecord:
        """Read a value that ``connectFullMesh`` has set.

        Layout (gloo/rendezvous/context.cc): host name (size_t length, bytes), address (size_t
        length; a ``sockaddr_storage`` of 128 bytes, a sequence number), one ``ssize_t`` per rank.

        Raises:
            RouteError: it is laid out otherwise: another Gloo than the one this was written for.
        """
        try:
            (name_length,) = struct.unpack_from("=Q", blob, 0)
            (address_length,) = struct.unpack_from("=Q", blob, 8 + name_length)
            start = 16 + name_length
            (family,) = struct.unpack_from("=H", blob, start)
            (port,) = struct.unpack_from("!H", blob, start + 2)
            numbers = blob[start + address_length :]
            identifiers = struct.unpack(f"={len(numbers) // 8}q", numbers)
        except (struct.error, OverflowError) as error:
            raise RouteError(f"unknown layout of a Gloo address ({len(blob)} bytes)") from error
        if family == socket.AF_INET:
            host = blob[start + 4 : start + 8]
        elif family == socket.AF_INET6:
            host = blob[start + 8 : start + 24]
        else:
            raise RouteError(f"unknown address family {family} in a Gloo address")
        if port == 0 or address_length != 136 or len(identifiers) != 2:
            raise RouteError(f"unknown layout of a Gloo address ({len(blob)} bytes)")
        return cls(family, host, port, identifiers)
