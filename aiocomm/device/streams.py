"""Streams that nobody else has, for as long as somebody holds them.

A stream that is given up is handed out again and never destroyed, since an allocator keeps memory
by the stream it was used in. Knows nothing of what is queued, nor how a stream is made.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Streams(Generic[T]):
    """All streams that were made for us. Any thread may use it.

    Args:
        make: a new one, from the index of the device and the priority.
    """

    def __init__(self, make: Callable[[int, int], T]) -> None:
        self._make = make
        self._free: dict[tuple[int, int], list[T]] = {}

    def take(self, index: int, priority: int) -> T:
        """One that nobody has."""
        try:
            return self._free[index, priority].pop()
        except LookupError:
            return self._make(index, priority)

    def lend(self, holder: object, stream: T, index: int, priority: int) -> None:
        """It may be taken again when its holder is gone."""
        free = self._free.setdefault((index, priority), [])
        weakref.finalize(holder, free.append, stream).atexit = False
