"""What boards have in common whose calls are made by threads of their own.

Counts users, turns the futures of a session into awaitables of whichever loop asks, and translates
time-outs. It may not know by what a board is carried: a session does the work, one for each time
that the board is opened. Rejected: the loop's default executor, which users fill.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from ..errors import (
    ClosedError,
    RendezvousTimeout,
    UsageError,
    WouldBlockError,
    WrongLoopError,
)
from .base import Store, check_key, check_timeout, check_value
from .bridge import bridge

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

T = TypeVar("T")

GRACE = 1.0
"""Seconds that opening may take past its time-out: a server that accepts and hangs makes it so."""

CLOSE_TIMEOUT = 2.0
"""Seconds that closing waits for the threads, severs their connections, and waits once more."""


class Located(Protocol):
    """What opening a session finds out."""

    @property
    def local_host(self) -> str:
        """Numeric address of this process as seen from the board."""


P = TypeVar("P", bound=Located)


class BoardSession(Protocol[P]):
    """The connected life of a board. Its calls come from any thread and never wait.

    Every future is settled in the end, also when the board breaks or is closed.
    """

    @property
    def opened(self) -> Future[P]:
        """Completes when the board is connected."""

    @property
    def ended(self) -> Future[None]:
        """Completes when the threads are done with the board."""

    def write(self, key: str, value: bytes) -> Future[None]:
        """Write; the future completes when the board has it."""

    def delete(self, key: str) -> Future[bool]:
        """Delete; the future says whether the key existed."""

    def look(self, key: str) -> Future[bytes | None]:
        """Read without waiting; None if there is no such key."""

    def get(self, key: str) -> Future[bytes]:
        """Read, waiting for the key; give it back with ``forget`` however it ends."""

    def forget(self, key: str, future: Future[bytes]) -> None:
        """Nobody waits for this future any more."""

    def close(self) -> None:
        """Begin to end. Idempotent."""

    def join(self) -> None:
        """After ``ended``: see the last microseconds of the threads out."""

    def overdue(self, last: bool) -> None:
        """Closing takes too long: force what hangs, or at last leave the threads behind."""

    def sever(self) -> None:
        """Make calls that hang fail now."""


class ThreadedBoard(Store, Generic[P]):
    """A board whose sessions have threads; also usable without an event loop, by ``with``.

    Args:
        timeout: seconds to wait for the board when opening, and for the answer to a write.

    Raises:
        UsageError: the time-out is not usable.
    """

    def __init__(self, timeout: float) -> None:
        check_timeout(timeout)
        if not 0 < timeout < math.inf:
            raise UsageError(f"board time-out {timeout!r} is not usable: give finite seconds > 0")
        self._timeout = float(timeout)
        self._lock = threading.Lock()
        self._users = 0
        self._session: BoardSession[P] | None = None
        self._place: P | None = None
        self._ending: Future[None] | None = None
        self._pid: int | None = None

    @abstractmethod
    def _start(self, after: Future[None] | None) -> BoardSession[P]:
        """A new session, which may begin when ``after``, the end of an earlier one, is complete."""

    @abstractmethod
    def _unanswered(self) -> str:
        """Why opening may have taken longer than the session's own time-out."""

    @property
    def host(self) -> str:
        """Numeric address by which the other workers of this board reach this process."""
        return self._opened_place().local_host

    async def aopen(self) -> None:
        """See `Store.aopen`."""
        session = self._acquire()
        try:
            try:
                async with asyncio.timeout(self._timeout + GRACE) as scope:
                    self._place = await bridge(session.opened)
            except TimeoutError as error:
                if scope.expired():
                    raise RendezvousTimeout(self._unanswered()) from error
                raise
        except BaseException:
            await self._release(session)
            raise

    async def aclose(self) -> None:
        """See `Store.aclose`. Bounded by about 4 s even if the server hangs."""
        if self._session is not None:
            self._check_process()
            await self._release(self._session)

    def open(self) -> None:
        """Like `aopen`, for code without an event loop; blocks until the board is connected.

        Raises:
            WouldBlockError: called on the thread of a running event loop.
        """
        self._check_no_loop("aopen")
        session = self._acquire()
        try:
            try:
                self._place = session.opened.result(self._timeout + GRACE)
            except TimeoutError as error:
                if session.opened.done():
                    raise
                raise RendezvousTimeout(self._unanswered()) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Like `aclose`, for code without an event loop; blocks until the threads have ended.

        Raises:
            WouldBlockError: called on the thread of a running event loop.
        """
        self._check_no_loop("aclose")
        session = self._session
        if session is not None:
            self._check_process()
            if self._give_up(session):
                for last in (False, True):
                    try:
                        session.ended.result(CLOSE_TIMEOUT)
                        session.join()
                        return
                    except TimeoutError:
                        session.overdue(last)

    async def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        check_key(key)
        check_timeout(timeout)
        session = self._opened_session()
        if timeout == 0:
            found = await self._answer(session.look(key), f"looking at {key!r}")
            if found is None:
                raise RendezvousTimeout(f"board key {key!r} is not there (time-out 0 s) at {self}")
            return found
        future = session.get(key)
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout) as scope:
                return await bridge(future)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RendezvousTimeout(
                f"waited {timeout:g} s in vain for board key {key!r} at {self}"
            ) from error
        finally:
            session.forget(key, future)

    async def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        check_key(key)
        check_value(key, value)
        await self._answer(self._opened_session().write(key, value), f"writing {key!r}")

    async def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        check_key(key)
        return await self._answer(self._opened_session().delete(key), f"deleting {key!r}")

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _acquire(self) -> BoardSession[P]:
        with self._lock:
            self._check_process()
            if self._session is None:
                self._session = self._start(self._ending)
                self._pid = os.getpid()
            self._users += 1
            return self._session

    def _give_up(self, session: BoardSession[P]) -> bool:
        """Count one user less; True if that was the last one and the session is to end now."""
        with self._lock:
            if session is not self._session:
                return False
            self._users -= 1
            if self._users:
                return False
            self._session = self._place = None
            self._ending = session.ended
        session.close()
        return True

    async def _release(self, session: BoardSession[P]) -> None:
        if not self._give_up(session):
            return
        try:
            for last in (False, True):
                ended = bridge(session.ended)
                await asyncio.wait([ended], timeout=CLOSE_TIMEOUT)
                if ended.done():
                    session.join()
                    return
                ended.cancel()
                session.overdue(last)
        except asyncio.CancelledError:
            session.sever()  # nobody is left to do it later
            raise

    async def _answer(self, future: Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout) as scope:
                return await bridge(future)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RendezvousTimeout(
                f"{what} was not answered within {self._timeout:g} s by {self}"
            ) from error
        finally:
            future.cancel()  # not begun: never mind

    def _opened_session(self) -> BoardSession[P]:
        self._check_process()
        session = self._session
        if session is not None and self._place is not None:
            return session
        if self._ending is not None:
            raise ClosedError(f"{self} was closed on this side")
        raise UsageError(f"{self} is not open: use it inside 'async with board', or aopen() it")

    def _opened_place(self) -> P:
        self._opened_session()
        place = self._place
        if place is None:
            raise ClosedError(f"{self} was closed on this side")
        return place

    def _check_process(self) -> None:
        if self._session is not None and self._pid != os.getpid():
            raise WrongLoopError(
                f"{self} was opened by process {self._pid}, of which this one is a fork: "
                "make a board of its own in the child"
            )

    def _check_no_loop(self, instead: str) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise WouldBlockError(f"this thread runs an event loop: await {self}.{instead}() instead")
