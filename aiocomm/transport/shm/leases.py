"""What the peer has lent and tensors of the user still lie in.

A lease ends when the last tensor over its memory dies, in whatever thread that is. So that a user
who keeps what came never stops the sender, no more than a part of what can be lent is kept so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Leases:
    """The leases of one direction.

    Args:
        loop: the loop of the runtime.
        ended: told on the loop of the pieces that nobody uses any more.

    Attributes:
        limit: bytes that may be kept at a time.
        nbytes: bytes that are.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[..., None]) -> None:
        self._loop = loop
        self._ended = ended
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._dropped: deque[tuple[int, int]] = deque()  # number, bytes
        self.limit = self.nbytes = 0

    def begin(self, view: memoryview, number: int) -> bool:
        """Watch a view and all that is made of it; False where too much is kept already."""
        nbytes = view.nbytes
        if self.nbytes + nbytes > self.limit:
            return False
        self.nbytes += nbytes

        def dead(_: object) -> None:
            self._dropped.append((number, nbytes))
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the route
                self._loop.call_soon_threadsafe(self._end)

        self._leases[number] = weakref.ref(view, dead)
        return True

    def _end(self) -> None:
        numbers = []
        while self._dropped:  # one by one: another thread may be about to add to it
            number, nbytes = self._dropped.popleft()
            del self._leases[number]
            self.nbytes -= nbytes
            numbers.append(number)
        if numbers:
            self._ended(*numbers)
