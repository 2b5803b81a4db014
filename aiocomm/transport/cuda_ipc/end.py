"""What both ends of a cuda_ipc route have in common: how they meet, and hear each other.

Knows neither memory nor messages. See ``send.py`` and ``receive.py`` for the two ends.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from ...device import here
from ...errors import RouteError
from ..completion import poller_of
from ..device_meeting import Meeting
from ..route_end import SETUP_TIMEOUT, RouteEnd

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class CudaIpcEnd(RouteEnd):
    """One end of one direction of one group; see ``RouteEnd``, also for its other arguments.

    Args:
        index: the device of this side.
    """

    name: Final = "cuda_ipc"
    survives: Final = False
    trails: Final = False  # a send is done when all of it was copied
    backend = "cuda_ipc"

    def __init__(
        self,
        label: str,
        *,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        index: int,
        timeout: float = SETUP_TIMEOUT,
    ) -> None:
        super().__init__(label, loop=loop, publish=publish, timeout=timeout)
        self.index = index
        self._device = here.accelerator
        self._poller = poller_of(loop)
        self._stream = self._device.stream(index)
        self._meeting = Meeting(loop, label, publish)
        self._offer_key, self._done_key = f"{label}/offer", f"{label}/done"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label!r} {self._state.value} pending={self.pending}>"

    @property
    @abstractmethod
    def pending(self) -> int:
        """Messages that are not done."""

    async def _set_up(self) -> None:
        """See whether both sides are on one chip and can reach each other's memory there."""
        own = self._device.identity(self.index)
        peer = await self._meeting.meet(own)
        if peer.uuid != own.uuid:
            raise RouteError(f"the two sides are on different GPUs ({own.uuid} and {peer.uuid})")
        await self._exchange()

    @abstractmethod
    async def _exchange(self) -> None:
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
