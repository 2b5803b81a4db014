"""Copies between memory of this process and shared memory: small ones here, large ones in turns.

A copy off the loop goes in slices, two of them with the copying thread at a time, so that the
copies of all groups and directions take turns there and none waits for another's large one. One
queue belongs to one end of a route and ends its copies in order.

``memmove`` and not torch's ``copy_``: above some MiB the C library writes past the cache, which is
twice as fast (11.7 against 6.7 GB/s for 256 MiB).
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator

SLICE: Final = 4 * 1024 * 1024
"""Bytes that one turn copies: some 0.4 ms."""
AHEAD: Final = 2
"""Slices that are with the copying thread: the second hides the loop's turn behind the first."""

Range = tuple[int, int, int]
"""To which address, from which, how many bytes."""


class OffLoop(Protocol):
    """Runs a call in the copying thread; see ``Runtime.off_loop``."""

    def __call__(self, call: Callable[..., None], *args: object) -> asyncio.Future[None]: ...


def copy(ranges: Iterable[Range]) -> None:
    """Copy here and now."""
    move = ctypes.memmove
    for target, source, nbytes in ranges:
        move(target, source, nbytes)


@dataclass(slots=True, eq=False)
class _Copy:
    slices: Iterator[list[Range]]
    done: Callable[[], None]
    posted: int = 0
    last: bool = False  # no slice is left to post


class CopyQueue:
    """The copies of one end of a route.

    Args:
        off_loop: runs a call in the copying thread, in the order of the calls.
    """

    def __init__(self, off_loop: OffLoop) -> None:
        self._off_loop = off_loop
        self._copies: deque[_Copy] = deque()
        self._posted = 0
        self._stopped: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is under way: one made here and now would overtake it."""
        return bool(self._copies)

    def submit(self, ranges: Iterable[Range], done: Callable[[], None]) -> None:
        """Copy off the loop; ``done()`` is called on the loop, in the order of the calls."""
        self._copies.append(_Copy(slices(ranges), done))
        self._post()

    def stop(self, stopped: Callable[[], None]) -> None:
        """Begin nothing more; ``stopped()`` is called once nothing is read or written any more."""
        if self._posted:
            self._stopped = stopped
        else:
            self._copies.clear()
            stopped()

    def _post(self) -> None:
        for each in self._copies:
            while not each.last:
                if self._posted >= AHEAD:
                    return
                part = next(each.slices, None)
                if part is None:
                    each.last = True
                    break
                each.posted += 1
                self._posted += 1
                self._off_loop(copy, part).add_done_callback(partial(self._ended, each))

    def _ended(self, each: _Copy, _: object) -> None:
        each.posted -= 1
        self._posted -= 1
        if self._stopped is not None:
            if not self._posted:
                self._copies.clear()
                self._stopped()
            return
        self._post()
        copies = self._copies
        while copies and copies[0].last and not copies[0].posted:
            copies.popleft().done()


def slices(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """The same ranges in lists of at most ``SLICE`` bytes each."""
    part: list[Range] = []
    room = SLICE
    for target, source, nbytes in ranges:
        done = 0
        while done < nbytes:
            count = min(room, nbytes - done)
            part.append((target + done, source + done, count))
            done += count
            room -= count
            if not room:
                yield part
                part, room = [], SLICE
    if part:
        yield part
