"""The segments that a sender lends whole: found again by size, bounded, and let go of when idle.

A fresh segment costs a page fault for every 4 KiB at both ends (some 0.5 s for 256 MiB), a used one
nothing, so what comes back is kept for the next message of that size. Knows nothing of links or of
how segments are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from .segment import Segment

STEPS: Final = 8
"""Sizes between one power of two and the next: at most an eighth of a segment is wasted."""
SLACK: Final = 2
"""A segment serves a message of at least this part of it."""


@dataclass(slots=True, eq=False)
class Lent:
    """One segment of the pool."""

    number: int
    segment: Segment
    busy: bool = True
    aged: bool = False  # not used since the last ``age``

    def drop(self) -> None:
        """Unmap the segment; the record must not be used after."""
        del self.segment


def size_class(nbytes: int) -> int:
    """Bytes of the segment for so many bytes."""
    power = 1 << max(0, (nbytes - 1).bit_length() - 1)
    step = max(4096, power // STEPS)
    return -(-nbytes // step) * step


class Pool:
    """The segments of one direction.

    Args:
        cap: bytes of all of them, at most.
        make: a new segment of so many bytes and its number; None when there is none to be had.
        drop: told of each one that is let go of.
    """

    def __init__(
        self, cap: int, make: Callable[[int], Lent | None], drop: Callable[[Lent], None]
    ) -> None:
        self._cap = cap
        self._make = make
        self._drop = drop
        self._all: list[Lent] = []  # the one used last at the end

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(each.segment.nbytes for each in self._all)

    def take(self, nbytes: int) -> Lent | None:
        """A segment for so many bytes, to be given back; None when the cap leaves none."""
        fitting = [
            each
            for each in self._all
            if not each.busy and nbytes <= each.segment.nbytes <= SLACK * size_class(nbytes)
        ]
        if fitting:
            best = min(fitting, key=lambda each: each.segment.nbytes)
            best.busy, best.aged = True, False
            return best
        size = size_class(nbytes)
        if size + sum(each.segment.nbytes for each in self._all if each.busy) > self._cap:
            return None
        for each in [each for each in self._all if not each.busy]:
            if self.nbytes + size <= self._cap:
                break
            self._let_go(each)
        made = self._make(size)
        if made is not None:
            self._all.append(made)
        return made

    def give_back(self, lent: Lent) -> None:
        """It is free for the next message."""
        lent.busy = False
        self._all.remove(lent)
        self._all.append(lent)

    def age(self) -> bool:
        """Let go of what was not used since the last call; False when nothing is left."""
        for each in [each for each in self._all if not each.busy and each.aged]:
            self._let_go(each)
        for each in self._all:
            each.aged = True
        return bool(self._all)

    def clear(self) -> list[Lent]:
        """Forget all of them, and return them."""
        gone, self._all = self._all, []
        return gone

    def _let_go(self, lent: Lent) -> None:
        self._all.remove(lent)
        self._drop(lent)
