"""Which chip the other end of a device route is on, told by both before the route is set up.

May not know what a route makes of it. Each end publishes its own as soon as it is opened, so both
know after one way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..device.base import Identity

if TYPE_CHECKING:
    from collections.abc import Callable


class Meeting:
    """The exchange at one end.

    Args:
        loop: of the route.
        label: of the route; the key begins with it.
        publish: hands a key and value to the peer's end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        label: str,
        publish: Callable[[str, bytes], None],
    ) -> None:
        self.key = f"{label}/identity"
        self._publish = publish
        self._told: asyncio.Future[Identity] = loop.create_future()

    def deliver(self, value: bytes) -> None:
        """What the peer has published under ``key``; what comes after the first is not heard."""
        uuid, _, model = value.decode(errors="replace").partition("\0")
        if not self._told.done():
            self._told.set_result(Identity(uuid, model))

    async def meet(self, own: Identity) -> Identity:
        """Tell which chip this end is on, and wait to be told the same.

        Cancellation: safe; what the peer told is kept.
        """
        self._publish(self.key, f"{own.uuid}\0{own.model}".encode())
        return await asyncio.shield(self._told)
