"""One opened Ray board: a thread with an event loop of its own, on which its client lives.

Looking an actor up and making one are blocking calls of Ray, which must not stop the loops of
users, and awaiting many calls of the actor needs no more than one thread. This file begins and ends
that thread and speaks in ``concurrent.futures``; it may not know Ray, nor users' loops.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import AiocommError, ClosedError, RendezvousError
from .bridge import bridge
from .ray_client import LEAVE_TIMEOUT, RayClient

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from .ray_client import RayPlace, RaySite

T = TypeVar("T")
logger = logging.getLogger(__name__)

PREDECESSOR_TIMEOUT = 10.0
"""Seconds to wait for an earlier session of this board to end."""

JOIN_TIMEOUT = 1.0
"""Seconds that the thread gets to end after its last word."""


class RaySession:
    """The connected life of a board (``threaded.BoardSession``).

    Args:
        site: which actor.
        after: end of an earlier session of this board.
    """

    def __init__(self, site: RaySite, after: Future[None] | None) -> None:
        self.site = site
        self.opened: Future[RayPlace] = Future()
        self.ended: Future[None] = Future()
        self._after = after
        self._lock = threading.Lock()
        self._closing = False
        self._reason: str | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._client = RayClient(site, self._loop, self._refusal)
        # A daemon: a cluster that hangs must not hold the interpreter at its end.
        self._thread = threading.Thread(target=self._run, name="aiocomm-ray-board", daemon=True)
        _sessions.add(self)
        self._thread.start()

    # From any thread

    def write(self, key: str, value: bytes) -> Future[None]:
        """See ``BoardSession``."""
        return self._submit(lambda: self._client.write(key, value))

    def delete(self, key: str) -> Future[bool]:
        """See ``BoardSession``."""
        return self._submit(lambda: self._client.delete(key))

    def look(self, key: str) -> Future[bytes | None]:
        """See ``BoardSession``."""
        return self._submit(lambda: self._client.look(key))

    def get(self, key: str) -> Future[bytes]:
        """See ``BoardSession``."""
        return self._submit(lambda: self._client.get(key))

    def forget(self, key: str, future: Future[bytes]) -> None:
        """See ``BoardSession``."""
        future.cancel()  # which ends the coroutine, and that one tidies up

    def close(self) -> None:
        """See ``BoardSession``."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._stop.set)

    def sever(self) -> None:
        """See ``BoardSession``: calls of Ray end by themselves, or not at all."""

    def join(self) -> None:
        """See ``BoardSession``."""
        self._thread.join(JOIN_TIMEOUT)

    def overdue(self, last: bool) -> None:
        """See ``BoardSession``."""
        if last:
            logger.warning("Ray hangs: a thread of the board %s is left behind", self.site)

    def _submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:  # so that the thread's end cannot come in between
            if self._closing or self._reason is not None:
                raise self._refusal()
            return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def _refusal(self) -> AiocommError:
        if self._closing:
            return ClosedError(f"the board {self.site} was closed on this side")
        return RendezvousError(f"the board {self.site} is gone: {self._reason}")

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
            if not self.opened.done():
                self.opened.set_exception(self._refusal())
            self.ended.set_result(None)

    async def _main(self) -> None:
        stop = self._loop.create_task(self._stop.wait())
        living = self._loop.create_task(self._live())
        await asyncio.wait({stop, living}, return_when=asyncio.FIRST_COMPLETED)
        if living.done() and (error := living.exception()) is not None:
            self._break(error)
            del error  # its frames hold the client
        await stop  # refuse until closed
        living.cancel()
        self._client.fail()
        await asyncio.sleep(0)  # what came in just before is a task now
        await asyncio.gather(
            *asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True
        )
        await self._client.leave()

    async def _live(self) -> None:
        if self._after is not None:
            await asyncio.wait([bridge(self._after)], timeout=PREDECESSOR_TIMEOUT)
            self._after = None
        await self._client.live(self.opened)

    def _break(self, error: BaseException) -> None:
        """There is no board any more: every pending and coming call fails."""
        known = isinstance(error, AiocommError)
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, AiocommError):
            text = error.message
        with self._lock:
            self._reason = text
        if not known:
            logger.error("the board %s broke", self.site, exc_info=error)
        if not self.opened.done():
            self.opened.set_exception(error if known else RendezvousError(text))
        self._client.fail()


_sessions: weakref.WeakSet[RaySession] = weakref.WeakSet()


def _at_exit() -> None:
    """End what was never closed, while Ray still runs."""
    left = [session for session in _sessions if not session.ended.done()]
    for session in left:
        session.close()
    wait([session.ended for session in left], timeout=2 * LEAVE_TIMEOUT)


# The sessions of the parent are not a forked child's to end.
os.register_at_fork(after_in_child=_sessions.clear)
atexit.register(_at_exit)
