"""How code without an event loop calls into one that runs in a thread of its own.

Knows works and threads, not what is called. Rejected: ``asyncio.run`` for each call (a runtime
lives in one loop).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UsageError
from .handles import AsyncWork
from .loops import check_no_loop, has_uvloop
from .rendezvous.base import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def loop_options() -> dict[str, Any]:
    """What anyio's portals are to be started with: uvloop, where it is installed."""
    return {"use_uvloop": has_uvloop()}


def perform(
    begin: Callable[[], AsyncWork[T]],
    async_op: bool,
    timeout: float | None = None,
    *,
    instead: str,
) -> AsyncWork[T] | T:
    """Begin an operation, and wait for it unless the caller does.

    Args:
        begin: gives its work.
        async_op: whether to return the work itself.
        timeout: seconds to wait here, from the call on. Then it is taken back; where it is too late
            for that, the rest of it is waited for. None waits for ever.
        instead: what to do on a thread that runs an event loop, for the text.

    Raises:
        TimeoutError: not done in time, and taken back.
        WouldBlockError: this thread runs an event loop.
        UsageError: ``timeout`` is no time-out, or there is nobody to wait.
        Exception: what beginning it raised, or what it failed with.
    """
    if timeout is not None:
        check_timeout(timeout)
        if async_op:
            raise UsageError("timeout= is for calls that block: give it to wait() of the work")
    if async_op:
        return begin()
    check_no_loop(instead)
    began = time.monotonic()
    work = begin()
    try:
        return _wait(work, timeout, began)
    except BaseException:  # an interrupt: what the peer sends next is for the next call
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the work with it
            work._loop.call_soon_threadsafe(work._abandon)
        raise
    finally:
        del work  # the traceback holds this frame; it shall not hold the work, and a buffer


def _wait(work: AsyncWork[T], timeout: float | None, began: float) -> T:
    left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
    try:
        return work.wait(left)
    except TimeoutError:
        what = work._whereabouts or repr(work)
        if _taken_back(work):
            raise TimeoutError(
                f"{what}: not done within {timeout} s, and taken back; it can be called again"
            ) from None
        return work.wait()
    finally:
        del work  # as above


def _taken_back(work: AsyncWork[Any]) -> bool:
    verdict: AsyncWork[bool] = AsyncWork(loop=work._loop)
    work._post(lambda: verdict._finish(work._withdraw()))
    return verdict.wait()
