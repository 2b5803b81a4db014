"""One message on its way out of shared memory: the pieces it came in, the memory it ends in.

Knows addresses and positions; of segments only that they stay mapped, and nothing of links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...packing import ALIGN, LARGE, aligned, lay_out, nothing
from ...payload_bytes import view_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from ...packing_places import Laid
    from .copies import Range
    from .segment import Segment
    from .wire import Piece

_UINT8 = torch.uint8


@dataclass(slots=True, eq=False)
class Block:
    """Bytes of a message that end in one piece of memory."""

    start: int
    end: int
    memory: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Came:
    """A piece that came; its segment stays mapped as long as this lives, whatever the peer says."""

    piece: Piece
    number: int
    segment: Segment


class HeldPiece:
    """A whole small message in the sender's memory (the ``Held`` protocol).

    Args:
        segment: where it lies; it stays mapped as long as this lives.
        piece: which part of it.
        give_back: called once, when it is not needed any more.
    """

    __slots__ = ("_give_back", "address", "view")

    def __init__(self, segment: Segment, piece: Piece, give_back: Callable[[], None]) -> None:
        self.address = segment.address + piece.offset
        self.view = segment.view[piece.offset : piece.offset + piece.nbytes]
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass(slots=True, eq=False)
class Inbound:
    """One message on its way in; without ``blocks`` and ``sizes`` its bytes are dropped."""

    total: int
    done: asyncio.Future[None]
    blocks: Sequence[Block] = ()
    buffers: Laid | None = None  # what ``fetch`` has promised; without memory until it is there
    position: int = 0
    open: int = 0  # copies under way
    torn: bool = False  # the rest of it will never come

    def may_end(self, position: int) -> bool:
        """Whether a piece may end there: the next one begins aligned, and leaves no byte out."""
        if position == self.total or not position % ALIGN or not self.blocks:
            return True
        laid = self.buffers
        return laid is not None and any(
            offset + size == position for offset, size in zip(laid.offsets, laid.sizes, strict=True)
        )

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

    def over(self, memory: memoryview) -> None:
        """The message lies there, as it was laid out."""
        assert self.buffers is not None
        self.buffers.memory = [memory if size else nothing() for size in self.buffers.sizes]

    def whole(self) -> None:
        """Every block is full: the buffers that ``fetch`` has promised are in them."""
        laid = self.buffers
        if laid is None:
            return
        blocks = iter(self.blocks)
        block, end = None, 0
        home: Any = None
        offsets = list(laid.offsets)
        for number, size in enumerate(laid.sizes):
            if not size:
                laid.memory.append(nothing())
                continue
            if offsets[number] >= end:
                block = next(blocks)
                end, memory = block.end, block.memory
                assert memory is not None
                home = memory if size == block.end - block.start else view_of(memory)
            assert block is not None
            laid.memory.append(home)
            offsets[number] -= block.start
        laid.offsets = offsets


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


def whole_messages(pieces: Iterable[Came], sizes: Iterable[Sequence[int]]) -> int:
    """How many of the messages with buffers of these sizes are in the pieces, whole."""
    whole = 0
    rest = iter(pieces)
    for each in sizes:
        total, position = lay_out(each)[1], 0
        while position < total:
            came = next(rest, None)
            if came is None:
                return whole
            position = aligned(position + came.piece.nbytes)
        whole += 1
    return whole
