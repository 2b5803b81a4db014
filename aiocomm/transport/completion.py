"""Native completions as asyncio futures: the only place that makes one of a ``dist.Work`` or of a
device's event.

The backend's own thread calls back when the work is over, and the result is posted to the loop: no
thread waits, and the work makes progress though nobody awaits it. Knows nothing of who awaits.
Rejected: ``work.wait()`` in an executor (a thread for each operation), and polling
``work.is_completed()`` (Gloo's never becomes true unless somebody waits).

Nothing calls back for an event of a device, so events are polled; a stream is carried out in order,
so only the first one of each stream is. Rejected: a host function in the stream (it takes the
interpreter's lock in a thread of the driver, and holds the stream up meanwhile), a thread that
blocks in ``synchronize`` for each stream, and a timer for each event.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import DeviceError, UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    import torch
    import torch.distributed as dist

    from ..device.base import Event

T = TypeVar("T")

SPIN = 50e-6
"""Seconds after the last sign of life in which every turn of the loop asks: most copies are that
short, and a timer's own grain is coarser."""
SPIN_TURNS = 10
"""Turns in which it does so at least: those of a busy loop or machine take longer than that."""
LONGEST_NAP = 1e-3
"""Seconds between two turns that ask, at most."""


def watch(work: dist.Work, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """A future of ``loop`` that completes when the work does, with None or the work's own error.

    Args:
        work: of a collective such as broadcast or all_reduce.
        loop: where the future belongs; call this on its thread.

    Raises:
        UsageError: the work has no future (Gloo's isend and irecv).

    Cancellation: of the future: the native operation goes on, its end is ignored. Nothing is
    reported when the loop was closed before the end.
    """
    future: asyncio.Future[None] = loop.create_future()

    def ended(native: torch.futures.Future[Any]) -> None:
        error = _error(native)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, error)

    _native(work).add_done_callback(ended)
    return future


class Completions(Generic[T]):
    """The ends of many works, told in the order of the works, several at a time.

    For streams: to wake the loop for each work costs more than moving the bytes of a small tensor
    does. Used on the thread of its loop.

    Args:
        loop: where ``ended`` is called.
        ended: called with the token of a work and its error or None; not any more once the loop is
            closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[T, BaseException | None], None],
    ) -> None:
        self._loop = loop
        self._ended = ended
        self._pending: deque[_Pending[T]] = deque()
        self._told = False  # the loop will look; two threads that both tell it do no harm

    def add(self, work: dist.Work, token: T) -> None:
        """Tell the end of this work, when it or a later one is announced.

        Raises:
            UsageError: the work has no future.
        """
        self._pending.append(_Pending(_native(work), token))

    def announce(self) -> None:
        """Wake the loop when the work that was added last has ended, to tell it and all before it.

        To be called at last when a series of works was added, or their ends are never told.
        """
        if self._pending:
            self._announce(self._pending[-1])

    def announce_all(self) -> None:
        """Wake the loop for each work that is pending now: they take so long that it pays."""
        for each in self._pending:
            self._announce(each)

    def _announce(self, each: _Pending[T]) -> None:
        if not each.announced:
            each.announced = True
            each.native.add_done_callback(self._over)

    def _over(self, _: torch.futures.Future[Any]) -> None:
        if self._told:
            return
        self._told = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told = False  # before looking: what ends from now on wakes the loop again
        over = [each.native.done() for each in self._pending]
        pairs = list(zip(self._pending, over, strict=True))
        self._pending = deque(each for each, done in pairs if not done)
        while over and not over[-1]:
            over.pop()
        for each, done in pairs[: len(over)]:
            if done:
                self._ended(each.token, _error(each.native))
            else:  # overtaken by the one that would have told it
                self._announce(each)


class _Pending(Generic[T]):
    __slots__ = ("announced", "native", "token")

    def __init__(self, native: torch.futures.Future[Any], token: T) -> None:
        self.native = native
        self.token = token
        self.announced = False


class Poller:
    """The events of one loop that are not done yet, by stream; used on its thread only.

    A turn asks for one event of each stream, however many wait there. It asks at every turn of the
    loop for a moment, then more and more seldom, and there is no turn when nothing is pending.

    Args:
        loop: where the futures belong.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # it is kept by loop, in a dictionary with weak keys
        self._lines: dict[Hashable, deque[_Watched]] = {}
        self._handle: asyncio.Handle | None = None
        self._spin_until = 0.0
        self._spins = 0
        self._nap = SPIN

    def watch(self, event: Event, keep: object = None) -> asyncio.Future[None]:
        """A future that completes when the event is done, or fails with DeviceError.

        Args:
            event: not before any other of its stream that is watched.
            keep: held until the event is done, whatever becomes of the future.

        Cancellation: of the future: the device goes on; ``keep`` is held until it has ended.
        """
        loop = self._loop()
        assert loop is not None
        future: asyncio.Future[None] = loop.create_future()
        key = event.stream.key
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
        line.append(_Watched(event, future, keep))
        if self._handle is not None:
            self._handle.cancel()  # it may be a nap
        self._wake(loop)
        return future

    @property
    def pending(self) -> int:
        """Events that are not done."""
        return sum(map(len, self._lines.values()))

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not the loop's time, which uvloop counts in whole milliseconds.
        self._spin_until, self._spins, self._nap = monotonic() + SPIN, 0, SPIN
        self._handle = loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._handle = None
        moved = False
        for key, line in list(self._lines.items()):
            moved |= self._ask(line)
            if not line:
                del self._lines[key]
        loop = self._loop()
        if not self._lines or loop is None:
            return
        if moved:
            self._wake(loop)
        elif self._spins < SPIN_TURNS or monotonic() < self._spin_until:
            self._spins += 1
            self._handle = loop.call_soon(self._turn)
        else:
            self._handle = loop.call_later(self._nap, self._turn)
            self._nap = min(2 * self._nap, LONGEST_NAP)

    @staticmethod
    def _ask(line: deque[_Watched]) -> bool:
        """Ask for the first event of a stream; whether anything came of it."""
        while line and line[0].forgotten:
            line.popleft()
        if not line:
            return False
        try:
            if not line[0].event.query():
                return False
        except DeviceError as error:
            for watched in line:
                copy = DeviceError(error.message)  # one for each: it collects tracebacks
                copy.__cause__ = error.__cause__
                _settle(watched.future, copy)
            line.clear()
        else:
            _settle(line.popleft().future, None)
        return True


class _Watched:
    __slots__ = ("event", "future", "keep")

    def __init__(self, event: Event, future: asyncio.Future[None], keep: object) -> None:
        self.event = event
        self.future = future
        self.keep = keep

    @property
    def forgotten(self) -> bool:
        """Whether nobody waits for it, nor does any memory."""
        return self.keep is None and self.future.done()


_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Poller] = weakref.WeakKeyDictionary()


def poller_of(loop: asyncio.AbstractEventLoop) -> Poller:
    """The one poller of a loop; on its thread."""
    poller = _pollers.get(loop)
    if poller is None:
        for other in list(_pollers):
            if other.is_closed():  # what was pending there holds it
                _pollers.pop(other, None)
        poller = _pollers[loop] = Poller(loop)
    return poller


def _native(work: dist.Work) -> torch.futures.Future[Any]:
    try:
        return work.get_future()
    except RuntimeError as error:
        raise UsageError(
            f"{type(work).__name__} has no future, so nothing announces its end: use a collective "
            "(a broadcast in a group of two instead of isend and irecv)"
        ) from error


def _error(native: torch.futures.Future[Any]) -> BaseException | None:
    try:
        native.value()
    except Exception as error:
        return error
    return None


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
