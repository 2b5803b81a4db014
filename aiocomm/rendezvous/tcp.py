"""The embedded board: ``torch.distributed.TCPStore``, made safe for event loops.

``TCPBoard(host, port)`` is the same expression in every process and nobody is told to be the
master: who can bind the address serves, the others are its clients. This file counts users and
turns futures of the board's threads into awaitables of whichever loop asks; it may not know torch,
sockets or how the waiting is done (``connect``, ``session``). Rejected: a pure Python client of
torch's wire protocol, which is private to torch, and the loop's default executor, which users fill.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import threading
from typing import TYPE_CHECKING, Self, TypeVar

from ..errors import (
    ClosedError,
    RendezvousError,
    RendezvousTimeout,
    UsageError,
    WouldBlockError,
    WrongLoopError,
)
from .base import Store, check_key, check_timeout, check_value
from .bridge import bridge
from .connect import Place, Site
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future
    from types import TracebackType

T = TypeVar("T")

GRACE = 1.0
"""Seconds that opening may take past its time-out: a server that accepts and hangs makes it so."""

CLOSE_TIMEOUT = 2.0
"""Seconds that closing waits for the threads, severs their connections, and waits once more."""


class TCPBoard(Store):
    """A board on a TCP port, served by the first process that comes.

    Nothing happens at construction; opening is counted, and the same board may be shared by several
    event loops and threads of one process. When the process that serves it ends or closes it, the
    board is gone for all: let the one that lives longest serve. A board can be pickled (its address
    travels, not its connection).

    Args:
        host: address or name of the serving host, by which the others reach it; exactly this
            address is bound, never all interfaces.
        port: TCP port; 0 takes a free one and needs ``serve=True`` (``port`` tells which).
        serve: True must serve, False may not, None serves if it is the first that can.
        timeout: seconds to wait for a server when opening, and for the answer to a write.

    Raises:
        UsageError: an argument is not usable.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 29500,
        *,
        serve: bool | None = None,
        timeout: float = 300.0,
    ) -> None:
        _check_host(host)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise UsageError(f"board port {port!r} is not usable: give an integer in 0..65535")
        if serve not in (True, False, None):
            raise UsageError(f"serve={serve!r} is not usable: give True, False or None")
        if port == 0 and serve is not True:
            raise UsageError("board port 0 needs serve=True: clients must know the port")
        check_timeout(timeout)
        if not 0 < timeout < math.inf:
            raise UsageError(f"board time-out {timeout!r} is not usable: give finite seconds > 0")
        self._site = Site(host, port, serve, shared=False, timeout=float(timeout))
        self._lock = threading.Lock()
        self._users = 0
        self._session: Session | None = None
        self._place: Place | None = None
        self._ending: Future[None] | None = None
        self._pid: int | None = None

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, timeout: float = 300.0
    ) -> TCPBoard:
        """The board at ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

        A process with ``RANK`` 0 or none may serve it. A torch store that sits on the port already
        (of torchrun's agent, or of ``init_process_group`` in this process) is used instead, under
        keys that begin with ``aiocomm/``; and an ``init_process_group`` that comes later in the
        serving process finds the port shared, not taken.

        Args:
            environ: variables to read, by default those of the process.
            timeout: seconds, as for the class.

        Raises:
            UsageError: a variable is missing or not usable.
        """
        variables = os.environ if environ is None else environ
        host = variables.get("MASTER_ADDR", "")
        if not host:
            raise UsageError("MASTER_ADDR is not set: set it and MASTER_PORT, or give a TCPBoard")
        port = _number(variables, "MASTER_PORT")
        may_serve = variables.get("RANK") is None or _number(variables, "RANK") == 0
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            may_serve = False  # torchrun's agent serves there
        board = cls(host, port, serve=None if may_serve else False, timeout=timeout)
        board._site = Site(host, port, board._site.serve, shared=True, timeout=float(timeout))
        return board

    @property
    def host(self) -> str:
        """Numeric address by which the other workers of this board reach this process."""
        return self._opened_place().local_host

    @property
    def port(self) -> int:
        """The board's port; the chosen one if 0 was asked for and the board is open."""
        place = self._place
        return self._site.port if place is None else place.port

    @property
    def serving(self) -> bool:
        """Whether this process serves the board; False while it is not open."""
        place = self._place
        return place is not None and place.serving

    async def aopen(self) -> None:
        """See `Store.aopen`."""
        session = self._acquire()
        try:
            try:
                async with asyncio.timeout(self._site.timeout + GRACE) as scope:
                    self._place = await bridge(session.opened)
            except TimeoutError as error:
                if scope.expired():
                    raise self._unanswered() from error
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
                self._place = session.opened.result(self._site.timeout + GRACE)
            except TimeoutError as error:
                if session.opened.done():
                    raise
                raise self._unanswered() from error
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

    def __reduce__(self) -> tuple[object, ...]:
        place = self._place
        serve = False if place is not None else self._site.serve
        site = Site(self._site.host, self.port, serve, self._site.shared, self._site.timeout)
        return (_rebuild, (site,))

    def __repr__(self) -> str:
        if self._place is None:
            state = "closed" if self._session is None else "opening"
        else:
            state = "serving" if self._place.serving else "client"
        return f"<TCPBoard {self._site.host}:{self.port} {state}>"

    def _acquire(self) -> Session:
        with self._lock:
            self._check_process()
            if self._session is None:
                self._session = Session(self._site, self._ending)
                self._pid = os.getpid()
            self._users += 1
            return self._session

    def _give_up(self, session: Session) -> bool:
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

    async def _release(self, session: Session) -> None:
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
            async with asyncio.timeout(self._site.timeout) as scope:
                return await bridge(future)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RendezvousTimeout(
                f"{what} was not answered within {self._site.timeout:g} s by {self}"
            ) from error
        finally:
            future.cancel()  # not begun: never mind

    def _opened_session(self) -> Session:
        self._check_process()
        session = self._session
        if session is not None and self._place is not None:
            return session
        if self._ending is not None:
            raise ClosedError(f"{self} was closed on this side")
        raise UsageError(f"{self} is not open: use it inside 'async with board', or aopen() it")

    def _opened_place(self) -> Place:
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

    def _unanswered(self) -> RendezvousError:
        return RendezvousTimeout(
            f"what listens at {self._site} accepts connections but did not answer within "
            f"{self._site.timeout:g} s: it hangs, or is no board"
        )


def _rebuild(site: Site) -> TCPBoard:
    board = TCPBoard(site.host, site.port, serve=site.serve, timeout=site.timeout)
    board._site = site
    return board


def _check_host(host: str) -> None:
    if not isinstance(host, str) or not host or host != host.strip():
        raise UsageError(f"board host {host!r} is not usable: give an address or a name")
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return  # a name
    if wildcard:
        raise UsageError(f"board host {host!r} is no address: give the one that others dial")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None or not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name}={text!r} in the environment is not a number >= 0")
    return int(text)
