"""How a message in memory of a device leaves: small ones by way of the host, large ones by a route
for such memory, or, where none can be set up, by way of the host too.

The device's half of ``SendLane``, which keeps the order. Knows neither links nor envelopes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..errors import RouteError
from ..payload import Kind
from .ferry import Ferry
from .movers import STAGED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from ..device.base import Event
    from ..errors import Context
    from ..payload import OnDevice, Packed
    from ..runtime import Runtime
    from ..transport.device_base import DeviceSendingRoute
    from .works import SendWork

log = logging.getLogger("aiocomm")


class DeviceSending:
    """What a sending lane does with messages in memory of a device.

    Args:
        runtime: the loop and the options.
        open_route: gives the bulk route for memory of the device of that index.
        context: ``group`` and ``peer`` for the warning.
    """

    def __init__(
        self,
        runtime: Runtime,
        open_route: Callable[[int], Awaitable[DeviceSendingRoute]],
        context: Context,
    ) -> None:
        self.ferry = Ferry(runtime)
        self._open_route = open_route
        self._context = context
        self._pinned = runtime.options.device_route == STAGED
        self._route: DeviceSendingRoute | None = None
        self._staged = False
        self._warned = False

    @property
    def name(self) -> str | None:
        """How large messages go; None before the first one."""
        if self._route is not None:
            return self._route.name
        return STAGED if self._staged else None

    def begin(self, work: SendWork, packed: Packed) -> None:
        """Let the bytes of a small message set out for the host, before its turn has come."""
        work._host = self.ferry.run(self.bring(packed))

    async def bring(self, packed: Packed) -> Sequence[torch.Tensor]:
        """The buffers in memory of the host.

        Raises:
            DeviceError, RuntimeError: see ``Ferry.down``.

        Cancellation: the device goes on.
        """
        return await self.ferry.down(packed.buffers, ready_of(packed))

    async def hand_over(self, packed: Packed) -> tuple[torch.Tensor, ...]:
        """The buffers for a receiver in this process, who may use them in any stream.

        Raises:
            DeviceError, RuntimeError: see ``Ferry.down``.

        Cancellation: the device goes on.
        """
        if packed.kind is not Kind.TENSOR:
            await self.ferry.reach(ready_of(packed))
            return tuple(packed.buffers)
        # A completed send_tensor gives the buffer back on every route, so this one copies.
        return (await self.ferry.clone(packed.buffers[0], ready_of(packed)),)

    async def open(self, packed: Packed) -> DeviceSendingRoute | None:
        """The route for large messages; None where they go by way of the host.

        Cancellation: the set-up goes on for the next call.
        """
        if self._pinned:  # as the user wants it: no news
            self._staged = True
        if self._route is None and not self._staged:
            try:
                self._route = await self._open_route(_place(packed).index)
            except RouteError as error:
                self._staged = True
                log.warning(
                    "group %s: CUDA tensors go by way of pinned memory of the host: %s",
                    self._context["group"],
                    error.message,
                )
        return self._route

    def refused(self, error: RouteError) -> None:
        """The route cannot take a message, whose memory it does not reach: warn, once."""
        if not self._warned:
            self._warned = True
            log.warning(
                "group %s: CUDA tensors that the route %s does not reach go by way of pinned "
                "memory of the host: %s",
                self._context["group"],
                self.name,
                error.message,
            )


def ready_of(packed: Packed) -> Event:
    """The event after which the buffers of a message on a device hold what is to be sent."""
    ready = _place(packed).ready
    assert ready is not None
    return ready


def _place(packed: Packed) -> OnDevice:
    assert packed.device is not None
    return packed.device
