"""Event loops: which one aiocomm starts, that none may be stopped, and tasks that several await."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from .errors import WouldBlockError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new uvloop loop, or asyncio's where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def has_uvloop() -> bool:
    """Whether uvloop can be imported."""
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def check_no_loop(instead: str) -> None:
    """Refuse a call that blocks on a thread that runs an event loop.

    Args:
        instead: what to do there, for the text.

    Raises:
        WouldBlockError: this is such a thread.
    """
    if asyncio._get_running_loop() is not None:
        raise WouldBlockError(f"this would stop the event loop of this thread: {instead}")


async def join(task: asyncio.Task[T], ended: Callable[[], Exception]) -> T:
    """The result of a task that others wait for as well.

    Args:
        task: which its owner may cancel.
        ended: makes the error for then: nobody has cancelled the one that waits here.

    Cancellation: the task goes on.
    """
    await asyncio.wait([task])
    if task.cancelled():
        raise ended()
    return task.result()
