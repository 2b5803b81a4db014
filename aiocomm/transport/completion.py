"""Native completions as asyncio futures: the only place that turns a ``dist.Work`` into one.

The backend's own thread calls back when the work is over, and the result is posted to the loop: no
thread waits, and the work makes progress though nobody awaits it. Knows nothing of who awaits.
Rejected: ``work.wait()`` in an executor (a thread for each operation), and polling
``work.is_completed()`` (Gloo's never becomes true unless somebody waits).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import torch
    import torch.distributed as dist

T = TypeVar("T")


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
        try:
            loop.call_soon_threadsafe(_settle, future, error)
        except RuntimeError:
            if not loop.is_closed():
                raise

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
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

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
