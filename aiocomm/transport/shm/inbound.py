"""One message on its way out of shared memory: which memory each of its bytes ends in.

Knows addresses and positions only, neither segments nor links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...packing import LARGE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from .copies import Range

_UINT8 = torch.uint8


@dataclass(slots=True, eq=False)
class Block:
    """Bytes of a message that end in one piece of memory."""

    start: int
    end: int
    memory: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Inbound:
    """One message on its way in; without ``blocks`` and ``sizes`` its bytes are dropped."""

    total: int
    done: asyncio.Future[None]
    blocks: Sequence[Block] = ()
    sizes: Sequence[int] = ()  # of the buffers that ``fetch`` has promised
    offsets: Sequence[int] = ()
    buffers: list[torch.Tensor] | None = None
    position: int = 0
    open: int = 0  # copies under way
    torn: bool = False  # the rest of it will never come

    def ranges(self, start: int, end: int, source: int) -> list[Range]:
        """The copies that bring these bytes of the message from the source; makes the memory.

        Raises:
            RuntimeError: there is no memory (torch's own error).
        """
        found = []
        for block in self.blocks:
            if block.end > start and block.start < end:
                if block.memory is None:
                    block.memory = torch.empty(block.end - block.start, dtype=_UINT8, device="cpu")
                low, high = max(block.start, start), min(block.end, end)
                target = block.memory.data_ptr() + low - block.start
                found.append((target, source + low - start, high - low))
        return found

    def fill(self, memory: Callable[[int, int], torch.Tensor]) -> None:
        """Put the buffers where ``fetch`` promised them; ``memory(offset, nbytes)`` gives each."""
        assert self.buffers is not None
        self.buffers.extend(
            memory(offset, size) if size else torch.empty(0, dtype=_UINT8, device="cpu")
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        )

    def slice(self, offset: int, nbytes: int) -> torch.Tensor:
        """A buffer out of the blocks."""
        for block in self.blocks:
            if block.start <= offset < block.end and block.memory is not None:
                if nbytes == block.end - block.start:
                    return block.memory
                return block.memory[offset - block.start : offset - block.start + nbytes]
        raise AssertionError("a buffer of a message lies in no block")


def blocks_for(sizes: Sequence[int], offsets: Sequence[int]) -> list[Block]:
    """Large buffers apart, so that keeping one keeps no other; small neighbours together."""
    blocks: list[Block] = []
    apart = True
    for offset, size in zip(offsets, sizes, strict=True):
        if size >= LARGE or (size and apart):
            blocks.append(Block(offset, offset + size))
            apart = size >= LARGE
        elif size:
            blocks[-1].end = offset + size
    return blocks
