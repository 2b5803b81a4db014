"""How a blocking handle of a channel comes by the one that it stands for, and lets go of it.

All of a process live in one event loop in a thread of its own, which begins with the first and ends
with the last. What nobody let go of is let go of when the process ends, so that what was put has
left by then, if there is room soon. The loop's own thread calls in here too, from functions of
``then``: what it reaches takes no lock that is held while somebody waits for the loop. May not know
what is called; ``blocking.py`` does.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from anyio.from_thread import BlockingPortalProvider

from ..comm import CLOSE_GRACE
from ..errors import WrongLoopError
from ..loops import check_no_loop
from ..options import Options
from ..portal import loop_options
from .checks import left

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from anyio.from_thread import BlockingPortal

    from .handle import Channel

log = logging.getLogger("aiocomm")

INSTEAD = "use aiocomm.channel.Channel and await"


class ThreadedHandle:
    """A handle in the loop of all blocking ones, made when it is first asked for.

    Args:
        name: of the channel, for texts.
        make: creates or connects it.
    """

    def __init__(self, name: str, make: Callable[[], Coroutine[Any, Any, Channel]]) -> None:
        self._name = name
        self._make = make
        self._lock = threading.Lock()  # while it is made, and while it is let go of
        self._channel: Channel | None = None
        self._making: Future[Channel] | None = None
        self._portal: BlockingPortal
        self._stack: contextlib.ExitStack
        self._process = 0  # in which it is made
        self._left = False

    def __repr__(self) -> str:
        if self._channel is None:
            return f"<Channel {self._name!r}: not connected>"
        return repr(self._channel)

    def check(self) -> None:
        """Whether it can be used.

        Raises:
            WrongLoopError: this is a forked process.
            ClosedError: it was let go of.
        """
        if self._is_forked():
            raise WrongLoopError(
                f"the handle of channel {self._name!r} belongs to the process that this one was "
                "forked from: connect here"
            )
        if self._left:
            raise left(self._name)

    def get(self, timeout: float | None = None) -> Channel:
        """The handle; the first call makes it, others wait until it is there.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: not there in time.
            WouldBlockError: it is not there, and this thread runs an event loop.
            WrongLoopError, ClosedError: as ``check``.
            AiocommError: what making it raised.
        """
        self.check()
        if (channel := self._channel) is not None:
            return channel
        check_no_loop(INSTEAD)  # before the lock: see above
        if not self._lock.acquire(timeout=_limit(timeout)):
            raise self._late(timeout)
        try:
            self.check()
            return self._channel or self._open(timeout)
        finally:
            self._lock.release()

    def leave(self, timeout: float | None = None) -> None:
        """Let go of it: what was put is in the channel then. Idempotent.

        Args:
            timeout: seconds to wait; None waits as long as there is no room.

        Raises:
            TimeoutError: the rest of what was put is dropped.
        """
        self._left = True  # calls are refused from here on, they do not wait for the rest
        if self._is_forked():  # the thread was never forked, and the lock perhaps while held
            return
        if (making := self._making) is not None:
            making.cancel()
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is None:
                return
            atexit.unregister(self._end)
            with self._stack:
                try:
                    leaving = self._portal.start_task_soon(channel.aclose)
                except RuntimeError:  # the loop has ended, and the channel's end here with it
                    return
                try:
                    leaving.result(timeout)
                except BaseException:
                    leaving.cancel()  # or whoever leaves last would wait for it
                    raise

    # --- inside ---

    def _open(self, timeout: float | None) -> Channel:
        self._process = os.getpid()
        try:
            with contextlib.ExitStack() as stack:
                self._making = self._start(stack)
                made = self._channel = self._made(self._making, timeout)
                self._stack = stack.pop_all()
        except BaseException:
            self._process = 0
            raise
        finally:
            self._making = None
        atexit.register(self._end)
        return made

    def _start(self, stack: contextlib.ExitStack) -> Future[Channel]:
        self._portal = stack.enter_context(_portals())
        try:
            return self._portal.start_task_soon(self._make)
        except RuntimeError:  # a function of ``then`` has ended the loop, with SystemExit say
            _portals.cache_clear()
            self._portal = stack.enter_context(_portals())
            return self._portal.start_task_soon(self._make)

    def _made(self, making: Future[Channel], timeout: float | None) -> Channel:
        if self._left:  # while it began
            making.cancel()
        try:
            return making.result(_limit(timeout))
        except concurrent.futures.CancelledError:
            raise left(self._name) from None
        except TimeoutError:
            if making.cancel():
                raise self._late(timeout) from None
            return making.result()
        except BaseException:
            making.cancel()  # where it was an interrupt
            raise

    def _end(self) -> None:
        """Let go of it at the end of the process, which nobody may hold up for ever."""
        try:
            self.leave(max(CLOSE_GRACE, _last_moment() - time.monotonic()))
        except TimeoutError:
            log.warning("channel %r: what was put is dropped, it finds no room", self._name)

    def _is_forked(self) -> bool:
        return self._process not in (0, os.getpid())

    def _late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"channel {self._name!r}: not connected within {timeout} s")


def _limit(timeout: float | None) -> float:
    return min(threading.TIMEOUT_MAX, threading.TIMEOUT_MAX if timeout is None else timeout)


@functools.cache
def _last_moment() -> float:
    """Of the process, which ends; counted from the first handle that it lets go of."""
    return time.monotonic() + Options().close_timeout


@functools.cache
def _portals() -> BlockingPortalProvider:
    """Of this process: a forked one has no thread of its parent's."""
    return BlockingPortalProvider(backend_options=loop_options())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_portals.cache_clear)
