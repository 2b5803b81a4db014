"""One timer that beats for all links of a worker, and notices peers that have gone silent.

A tick asks each link for what happened since the last one. Silence is counted in ticks, not read
off a clock: a stall of this side's own loop (the peer's bytes wait in the kernel meanwhile) then
counts as one tick and never kills a healthy peer. Knows links only by their ``beat``.

Rejected: a timer per link (256 idle groups would wake the loop 256 times a second).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..options import Options


class Beating(Protocol):
    """What a heart drives."""

    def beat(self, interval: float, timeout: float) -> None:
        """One tick: send a heartbeat if nothing was sent, give up a peer that is silent.

        Args:
            interval: seconds that one tick stands for.
            timeout: seconds of silence after which the peer is lost.
        """


class Heart:
    """Beats for every link given to it; its timer runs only while there is one.

    Args:
        options: ``heartbeat_interval`` and ``peer_timeout`` in seconds. A timeout shorter than four
            intervals shortens the interval of this side.
    """

    def __init__(self, options: Options) -> None:
        self.timeout = options.peer_timeout
        self.interval = min(options.heartbeat_interval, options.peer_timeout / 4)
        self._links: dict[Beating, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Heart of {len(self._links)} links, every {self.interval} s>"

    def add(self, link: Beating) -> None:
        """Beat for this link from the running loop on."""
        self._links[link] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.interval, self._tick)

    def remove(self, link: Beating) -> None:
        """Beat for it no more. Idempotent."""
        self._links.pop(link, None)
        if not self._links and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.interval, self._tick)
        for link in tuple(self._links):
            if link in self._links:
                link.beat(self.interval, self.timeout)
