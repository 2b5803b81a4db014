"""The memory that a sender shares with its peer: a ring, segments to lend, segments of the user's.

How much there is of it, when it is handed to the peer, and when it is let go of. What is put into
it is the business of ``send.py``.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from ...errors import RouteError
from ...packing import ALIGN
from ...runtime import COPY_LIMIT
from .pool import Lent, Pool
from .ring import Ring
from .segment import Segment
from .wire import RING_NUMBER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from .copies import OffLoop
    from .mailbox import Courier
    from .shared import Shared

log = logging.getLogger("aiocomm")

RING: Final = 32 * 1024 * 1024
"""Bytes of the ring, at most."""
SMALL: Final = 8 * 1024 * 1024
"""Bytes of it that small pieces keep to."""
PIECES: Final = 4
"""Pieces that the ring has room for, so that both ends copy at the same time."""
IDLE: Final = 30.0
"""Seconds after which memory that nobody needs any more is let go of, at least."""


class SenderMemory:
    """The shared memory of one direction.

    Args:
        loop: the loop of the runtime.
        nbytes: of ring and lent segments together, at most.
        off_loop: see ``Runtime.off_loop``.
        forget: tells the peer that a segment is not used any more.
        room: told when there is room in the ring again that no receipt speaks of.

    Attributes:
        piece_limit: bytes of the longest piece of the ring.
        lend_limit: bytes of lent segments that the peer's user may keep.

    Raises:
        RouteError: there is no shared memory.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        nbytes: int,
        *,
        off_loop: OffLoop,
        forget: Callable[[int], None],
        room: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._off_loop = off_loop
        self._forget = forget
        self._room = room
        self._ring = Ring(max(PIECES * ALIGN, min(RING, nbytes // 2)))
        self._segment = Segment.create(self._ring.nbytes)
        self._pool = Pool(nbytes - self._ring.nbytes, self._make, self._drop)
        self._courier: Courier | None = None
        self._ring_idle = True  # since the last ``_age``
        self._aging: asyncio.TimerHandle | None = None
        self._next = RING_NUMBER + 1
        # The user's memory that the peer has: its number, and who is told when it goes.
        self._shared: dict[Shared, tuple[int, Callable[[], None]]] = {}
        self.ring_bytes = self._ring.nbytes
        self._small = min(SMALL, self.ring_bytes)
        self.piece_limit = self._ring.nbytes // PIECES & -ALIGN
        self.lend_limit = (nbytes - self._ring.nbytes) // 2

    def connect(self, courier: Courier) -> None:
        """Hand the ring to the peer.

        Raises:
            RouteError: it cannot be handed over.
        """
        self._courier = courier
        courier.send(RING_NUMBER, self._segment)
        self._segment.forget_descriptor()

    # The ring

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Offset and address of a piece of the ring; None while there is no room."""
        offset = self._ring.take(nbytes, self._small if nbytes <= COPY_LIMIT else self.ring_bytes)
        if offset is None:
            return None
        self._ring_idle = False
        self._begin_aging()
        return offset, self._segment.address + offset

    def give_back(self, offset: int) -> None:
        """A piece of the ring is free."""
        self._ring.give_back(offset)
        self._begin_aging()  # which may have ended while the peer took its time

    # Segments to lend

    def lend(self, nbytes: int) -> Lent | None:
        """A segment for so many bytes; None where none is left."""
        lent = self._pool.take(nbytes)
        if lent is not None:
            self._begin_aging()
        return lent

    def take_back(self, lent: Lent) -> None:
        """The peer has let go of it."""
        self._pool.give_back(lent)

    def _make(self, nbytes: int) -> Lent | None:
        try:
            segment = Segment.create(nbytes)
            lent = Lent(self._send(segment), segment)
        except RouteError as error:
            log.debug("no segment of %d bytes to lend, the ring will do: %s", nbytes, error)
            return None
        segment.forget_descriptor()
        return lent

    def _drop(self, lent: Lent) -> None:
        self._forget(lent.number)
        self._off_loop(lent.drop)  # to unmap 256 MiB takes some 10 ms

    # Segments of the user's

    def number_of(self, shared: Shared) -> int | None:
        """Under which number the peer has it, after handing it over; None where it cannot be."""
        found = self._shared.get(shared)
        if found is not None:
            return found[0]
        try:
            number = self._send(shared.segment)
        except RouteError as error:
            log.debug("shared memory is copied instead: %s", error)
            return None

        def forget() -> None:
            if self._shared.pop(shared, None) is not None:
                self._forget(number)

        def unused() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the route
                self._loop.call_soon_threadsafe(forget)

        self._shared[shared] = number, unused
        shared.watchers.append(unused)
        return number

    def _send(self, segment: Segment) -> int:
        assert self._courier is not None
        number = self._next
        self._courier.send(number, segment)
        self._next += 1
        return number

    # Letting go

    def _begin_aging(self) -> None:
        if self._aging is None:
            self._aging = self._loop.call_later(IDLE, self._age)

    def _age(self) -> None:
        """Let go of what was not used since the last call."""
        more = self._pool.age() or not self._ring_idle
        if self._ring_idle and not self._ring.used:
            self._empty_ring()
        self._ring_idle = True
        self._aging = self._loop.call_later(IDLE, self._age) if more else None

    def _empty_ring(self) -> None:
        whole = self._ring.take(self.ring_bytes, self.ring_bytes)
        assert whole is not None

        def emptied(_: object) -> None:
            self._ring.give_back(whole)
            self._room()

        self._off_loop(self._segment.empty).add_done_callback(emptied)

    def close(self) -> None:
        """Drop all of it; nobody may be reading or writing it. What the peer has stays with it."""
        if self._aging is not None:
            self._aging.cancel()
        for shared, (_, unused) in self._shared.items():
            with contextlib.suppress(ValueError):  # told just now, in another thread perhaps
                shared.watchers.remove(unused)
        self._shared.clear()
        for lent in self._pool.clear():
            self._off_loop(lent.drop)
        if self._courier is not None:
            self._courier.close()
        self._off_loop(self._unmap_ring)

    def _unmap_ring(self) -> None:
        # Not left to the collector: pool and memory know each other.
        del self._segment
