"""What both ends of a cuda_ipc route have in common: how they meet, open, break and close.

Knows neither memory nor messages. See ``send.py`` and ``receive.py`` for the two ends.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from ...device import here
from ...errors import AiocommError, RouteError
from ..completion import poller_of
from ..device_meeting import Meeting
from ..gloo_pair import first_line

if TYPE_CHECKING:
    from collections.abc import Callable

SETUP_TIMEOUT = 300.0


class State(enum.Enum):
    """Of one end."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class CudaIpcEnd(ABC):
    """One end of one direction of one group; used on its loop's thread only.

    Args:
        label: the same on both sides, unique on the link; the keys to publish begin with it.
        loop: the loop it belongs to.
        publish: hands a key and value to the peer's end (``deliver``), in order.
        index: the device of this side.
        timeout: seconds for ``open``.
    """

    name: Final = "cuda_ipc"
    survives: Final = False

    def __init__(
        self,
        label: str,
        *,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        index: int,
        timeout: float = SETUP_TIMEOUT,
    ) -> None:
        self.label = label
        self.index = index
        self._loop = loop
        self._publish = publish
        self._timeout = timeout
        self._device = here.accelerator
        self._poller = poller_of(loop)
        self._stream = self._device.stream(index)
        self._state = State.NEW
        self._opening: asyncio.Task[None] | None = None
        self._error: AiocommError | None = None  # why it is closed
        self._meeting = Meeting(loop, label, publish)
        self._offer_key, self._done_key = f"{label}/offer", f"{label}/done"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label!r} {self._state.value} pending={self.pending}>"

    @property
    @abstractmethod
    def pending(self) -> int:
        """Messages that are not done."""

    # Opening

    async def open(self) -> None:
        """See whether both sides are on one chip and can reach each other's memory there.

        Raises:
            RouteError: they are not, or cannot, or the route was severed; the reason is in the text
                and chained.
            DeviceError: the device failed.

        Cancellation: severs the route.
        """
        if self._state is not State.NEW:
            raise self._refusal()
        self._state = State.OPENING
        self._opening = self._loop.create_task(self._meet_and_set_up())
        try:
            async with asyncio.timeout(self._timeout):
                await self._opening
        except TimeoutError as error:
            text = f"was not set up in {self._timeout:g} s: the peer does not open its side"
            self._fail(RouteError(f"the cuda_ipc route {self.label!r} {text}"))
            raise self._refusal() from error
        except asyncio.CancelledError:
            if self._error is not None:  # severed meanwhile
                raise self._refusal() from None
            self.sever()
            raise
        except (AiocommError, RuntimeError) as error:
            self._break("cannot be set up", error)
            raise self._refusal() from error
        if self._error is not None:  # severed in this very turn
            raise self._refusal()
        self._state = State.OPEN

    async def _meet_and_set_up(self) -> None:
        own = self._device.identity(self.index)
        peer = await self._meeting.meet(own)
        if peer.uuid != own.uuid:
            raise RouteError(f"the two sides are on different GPUs ({own.uuid} and {peer.uuid})")
        await self._set_up()

    @abstractmethod
    async def _set_up(self) -> None:
        """Exchange what the peer needs, and try it.

        Raises:
            AiocommError, RuntimeError: it does not work.
        """

    def deliver(self, key: str, value: bytes) -> None:
        """Take in what the peer's end has published; before ``open`` too.

        Raises:
            ProtocolError: this end does not expect that.
        """
        if key == self._meeting.key:
            self._meeting.deliver(value)
        else:
            self._heard(key, value)

    @abstractmethod
    def _heard(self, key: str, value: bytes) -> None:
        """Anything else that the peer's end has published."""

    # Ending

    def sever(self) -> None:
        """Drop everything: what is pending fails soon, whatever the peer does. Idempotent."""
        self._fail(RouteError(f"the cuda_ipc route {self.label!r} was severed on this side"))

    def _refusal(self) -> AiocommError:
        if self._error is None:
            return RouteError(f"the cuda_ipc route {self.label!r} is not open")
        return self._error.again()

    def _break(self, what: str, error: BaseException) -> None:
        if isinstance(error, AiocommError):
            self._fail(error)
            return
        reason = RouteError(f"the cuda_ipc route {self.label!r} {what}: {first_line(error)}")
        reason.__cause__ = error
        self._fail(reason)

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
