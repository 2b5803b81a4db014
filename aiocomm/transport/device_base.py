"""What a bulk route for memory of a device is, seen from above.

The counterpart of ``SendingRoute`` and ``ReceivingRoute``: nothing is staged or lent, both ends
queue work in streams, and the bytes of the envelope belong to the route. Rejected: one protocol for
both kinds of memory (half of its methods would be meaningless for either).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .base import Route

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import torch

    from ..device.base import Event


class DeviceSendingRoute(Route, Protocol):
    """The end that sends what is in memory of a device; the order of the calls is kept.

    Used on the thread of its loop only, where each call queues work in streams and returns.
    """

    def send(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        after: Event,
        envelope: Callable[[bytes], None],
    ) -> asyncio.Future[None]:
        """Send one message; done when its buffers are the caller's again.

        Args:
            buffers: 1-D uint8 tensors, none empty, all on one device; the route holds them.
            after: when it is done the buffers hold what is to be sent; not before.
            envelope: sends the envelope, with some bytes for the other end in it. Called once,
                before this returns, or later where it cannot be called now; no other message is
                sent before that. Never raises.

        Raises:
            RouteError: the route does not reach this memory, and nothing was sent: the message has
                to go another way.
        """


class DeviceReceivingRoute(Route, Protocol):
    """The end that receives into memory of a device, in the order of the calls.

    What a future announces may be used in any stream: the device is done with it.

    Attributes:
        index: the device on which it receives.
    """

    index: int

    def receive(
        self, body: bytes, block: torch.Tensor, *, after: Event | None
    ) -> asyncio.Future[None]:
        """Take the next message, which has a single buffer, into the caller's memory.

        Args:
            body: of its envelope.
            block: 1-D uint8, on the device of the route.
            after: the block may be written to when this is done, and not before.
        """

    def fetch(
        self, body: bytes, sizes: Sequence[int]
    ) -> tuple[Sequence[torch.Tensor], asyncio.Future[None]]:
        """Take the next message, in memory of the route's choice, that is the receiver's then.

        Args:
            body: of its envelope.
            sizes: of its buffers, in bytes.

        Returns:
            The buffers, and a future: they are full when it is done.

        Raises:
            RuntimeError: there is not that much memory (torch's own error).
        """

    def discard(self, body: bytes, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drain the next message, whose buffers have these sizes, in bounded memory."""
