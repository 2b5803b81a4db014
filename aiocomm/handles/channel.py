"""The work of a call of Ray: an ``ObjectRef`` as a handle.

Ray calls back once the object is there, in a thread of its own, so however many works wait they
need none of theirs. Rejected: awaiting the reference (``ObjectRef.__await__`` leaves a future of
the loop behind that complains when the loop closes first), and ``ray.get`` in a thread for each.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..errors import MissingPackageError, UsageError
from .base import AsyncWork

try:
    import ray
except ImportError as _error:
    raise MissingPackageError(
        "AsyncChannelWork needs ray, which is not installed: pip install 'aiocomm[ray]'"
    ) from _error

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

log = logging.getLogger("aiocomm")


class AsyncChannelWork(AsyncWork[T]):
    """Completes with what a remote call returns.

    What the call raises arrives as an exception that is both ``ray.exceptions.RayTaskError`` and of
    the class that was raised; that its actor died, as ``ray.exceptions.RayActorError``.

    Args:
        ref: what ``actor.method.remote(...)`` returns.

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
        ref.future().add_done_callback(self._tell)  # holds this work until the call has ended

    def _tell(self, outcome: Future[T]) -> None:
        try:
            self._loop.call_soon_threadsafe(partial(self._settle, outcome))
        except RuntimeError:
            if not self._loop.is_closed():  # a loop that ended meanwhile is no fault
                raise

    def _settle(self, outcome: Future[T]) -> None:
        self._ref = None
        error = outcome.exception()
        if error is None:
            self._finish(outcome.result())
        else:
            self._fail(error)

    def _on_cancel(self) -> None:
        ref, self._ref = self._ref, None
        if ref is None:
            return
        try:
            ray.cancel(ref)
        except Exception as error:  # Ray was shut down, or it is no call's: nothing to cancel
            log.debug("a call of Ray was not cancelled: %s", error)
