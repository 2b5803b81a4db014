"""A future of threads made awaitable in whichever event loop asks, and threads for such futures.

It may not know what is awaited. ``asyncio.wrap_future`` was rejected: it logs an error when the
loop closes while the answer is on its way, and the exception of an answer that nobody waits for any
more.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def bridge(source: Future[T]) -> asyncio.Future[T]:
    """A future of the running loop that ends as the given one does, on whatever thread that is.

    Cancelling the result leaves ``source`` alone.
    """
    loop = asyncio.get_running_loop()
    target: asyncio.Future[T] = loop.create_future()

    def settle() -> None:
        if target.done():  # cancelled meanwhile (F37)
            return
        if source.cancelled():
            target.cancel()
            return
        error = source.exception()
        if error is None:
            target.set_result(source.result())
        else:
            target.set_exception(error)
            target.exception()  # who awaits gets it; a cancelled awaiter is not to be logged

    def tell(_: Future[T]) -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            if not loop.is_closed():  # a loop that ended while it waited is no fault (F38)
                raise

    source.add_done_callback(tell)
    return target


def start_thread(call: Callable[[], T], name: str = "aiocomm-blocking") -> Future[T]:
    """Call in a new thread: for what blocks for long and seldom happens.

    The loop's default executor was rejected, because users fill it.
    """
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    # A daemon: what hangs must not hold the interpreter at its end.
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def in_thread(call: Callable[[], T]) -> T:
    """Await a call in a new thread.

    Cancellation: the call goes on, and its result is dropped.
    """
    return await bridge(start_thread(call))


async def in_thread_or_undo(call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Await a call in a new thread.

    Cancellation: the call goes on; its result is given to ``undo``, in a thread.
    """
    result = start_thread(call)
    try:
        return await bridge(result)
    except asyncio.CancelledError:
        start_thread(lambda: undo(result.result()))
        raise
