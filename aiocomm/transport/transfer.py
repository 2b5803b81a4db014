"""The blocks of one call on a route over a process group, cut into chunks, and how far they are.

Knows nothing of Gloo, NCCL, sockets or event loops: it hands out the next bytes to issue and counts
what is not done. Both ends cut alike, so ``CHUNK`` is part of the protocol. Chunks are small enough
that a discarded message costs little memory and a broken one holds little of it, and large enough
that issuing them costs little beside moving them. Rejected: 64 MiB, which measured no faster.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ..errors import ProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    import torch

MIB = 1024 * 1024
CHUNK = 16 * MIB

_COUNT = struct.Struct("!Q")


def longest_chunk(sizes: Sequence[int]) -> int:
    """Bytes of the longest chunk of blocks of these sizes."""
    return min(CHUNK, max(sizes, default=0))


def pack_count(issued: int) -> bytes:
    """What a receiver says: how many chunks it has issued so far."""
    return _COUNT.pack(issued)


def parse_count(value: bytes, before: int) -> int:
    """Read such a count.

    Raises:
        ProtocolError: it is no count, or less than the one before.
    """
    if len(value) != _COUNT.size:
        raise ProtocolError(f"a count of chunks has {len(value)} bytes instead of {_COUNT.size}")
    count = int(_COUNT.unpack(value)[0])
    if count < before:
        raise ProtocolError(f"the peer takes back chunks: {count} after {before}")
    return count


class Transfer:
    """What one call moves, held until the backend is done with the last chunk.

    Args:
        blocks: uint8, 1-D, contiguous; or a single one into which every block goes (discarding).
        sizes: bytes of each block.
        future: of the call.
        chunk: bytes that are issued at a time, at most; default: ``CHUNK``.
    """

    __slots__ = (
        *("_blocks", "_chunk", "_number", "_offset", "_scratch", "_sizes"),
        *("future", "keep", "last", "outstanding"),
    )

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        sizes: Sequence[int],
        future: asyncio.Future[None],
        *,
        scratch: bool = False,
        chunk: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._chunk = CHUNK if chunk is None else chunk
        self._sizes = sizes
        self._scratch = scratch
        self._number = 0
        self._offset = 0
        self.outstanding = 0  # chunks that are issued and not done
        self.keep: object = None  # whatever else is held as long
        self.last = 0  # chunks of its direction that the peer must say it has, before it is done
        self.future = future

    @property
    def issued(self) -> bool:
        """Whether there is no chunk left to issue."""
        sizes = self._sizes
        while self._number < len(sizes):
            if self._offset < sizes[self._number]:
                return False
            self._number += 1
            self._offset = 0
        return True

    def next_chunk(self) -> torch.Tensor:
        """The next bytes to issue; only where not all are issued."""
        size, offset = self._sizes[self._number], self._offset
        length = min(self._chunk, size - offset)
        self._offset = offset + length
        if self._scratch:
            return self._blocks[0].narrow(0, 0, length)
        block = self._blocks[self._number]
        return block if length == size else block.narrow(0, offset, length)

    def release(self) -> None:
        """Forget the buffers."""
        self._blocks, self._sizes, self._number = (), (), 0
