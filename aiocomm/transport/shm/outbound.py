"""One message on its way into shared memory: which of its bytes are where.

Knows addresses and positions only, neither rings nor links.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from .copies import Range
    from .wire import Piece


@dataclass(slots=True, eq=False)
class Span:
    """Bytes of a message that are together: to be copied, or in shared memory already."""

    start: int
    end: int
    piece: Piece | None = None  # that it is already


@dataclass(slots=True, eq=False)
class Outbound:
    """One message on its way out."""

    buffers: Sequence[torch.Tensor]
    parts: list[tuple[int, int, int]]  # where each buffer begins and ends in the message, address
    total: int
    done: asyncio.Future[None]
    lend: bool
    spans: deque[Span] = field(default_factory=deque)
    envelope: Callable[[bytes], None] | None = None  # to be sent with the first piece
    begun: bool = False
    position: int = 0  # handed to the copying, or announced
    open: int = 0  # copies under way, and shared pieces that the peer has not given back

    def ranges(self, start: int, end: int, target: int) -> Iterator[Range]:
        """The copies that bring these bytes of the message to the target."""
        for first, last, address in self.parts:
            if last > start and first < end:
                low, high = max(first, start), min(last, end)
                yield target + low - start, address + low - first, high - low
