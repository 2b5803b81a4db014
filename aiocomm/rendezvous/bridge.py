"""A future of threads made awaitable in whichever event loop asks.

It may not know what is awaited. ``asyncio.wrap_future`` was rejected: it logs an error when the
loop closes while the answer is on its way, and the exception of an answer that nobody waits for any
more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

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
