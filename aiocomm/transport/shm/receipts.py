"""Which pieces are to be given back to the sender, and when that is said.

Small pieces of the ring are given back together, since each receipt wakes the peer: when they are a
good part of the ring, or after a while. One that comes back after a later one is said at once: the
sender's ring is free up to the oldest piece only, so all that was said since waits for that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...packing import aligned

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

WITHHELD: Final = 4
"""Receipts for this part of the ring are said at once,"""
MOST: Final = 4 * 1024 * 1024
"""and receipts for so many bytes."""
LATEST: Final = 1.0
"""Seconds after which fewer are said too, so that an idle ring is known to be idle."""


class Receipts:
    """The receipts of one direction.

    Args:
        loop: the loop of the runtime.
        say: tells the peer the numbers of pieces that are its own again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, say: Callable[[list[int]], None]) -> None:
        self._loop = loop
        self._say = say
        self._numbers: list[int] = []
        self._nbytes = 0  # of the ring that they take
        self._newest = self._said = -1  # piece of the ring that is free, and of which that was said
        self._timer: asyncio.TimerHandle | None = None
        self.ring_bytes = 0

    def add(self, number: int, nbytes: int) -> None:
        """A piece of the ring is free."""
        self._numbers.append(number)
        self._newest = max(self._newest, number)
        self._nbytes += aligned(nbytes)
        if (
            number < self._said
            or self._nbytes >= MOST
            or self._nbytes * WITHHELD >= self.ring_bytes
        ):
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(LATEST, self._late)

    def add_at_once(self, *numbers: int) -> None:
        """Pieces that somebody may be waiting for are free."""
        self._numbers += numbers
        self._flush()

    def close(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        self._timer = None
        if self._numbers:
            self._flush()

    def _flush(self) -> None:
        numbers, self._numbers, self._nbytes = self._numbers, [], 0
        self._said = self._newest
        self._say(numbers)
