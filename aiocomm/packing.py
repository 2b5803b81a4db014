"""How the buffers of a message become transfers: one body, or a few large blocks.

Both sides compute the same layout from the sizes alone, so no message tells of it. Knows bytes
only, neither objects nor routes. Blocks in strict order of the buffers were rejected: the small
tensors of a model stand between its large ones, and would make a transfer of every gap.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALIGN = 64
"""Every buffer starts at a multiple of this, in a body and in a block."""
LARGE = 256 * 1024
"""A buffer of this many bytes is a block of its own: staging it would cost more than it saves."""
BLOCK = 4 * 1024 * 1024
"""Smaller buffers are packed into blocks of up to this many bytes."""

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
        buffers: 1-D uint8 tensors on any device.
    """
    if not buffers:
        return b""
    if not buffers[0].is_cpu:
        buffers = [buffer.cpu() for buffer in buffers]
    string_at = ctypes.string_at
    if len(buffers) == 1:
        return string_at(buffers[0].data_ptr(), buffers[0].nbytes)
    pieces, pad = [], 0
    for buffer in buffers:
        size = buffer.nbytes
        if size:
            if pad:
                pieces.append(_PADS[pad])
            pieces.append(string_at(buffer.data_ptr(), size))
            pad = -size & _MASK
    return b"".join(pieces)


def outline(body: bytes | memoryview, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The buffers of a body, copied once into writable memory that they share.

    Returns:
        One 1-D uint8 CPU tensor per size.

    Raises:
        ProtocolError: the body is not as long as the sizes say; nothing was allocated.
    """
    offsets, end = lay_out(sizes)
    if len(body) != end:
        raise ProtocolError(f"a message has {len(body)} bytes where its sizes say {end}")
    if not end:
        return [torch.empty(0, dtype=_UINT8, device="cpu") for _ in sizes]
    memory = bytearray(body)
    # Not slices of one tensor: those would share autograd's version counter, and a change of one
    # would count as a change of all.
    frombuffer = torch.frombuffer
    return [
        frombuffer(memory, dtype=_UINT8, count=size, offset=offset)
        if size
        else torch.empty(0, dtype=_UINT8, device="cpu")
        for size, offset in zip(sizes, offsets, strict=True)
    ]


def plan(sizes: Sequence[int]) -> tuple[Block, ...]:
    """The blocks that carry buffers of these sizes in bytes.

    A buffer of at least ``LARGE`` bytes is a block of its own. Smaller ones are packed together
    into blocks of up to ``BLOCK`` bytes, also across large ones. Empty ones are in no block.
    """
    blocks: list[Block] = []
    parts: list[tuple[int, int, int]] = []
    end = 0
    for number, size in enumerate(sizes):
        if size >= LARGE:
            blocks.append(Block(size, ((number, 0, size),)))
        elif size:
            start = (end + _MASK) & -ALIGN
            if start + size > BLOCK:
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
    """One 1-D uint8 tensor per block, on the device of the buffers.

    A block of one buffer is that buffer itself, any other a staging copy with zeros between.
    """
    return [
        buffers[block.parts[0][0]] if len(block.parts) == 1 else _stage(block, buffers)
        for block in blocks
    ]


def _stage(block: Block, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    device = buffers[block.parts[0][0]].device
    if device.type != "cpu":
        return _stage_on_device(block, buffers)
    staged = torch.empty(block.nbytes, dtype=_UINT8, device="cpu")
    base, end = staged.data_ptr(), 0
    move, clear = ctypes.memmove, ctypes.memset
    for number, offset, size in block.parts:
        if offset != end:  # no stray bytes of this process travel
            clear(base + end, 0, offset - end)
        move(base + offset, buffers[number].data_ptr(), size)
        end = offset + size
    return staged


def _stage_on_device(block: Block, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    pieces, end = [], 0
    zeros = torch.zeros(ALIGN, dtype=_UINT8, device=buffers[block.parts[0][0]].device)
    for number, offset, size in block.parts:
        if offset != end:
            pieces.append(zeros[: offset - end])
        pieces.append(buffers[number])
        end = offset + size
    return torch.cat(pieces)  # one kernel for all


def allocate(blocks: Iterable[Block], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Fresh memory per block, 1-D uint8, not initialised.

    Raises:
        RuntimeError: there is not that much memory (torch's own error).
    """
    return [torch.empty(block.nbytes, dtype=_UINT8, device=device) for block in blocks]


def scatter(
    blocks: Sequence[Block], memory: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor]:
    """Views into the blocks' memory, one per buffer, in order; 0 bytes for empty buffers.

    Args:
        blocks: the plan.
        memory: the 1-D uint8 tensors of ``allocate`` or ``gather``, filled.
        count: how many buffers the plan was made for.
    """
    buffers: list[torch.Tensor | None] = [None] * count
    for block, tensor in zip(blocks, memory, strict=True):
        if len(block.parts) == 1:
            buffers[block.parts[0][0]] = tensor
        else:
            for number, offset, size in block.parts:
                buffers[number] = tensor[offset : offset + size]
    device = memory[0].device if memory else "cpu"
    return [
        torch.empty(0, dtype=_UINT8, device=device) if buffer is None else buffer
        for buffer in buffers
    ]


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins when all lie one after the other, each aligned, and where they end.

    An empty buffer begins where the one before it ends.
    """
    offsets, end = [], 0
    for size in sizes:
        if size:
            start = (end + _MASK) & -ALIGN
            offsets.append(start)
            end = start + size
        else:
            offsets.append(end)
    return offsets, end
