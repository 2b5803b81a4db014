"""One end of a bulk route that both sides set up: how it opens, what it is told when it fails.

May not know what there is to set up, nor what a route moves. Setting up is a task of the end's own:
whoever waits in ``open`` may be cancelled, or be one of several, and a failure, from wherever it
comes, ends it by cancelling that task.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ..errors import AiocommError, RouteError

if TYPE_CHECKING:
    from collections.abc import Callable

SETUP_TIMEOUT = 300.0


class State(enum.Enum):
    """Of one end."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class RouteEnd(ABC):
    """One end of one direction of one group; used on its loop's thread only.

    Args:
        label: the same on both sides, unique on the link; the keys to publish begin with it.
        loop: the loop it belongs to.
        publish: hands a key and value to the peer's end (``deliver``), in order; on the loop.
        timeout: seconds for ``open``.

    Attributes:
        backend: what moves the bytes, as texts name it.
    """

    backend: ClassVar[str]

    def __init__(
        self,
        label: str,
        *,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        timeout: float,
    ) -> None:
        self.label = label
        self._loop = loop
        self._publish = publish
        self._timeout = timeout
        self._state = State.NEW
        self._error: AiocommError | None = None  # why it is closed
        self._opening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Set the route up; both sides must do so. A second call waits along.

        Raises:
            RouteError: it could not be set up, in time or at all, or the route was severed or
                closed; the reason is in the text and chained.
            DeviceError: the device failed.
            ProtocolError: the peer has published what cannot be.

        Cancellation: severs the route.
        """
        if self._state is State.NEW:
            self._state = State.OPENING
            self._opening = self._loop.create_task(self._open())
        try:
            async with asyncio.timeout(self._timeout):
                if self._opening is not None:
                    await asyncio.wait([self._opening])  # which is not cancelled with this call
        except TimeoutError as error:
            text = "the peer does not open its side or cannot be reached"
            self._fail(self._reason(f"was not set up in {self._timeout:g} s: {text}", error))
        except asyncio.CancelledError:
            self.sever()
            raise
        if self._state is not State.OPEN:
            raise self._refusal()

    async def _open(self) -> None:
        await asyncio.sleep(0)  # an eager task would begin before there is a task to be cancelled
        try:
            await self._set_up()
        except Exception as error:
            self._break("could not be set up", error)
        if self._state is State.OPENING:
            self._state = State.OPEN

    @abstractmethod
    async def _set_up(self) -> None:
        """Agree with the peer's end, and make what is needed.

        Raises:
            Exception: it does not work.

        Cancellation: the end has failed meanwhile.
        """

    def sever(self) -> None:
        """Drop everything: what is pending fails soon, whatever the peer does. Idempotent.

        Never blocks. A pending future fails when nothing touches its buffers any more, or a moment
        later.
        """
        self._fail(self._reason("was severed on this side"))

    def _reason(self, text: str, cause: BaseException | None = None) -> RouteError:
        reason = RouteError(f"the {self.backend} route {self.label!r} {text}")
        reason.__cause__ = cause
        return reason

    def _refusal(self) -> AiocommError:
        return self._reason("is not open") if self._error is None else self._error.again()

    def _break(self, what: str, error: BaseException) -> None:
        if not isinstance(error, AiocommError):  # that says it all
            error = self._reason(f"{what}: {first_line(error)}", error)
        self._fail(error)

    def _fail(self, reason: AiocommError) -> None:
        if self._state is State.CLOSED:
            return
        self._state, self._error = State.CLOSED, reason
        if self._opening is not None:
            self._opening.cancel()  # where it is not over
        self._drop()

    @abstractmethod
    def _drop(self) -> None:
        """The end has failed: fail what is pending, give back what is held."""


def first_line(error: BaseException) -> str:
    """What a backend says, without the C++ stack that torch adds."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
