"""The peer's allocations that a receiver has mapped, for as long as that pays.

Mapping and unmapping are calls of the driver that wait for its locks, so both happen off the loop,
and what was used a moment ago stays mapped: up to ``MOST_IDLE`` allocations for ``LINGER`` seconds.
No longer, since the chip cannot give memory to anybody else that the peer has freed while it is
mapped here. The driver never gives one handle to two allocations, so an old mapping cannot be taken
for a newer one, and nothing reads through a mapping that nobody uses.

Knows neither streams nor messages: who uses a mapping says so, and nothing is unmapped under it.
Rejected: to map for each message alone (a stream of 1 MiB messages would map more than it copies),
and to keep mappings for good (the peer's freed memory would never be free).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ClosedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from ...device.base import Accelerator, Mapping
    from ..shm.copies import OffLoop

LINGER = 0.5
"""Seconds that a mapping is kept which nobody uses: a few steps of a fast loop."""
MOST_IDLE = 512
"""Mappings that are kept so, at most: a large model has some hundred allocations."""


class Mappings:
    """The mappings of one receiver. On the loop's thread only.

    Args:
        device: what maps.
        index: the device on this side.
        loop: for the timer.
        off_loop: see ``Runtime.off_loop``.
    """

    def __init__(
        self, device: Accelerator, index: int, loop: asyncio.AbstractEventLoop, off_loop: OffLoop
    ) -> None:
        self._device = device
        self._index = index
        self._loop = loop
        self._off_loop = off_loop
        self._open: dict[bytes, Mapping] = {}
        self._users: dict[bytes, int] = {}
        self._idle: dict[bytes, float] = {}  # since when, the longest first
        self._timer: asyncio.TimerHandle | None = None
        self._jobs: set[asyncio.Future[None]] = set()  # off the loop
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def lacks(self, handles: Iterable[bytes]) -> list[bytes]:
        """Those of the handles that are not mapped."""
        return [handle for handle in dict.fromkeys(handles) if handle not in self._open]

    def map(self, handles: Sequence[bytes], then: Callable[[BaseException | None], object]) -> None:
        """Map what is not mapped.

        Args:
            handles: none of them mapped.
            then: called when they are, with None, or else with the RouteError of the first that
                cannot be. What it does not ``use`` is idle from there on, and may go at once.
        """
        found: dict[bytes, Mapping] = {}

        def work() -> None:
            for handle in handles:
                found[handle] = self._device.open_memory(handle, self._index)

        def mapped(future: asyncio.Future[None]) -> None:
            self._open.update(found)
            then(future.exception())
            for handle in found.keys() & self._open.keys() - self._users.keys() - self._idle.keys():
                self._rest(handle)

        future = self._off_loop(work)
        future.add_done_callback(mapped)
        self._follow(future)

    def use(self, handle: bytes) -> Mapping:
        """A mapping that is there; it stays until as many calls of ``let_go``."""
        self._idle.pop(handle, None)
        self._users[handle] = self._users.get(handle, 0) + 1
        return self._open[handle]

    def let_go(self, handle: bytes) -> None:
        """One use is over: the device is done with it."""
        self._users[handle] -= 1
        if not self._users[handle]:
            del self._users[handle]
            self._rest(handle)

    def _rest(self, handle: bytes) -> None:
        self._idle[handle] = self._loop.time()
        if self._closed:
            self._unmap([handle])
        elif len(self._idle) > MOST_IDLE:
            self._unmap([next(iter(self._idle))])
        elif self._timer is None:
            self._timer = self._loop.call_later(LINGER, self._look)

    def _look(self) -> None:
        self._timer = None
        due = self._loop.time() - LINGER
        self._unmap([handle for handle, since in self._idle.items() if since <= due])
        if self._idle:
            first = next(iter(self._idle.values()))
            self._timer = self._loop.call_later(first - due, self._look)

    def _unmap(self, handles: list[bytes]) -> None:
        if not handles:
            return
        mappings = []
        for handle in handles:
            del self._idle[handle]
            mappings.append(self._open.pop(handle))

        def work() -> None:
            for mapping in mappings:
                mapping.close()

        try:
            future = self._off_loop(work)
        except ClosedError:  # the device let go after the runtime was closed
            work()
            return
        self._follow(future)

    def _follow(self, job: asyncio.Future[None]) -> None:
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def close(self) -> None:
        """Unmap what nobody uses, now, and the rest as soon as its uses are over. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unmap(list(self._idle))

    @property
    def jobs(self) -> set[asyncio.Future[None]]:
        """What is being mapped and unmapped."""
        return set(self._jobs)
