"""The work of a call of Ray: an ``ObjectRef`` as a handle.

Ray calls back once the object is there, in a thread of its own, so however many works wait they
need none of theirs. After ``ray.shutdown`` it never does, and tells nobody: while works wait, each
loop looks once a second whether Ray is still there. Rejected: awaiting the reference
(``ObjectRef.__await__`` leaves a future of the loop behind that complains when the loop closes
first), ``ray.get`` in a thread for each, and a timer for each.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ClosedError, MissingPackageError, UsageError
from .base import AsyncWork

try:
    import ray
except ImportError as _error:
    raise MissingPackageError(
        "aiocomm on Ray needs ray, which is not installed: pip install 'aiocomm[ray]'"
    ) from _error

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

log = logging.getLogger("aiocomm")

LOOK = 1.0
"""Seconds between looks at whether Ray still runs in this process."""

_watches: dict[asyncio.AbstractEventLoop, _Watch] = {}  # of loops in which works wait


def connection() -> str | None:
    """Names this process' connection to a cluster; another one after ``ray.shutdown``, or None."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()} {context.get_worker_id()}"


def shut_down(what: str) -> ClosedError:
    """The error for what ``ray.shutdown`` has cut off."""
    return ClosedError(
        f"ray.shutdown() was called in this process, and {what}: do it again after ray.init()"
    )


class AsyncChannelWork(AsyncWork[T]):
    """Completes with what a remote call returns.

    What the call raises arrives as an exception that is both ``ray.exceptions.RayTaskError`` and of
    the class that was raised; that its actor died, as ``ray.exceptions.RayActorError``.

    Args:
        ref: what ``actor.method.remote(...)`` returns.

    It fails with ClosedError when this process leaves the cluster first, by ``ray.shutdown``.

    Raises:
        UsageError: it is no reference.
        RuntimeError: no event loop is running.

    Cancellation: cancels the call, as ``ray.cancel`` does: one that waits for its turn never runs,
    a coroutine is cancelled where it is, and a plain function of an actor runs to its end.
    """

    def __init__(self, ref: ray.ObjectRef[T]) -> None:
        if not isinstance(ref, ray.ObjectRef):
            raise UsageError(
                f"{ref!r} is no ObjectRef: give what the remote() of one call returned"
            )
        super().__init__(loop=asyncio.get_running_loop())
        self._ref: ray.ObjectRef[T] | None = ref
        self._watch = _watch(self._loop)
        self._watch.works.add(self)
        ref.future().add_done_callback(self._tell)  # holds this work until the call has ended

    def _tell(self, outcome: Future[T]) -> None:
        try:
            self._loop.call_soon_threadsafe(partial(self._settle, outcome))
        except RuntimeError:
            if not self._loop.is_closed():  # a loop that ended meanwhile is no fault
                raise

    def _settle(self, outcome: Future[T]) -> None:
        self._ref = None
        self._watch.works.discard(self)
        error = outcome.exception()
        if error is None:
            self._finish(outcome.result())
        else:
            self._fail(error)

    def _on_cancel(self) -> None:
        ref, self._ref = self._ref, None
        self._watch.works.discard(self)
        if ref is None:
            return
        try:
            ray.cancel(ref)
        except Exception as error:  # Ray was shut down, or it is no call's: nothing to cancel
            log.debug("a call of Ray was not cancelled: %s", error)


class _Watch:
    """The works of one loop that wait, and the look at whether they wait in vain."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.works: set[AsyncChannelWork[Any]] = set()
        self._loop = loop
        self._connection = connection()
        self._timer = loop.call_later(LOOK, self._look)

    @property
    def current(self) -> bool:
        """Whether the cluster of its works is that of this process."""
        return self._connection is not None and self._connection == connection()

    def _look(self) -> None:
        if self.works and self.current:
            self._timer = self._loop.call_later(LOOK, self._look)
        else:
            self.end()

    def end(self) -> None:
        """Fail what still waits."""
        self._timer.cancel()
        if _watches.get(self._loop) is self:
            del _watches[self._loop]
        works, self.works = self.works, set()
        for work in works:
            work._ref = None
            work._fail(shut_down("the outcome of a call is lost with it"))


def _watch(loop: asyncio.AbstractEventLoop) -> _Watch:
    watch = _watches.get(loop)
    if watch is None:
        for other in [*_watches]:  # of all threads
            if other.is_closed():
                _watches.pop(other, None)
        watch = _watches[loop] = _Watch(loop)
    return watch
