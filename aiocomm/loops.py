"""Event loops: which one aiocomm starts where it starts one, and that none may be stopped."""

from __future__ import annotations

import asyncio

from .errors import WouldBlockError


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
