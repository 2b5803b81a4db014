"""Memory of the user's own that other processes may map: which tensor lies in which segment.

A tensor that lies in such memory needs no copy on the sender's side. The registry is one for the
process, since a tensor may go to any peer; it holds a segment for as long as a tensor is in it.
Knows nothing of routes but that they want to hear when a segment goes out of use.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False, slots=True)
class Shared:
    """One segment of the user's.

    Args:
        segment: the memory.
        aliased: the receiver gets this very memory, instead of a copy made out of it.
        watchers: called when no tensor is in it any more, in whatever thread drops the last one.
    """

    segment: Segment
    aliased: bool
    watchers: list[Callable[[], None]] = field(default_factory=list)


class Registry:
    """All such segments of one process. Any thread may use it."""

    def __init__(self) -> None:
        # Plain dict operations: the garbage collector may call back at any point of any thread.
        self._found: dict[int, tuple[weakref.ref[memoryview], Shared]] = {}
        self._bases: list[int] | None = []  # sorted; None when it is to be made again

    def make(self, nbytes: int, *, aliased: bool) -> memoryview:
        """Fresh shared memory; it goes when the last buffer over the view does.

        Raises:
            RouteError: there is none.
        """
        segment = Segment.create(nbytes)
        base = segment.address
        view = segment.view[:]

        def gone(_: object) -> None:
            self._bases = None
            _, shared = self._found.pop(base)
            # A watcher knows its segment: listed here it would keep that for the collector.
            watchers, shared.watchers = shared.watchers, []
            for watcher in watchers:
                watcher()

        self._found[base] = (weakref.ref(view, gone), Shared(segment, aliased))
        self._bases = None
        return view

    def find(self, address: int, nbytes: int) -> tuple[Shared, int] | None:
        """The segment in which these bytes lie, and where in it; None where in none."""
        if not self._found:
            return None
        bases = self._bases
        if bases is None:
            bases = self._bases = sorted(self._found)
        place = bisect_right(bases, address) - 1
        found = self._found.get(bases[place]) if place >= 0 else None
        if found is None:
            return None
        shared = found[1]
        offset = address - shared.segment.address
        return (shared, offset) if offset + nbytes <= shared.segment.nbytes else None


REGISTRY = Registry()
"""The one of this process."""
