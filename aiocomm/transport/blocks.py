"""A route that moves large blocks well and many small buffers badly: how messages become blocks.

Both ends compute the same blocks from the sizes of the buffers. What a route may not know is the
messages themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from ..packing import allocate, gather, plan, scatter, sizes_of, staged_bytes

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    import torch


class BlockRoute(ABC):
    """The half of the ``Route`` protocol that is the same for all routes of this kind."""

    @property
    def survives(self) -> bool:
        """The bytes come out of the peer's memory: never."""
        return False

    def end(self, upcoming: Iterable[Sequence[int]]) -> None:
        """Nothing is here that is not in the memory of whoever asked for it."""
        return None

    def stage(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The blocks to send: small buffers are copied together."""
        return gather(plan(sizes_of(buffers)), buffers)

    def staged_bytes(self, buffers: Sequence[torch.Tensor]) -> int:
        """Bytes that ``stage`` copies."""
        return staged_bytes(plan(sizes_of(buffers)))

    def send(
        self, staged: Sequence[torch.Tensor], *, envelope: Callable[[bytes], None], lend: bool
    ) -> asyncio.Future[None]:
        """Send the blocks of one message, right behind its envelope."""
        envelope(b"")
        return self.send_blocks(staged)

    def place(self, buffers: Sequence[torch.Tensor]) -> bytes | None:
        """There is no place."""
        return None

    def hold(self, body: bytes, sizes: Sequence[int]) -> None:
        """Raises: ProtocolError: no sender of this kind puts anything into an envelope."""
        raise ProtocolError("the peer's envelope holds bytes that its route has no use for")

    def fetch(self, sizes: Sequence[int]) -> tuple[Sequence[torch.Tensor], asyncio.Future[None]]:
        """Receive buffers of these sizes into fresh memory."""
        blocks = plan(sizes)
        memory = allocate(blocks)
        return scatter(blocks, memory, sizes), self.receive(memory)

    def discard(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drain a message whose buffers have these sizes."""
        return self.discard_blocks([block.nbytes for block in plan(sizes)])

    @abstractmethod
    def send_blocks(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Send blocks; done when they are the caller's again."""

    @abstractmethod
    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Fill the blocks with the next message."""

    @abstractmethod
    def discard_blocks(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drain blocks of these sizes, in bounded memory."""
