"""Native completions as asyncio futures: the only place that turns a ``dist.Work`` into one.

The backend's own thread calls back when the work is over, and the result is posted to the loop: no
thread waits, and the work makes progress though nobody awaits it. Knows nothing of who awaits.
Rejected: ``work.wait()`` in an executor (a thread for each operation), and polling
``work.is_completed()`` (Gloo's never becomes true unless somebody waits).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    import asyncio

    import torch
    import torch.distributed as dist


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
        error: BaseException | None = None
        try:
            native.value()
        except Exception as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(_settle, future, error)
        except RuntimeError:
            if not loop.is_closed():
                raise

    try:
        native = work.get_future()
    except RuntimeError as error:
        raise UsageError(
            f"{type(work).__name__} has no future, so nothing announces its end: use a collective "
            "(a broadcast in a group of two instead of isend and irecv)"
        ) from error
    native.add_done_callback(ended)
    return future


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
