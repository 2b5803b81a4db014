"""Who of the two ends of an NCCL route may issue a chunk, and whether they still come on.

Counts chunks, of which it knows nothing else. The receiver says how many it has issued, up to
``WINDOW`` ahead of what is done, and how many are done; the sender issues no more than the former.
Both stand still when nothing was done for too long while something is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ProtocolError
from .transfer import pack_count, parse_count

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

WINDOW = 16
"""Chunks that a receiver issues ahead; a sender follows."""


class Flow:
    """The counts of one end.

    Args:
        label: of the route; the keys begin with it.
        sending: which end it is.
        loop: of the route.
        publish: hands a key and value to the peer's end; never raises.
        stall_timeout: seconds.
        stalled: called when nothing was done for so long.
    """

    def __init__(
        self,
        label: str,
        *,
        sending: bool,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        stall_timeout: float,
        stalled: Callable[[], None],
    ) -> None:
        self.issued = self.done = 0  # chunks, on this side
        self.taken = 0  # chunks that the receiver has said to be done
        self._ready = 0  # chunks that the receiver has said to have issued
        self._keys = (f"{label}/ready", f"{label}/done")
        self._sending = sending
        self._loop = loop
        self._publish = publish
        self._stall_timeout = stall_timeout
        self._stalled = stalled
        self._told = (0, 0)  # what this side has said last
        self._telling = False
        self._moved_at = 0.0  # when a chunk was done, or the first one was issued
        self._watch: asyncio.TimerHandle | None = None

    def hears(self, key: str) -> bool:
        """Whether a key is one of the counts."""
        return key in self._keys

    def heard(self, key: str, value: bytes) -> None:
        """A count of the receiver.

        Raises:
            ProtocolError: it cannot be, or this is the receiver.
        """
        if not self._sending:
            raise ProtocolError(f"the peer says {key!r}, which only a receiver can say")
        if key == self._keys[0]:
            self._ready = parse_count(value, self._ready)
        else:
            self.taken = parse_count(value, self.taken)
            self._moved_at = self._loop.time()

    @property
    def may_issue(self) -> bool:
        """Whether the next chunk may be issued."""
        if self._sending:
            return self.issued < self._ready
        return self.issued - self.done < WINDOW

    def issue(self) -> int:
        """A chunk was issued; its number, from 1."""
        if not self._under_way:
            self._moved_at = self._loop.time()
        self.issued += 1
        if self._watch is None:
            self._watch = self._loop.call_later(self._stall_timeout, self._look)
        self._tell_soon()
        return self.issued

    def finish(self) -> None:
        """The next chunk in order is done here."""
        self.done += 1
        self._moved_at = self._loop.time()
        self._tell_soon()

    def stop(self) -> None:
        """Nothing is under way any more, or it does not matter."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    @property
    def _under_way(self) -> bool:
        done = min(self.done, self.taken) if self._sending else self.done
        return self.issued > done

    def _tell_soon(self) -> None:
        if not (self._sending or self._telling):
            self._telling = True
            self._loop.call_soon(self._tell)  # once for all of a turn

    def _tell(self) -> None:
        self._telling = False
        counts = (self.issued, self.done)
        for key, count, before in zip(self._keys, counts, self._told, strict=True):
            if count != before:
                self._publish(key, pack_count(count))
        self._told = counts

    def _look(self) -> None:
        self._watch = None
        if not self._under_way:
            return
        left = self._moved_at + self._stall_timeout - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._stalled()
