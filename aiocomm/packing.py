"""How the buffers of a message become transfers: one body, or a few large blocks.

Both sides compute the same layout from the sizes alone, so no message tells of it; the last few
layouts are remembered, since a training loop sends the same ones again and again. Knows bytes
only, neither objects nor routes. Blocks in strict order of the buffers were rejected: the small
tensors of a model stand between its large ones, and would make a transfer of every gap.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .device import here
from .errors import ProtocolError
from .packing_places import Held, Laid
from .payload_bytes import view_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from functools import _lru_cache_wrapper

_T = TypeVar("_T")

ALIGN = 64
"""Every buffer starts at a multiple of this, in a body and in a block."""
LARGE = 256 * 1024
"""A buffer of this many bytes is a block of its own: staging it would cost more than it saves."""
BLOCK = 4 * 1024 * 1024
"""Smaller buffers are packed into blocks of up to this many bytes."""
DEVICE_LARGE = 4 * 1024 * 1024
DEVICE_BLOCK = 32 * 1024 * 1024
"""The same two where the buffers are on a device: to begin a transfer takes some 20 us there, in
which 4 MiB could be copied ten times."""

REMEMBERED = 16
"""Layouts that are remembered."""
MOST_REMEMBERED = 16 * 1024
"""Buffers up to which one is: a layout of more is not worth its memory."""

_UINT8 = torch.uint8
_MASK = ALIGN - 1
_PADS = tuple(bytes(size) for size in range(ALIGN))


@dataclass(frozen=True, slots=True)
class Block:
    """One transfer: its bytes, and which buffers lie in it as (buffer number, offset, bytes)."""

    nbytes: int
    parts: tuple[tuple[int, int, int], ...]


def inline(buffers: Sequence[torch.Tensor]) -> bytes:
    """A copy of the buffers in one body, each aligned.

    Args:
        buffers: 1-D uint8 tensors on the CPU.
    """
    if not buffers:
        return b""
    string_at = ctypes.string_at
    if len(buffers) == 1:
        return string_at(buffers[0].data_ptr(), buffers[0].nbytes)
    pieces, pad = [], 0
    for pointer, size in spans_of(buffers):
        if size:
            if pad:
                pieces.append(_PADS[pad])
            pieces.append(string_at(pointer, size))
            pad = -size & _MASK
    return b"".join(pieces)


def spans_of(buffers: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each buffer on the CPU."""
    if isinstance(buffers, Held):
        return zip(buffers.pointers, buffers.sizes, strict=True)
    return ((buffer.data_ptr(), buffer.nbytes) for buffer in buffers)


def sizes_of(buffers: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of each buffer."""
    if isinstance(buffers, (Held, Laid)):
        return tuple(buffers.sizes)
    return tuple(map(torch.Tensor.numel, buffers))


def _remembered(layout: _lru_cache_wrapper[_T], sizes: Sequence[int]) -> _T:
    known = len(sizes) <= MOST_REMEMBERED
    return layout(tuple(sizes)) if known else layout.__wrapped__(tuple(sizes))


def outline(body: bytes | memoryview, sizes: Sequence[int]) -> Laid:
    """The buffers of a body, copied once into writable memory that they share.

    Returns:
        One 1-D uint8 CPU tensor per size.

    Raises:
        ProtocolError: the body is not as long as the sizes say; nothing was allocated.
    """
    offsets, end = lay_out(sizes)
    if len(body) != end:
        raise ProtocolError(f"a message has {len(body)} bytes where its sizes say {end}")
    memory: Any = bytearray(body)
    return Laid([memory if size else nothing() for size in sizes], offsets, sizes)


def nothing(device: torch.device | str = "cpu") -> torch.Tensor:
    """An empty buffer."""
    return torch.empty(0, dtype=_UINT8, device=device)


def aligned(offset: int) -> int:
    """The next place at which a buffer may begin."""
    return (offset + _MASK) & -ALIGN


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins when all lie one after the other, each aligned, and where they end.

    An empty buffer begins where the one before it ends. Not to be changed: it is remembered.
    """
    return _remembered(_offsets, sizes)


@functools.lru_cache(maxsize=REMEMBERED)
def _offsets(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        start = (end + _MASK) & -ALIGN if size else end
        offsets.append(start)
        end = start + size
    return offsets, end


def plan(sizes: Sequence[int]) -> tuple[Block, ...]:
    """The blocks that carry buffers of these sizes in bytes.

    A buffer of at least ``LARGE`` bytes is a block of its own. Smaller ones are packed together
    into blocks of up to ``BLOCK`` bytes, also across large ones. Empty ones are in no block.
    """
    return _remembered(_plan, sizes)


def plan_device(sizes: Sequence[int]) -> tuple[Block, ...]:
    """The same for memory of a device, which copies much faster than it begins a transfer."""
    return _remembered(_plan_device, sizes)


@functools.lru_cache(maxsize=REMEMBERED)
def _plan(sizes: tuple[int, ...]) -> tuple[Block, ...]:
    return _blocks(sizes, LARGE, BLOCK)


@functools.lru_cache(maxsize=REMEMBERED)
def _plan_device(sizes: tuple[int, ...]) -> tuple[Block, ...]:
    return _blocks(sizes, DEVICE_LARGE, DEVICE_BLOCK)


def _blocks(sizes: tuple[int, ...], large: int, most: int) -> tuple[Block, ...]:
    blocks: list[Block] = []
    parts: list[tuple[int, int, int]] = []
    end = 0
    for number, size in enumerate(sizes):
        if size >= large:
            blocks.append(Block(size, ((number, 0, size),)))
        elif size:
            start = (end + _MASK) & -ALIGN
            if start + size > most:
                blocks.append(Block(end, tuple(parts)))
                parts = []
                start = 0
            parts.append((number, start, size))
            end = start + size
    if parts:
        blocks.append(Block(end, tuple(parts)))
    return tuple(blocks)


def staged_bytes(blocks: Iterable[Block]) -> int:
    """Bytes that ``gather`` copies."""
    return sum(block.nbytes for block in blocks if len(block.parts) > 1)


def gather(blocks: Iterable[Block], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One 1-D uint8 tensor per block, of buffers on the CPU.

    A block of one buffer is that buffer itself, any other a staging copy with zeros between.
    """
    return [
        buffers[block.parts[0][0]] if len(block.parts) == 1 else _stage(block, buffers)
        for block in blocks
    ]


def _stage(block: Block, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    staged = torch.empty(block.nbytes, dtype=_UINT8, device="cpu")
    fill_block(block, buffers, staged)
    return staged


def fill_block(block: Block, buffers: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Copy the buffers of a block to where they lie in it, all on the CPU."""
    if isinstance(buffers, Held):
        pointers = buffers.pointers
    else:
        pointers = [buffer.data_ptr() for buffer in buffers]
    base, end = memory.data_ptr(), 0
    move, clear = ctypes.memmove, ctypes.memset
    for number, offset, size in block.parts:
        if offset != end:  # no stray bytes of this process travel
            clear(base + end, 0, offset - end)
        move(base + offset, pointers[number], size)
        end = offset + size


def allocate(blocks: Iterable[Block], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Fresh memory per block, 1-D uint8, not initialised.

    Raises:
        RuntimeError: there is not that much memory (torch's own error).
    """
    return [torch.empty(block.nbytes, dtype=_UINT8, device=device) for block in blocks]


def scatter(blocks: Sequence[Block], memory: Sequence[torch.Tensor], sizes: Sequence[int]) -> Laid:
    """Where the buffers lie in the blocks' memory, in order; 0 bytes for empty buffers.

    Args:
        blocks: the plan.
        memory: the 1-D uint8 tensors of ``allocate`` or ``gather``, filled.
        sizes: what the plan was made for.
    """
    homes: list[Any] = [None] * len(sizes)
    offsets = [0] * len(sizes)
    for block, tensor in zip(blocks, memory, strict=True):
        if len(block.parts) == 1:
            homes[block.parts[0][0]] = tensor
        elif here.on_cpu(tensor):
            view = view_of(tensor)
            for number, offset, _ in block.parts:
                homes[number] = view
                offsets[number] = offset
        else:
            for number, offset, size in block.parts:
                homes[number] = tensor[offset : offset + size]
    device = memory[0].device if memory else "cpu"
    return Laid([nothing(device) if home is None else home for home in homes], offsets, sizes)
