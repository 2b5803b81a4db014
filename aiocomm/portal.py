"""How code without an event loop calls into one that runs in a thread of its own.

Knows works and threads, not what is called. Rejected: ``asyncio.run`` for each call (a runtime
lives in one loop).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from .loops import has_uvloop

if TYPE_CHECKING:
    from .handles import AsyncWork

T = TypeVar("T")


def loop_options() -> dict[str, Any]:
    """What anyio's portals are to be started with: uvloop, where it is installed."""
    return {"use_uvloop": has_uvloop()}


def finish(work: AsyncWork[T], async_op: bool, timeout: float | None = None) -> AsyncWork[T] | T:
    """The work itself, or what it comes to.

    Args:
        work: that was begun.
        async_op: whether the caller waits for it.
        timeout: seconds to wait here, and to take the work back then; None waits for ever.

    Raises:
        TimeoutError: not done in time; the text says that it was taken back.
        Exception: what the work failed with.
    """
    if async_op:
        return work
    try:
        return work.wait(timeout)
    except BaseException as error:  # an interrupt: what the peer sends next is for the next call
        late = None
        if isinstance(error, TimeoutError) and not work.done():
            late = TimeoutError(f"{work!r} took more than {timeout} s and is taken back")
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the work with it
            work._loop.call_soon_threadsafe(work._abandon)
        if late is not None:
            raise late from None
        raise
    finally:
        del work  # the traceback holds this frame; it shall not hold the work, and a buffer
