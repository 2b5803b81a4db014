"""What both ends of a shared-memory route have in common: how they open, and how they end.

An end may end while its memory is being read or written; what is pending fails once it is not.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Protocol, TypeVar

from ...errors import ProtocolError, RouteError
from .copies import CopyQueue, OffLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..base import Link


class _Job(Protocol):
    done: asyncio.Future[None]


JobT = TypeVar("JobT", bound=_Job)


class ShmEnd(ABC, Generic[JobT]):
    """One end of one direction of one group.

    Args:
        label: the same on both sides; the keys to publish begin with it.
        link: carries the frames.
        loop: the loop of the runtime.
        publish: hands a key and value to the peer's end.
        off_loop: see ``Runtime.off_loop``.
    """

    name: Final = "shm"
    trails: Final = True  # it lies in memory that both have mapped
    waits_for: ClassVar[str]
    """The one key that the peer's end says while this one opens."""

    def __init__(
        self,
        label: str,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        *,
        publish: Callable[[str, bytes], None],
        off_loop: OffLoop,
    ) -> None:
        self._label = label
        self._link = link
        self._loop = loop
        self._publish = publish
        self._off_loop = off_loop
        self._said: asyncio.Future[bytes] = loop.create_future()
        self._copies = CopyQueue(off_loop)
        self._jobs: deque[JobT] = deque()  # with bytes left to move
        self._open: dict[JobT, None] = {}  # not done
        self._error: RouteError | None = None
        self._stopped: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._label!r} pending={len(self._open)}>"

    def deliver(self, key: str, value: bytes) -> None:
        """What the peer's end says while this one opens.

        Raises:
            ProtocolError: it is something else.
        """
        if key != f"{self._label}/{self.waits_for}":
            raise ProtocolError(f"the peer says {key!r}, which nobody can say to {self!r}")
        if not self._said.done():
            self._said.set_result(value)

    def _check_place(self) -> None:
        """Raises: RouteError: there is nothing to be opened here."""
        if not self._link.same_host:
            raise RouteError("the peer is on another host")
        if self._error is not None:
            raise self._refusal()

    def sever(self) -> None:
        """Fail what is pending, as soon as nothing of it is read or written any more. Idempotent.

        What was announced stays with the receiver, and what is lent with its tensors.
        """
        self._sever("the shared-memory route was severed")

    async def aclose(self) -> None:
        """Sever, and drop the memory.

        Cancellation: the route is severed; the memory goes with it.
        """
        self.sever()
        assert self._stopped is not None
        await asyncio.shield(self._stopped)

    def _sever(self, reason: str) -> None:
        if self._error is not None:
            return
        self._error = RouteError(reason)
        if not self._said.done():
            self._said.set_exception(self._error)
            self._said.exception()  # nobody may be waiting
        stopped = self._stopped = self._loop.create_future()
        self._copies.stop(lambda: self._fail_pending(stopped))

    def _fail_pending(self, stopped: asyncio.Future[None]) -> None:
        for job in self._open:
            if not job.done.done():
                job.done.set_exception(self._refusal())
        self._open.clear()
        self._jobs.clear()
        self._drop()
        if not stopped.done():
            stopped.set_result(None)

    @abstractmethod
    def _drop(self) -> None:
        """Give the memory up; nothing of it is read or written any more."""

    def _refusal(self) -> RouteError:
        # A new one each time: one exception would collect the tracebacks of all who raise it.
        assert self._error is not None
        return RouteError(self._error.message)
