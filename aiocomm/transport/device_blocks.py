"""Buffers of a device as the blocks that travel: joined on the device, brought to one device.

Knows streams and bytes, neither routes nor messages. Nothing here waits on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import here
from ..packing import ALIGN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from ..device.base import Accelerator, Event, Stream
    from ..packing import Block


def gather_on_device(
    device: Accelerator, blocks: Iterable[Block], buffers: Sequence[torch.Tensor], stream: Stream
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One 1-D uint8 tensor per block, to be used in the stream.

    A block of one buffer is that buffer itself, any other is joined in the stream, with zeros
    between.

    Args:
        device: of the buffers.
        blocks: the plan.
        buffers: 1-D uint8; the caller holds them until the stream has come past.
        stream: waits already for whatever fills them.

    Returns:
        The tensors, and what is to be held as the buffers are.
    """
    gaps: list[torch.Tensor] = []  # one at most: no stray bytes travel
    gathered = []
    for block in blocks:
        if len(block.parts) == 1:
            gathered.append(buffers[block.parts[0][0]])
            continue
        pieces: list[torch.Tensor] = []
        end = 0
        for number, offset, size in block.parts:
            if offset != end:
                if not gaps:
                    gaps.append(device.zeros(ALIGN, stream))
                pieces.append(gaps[0][: offset - end])
            pieces.append(buffers[number])
            end = offset + size
        gathered.append(device.join(pieces, stream))
    return gathered, gaps


def give_away(device: Accelerator, memory: Iterable[torch.Tensor], index: int) -> None:
    """What was allocated for a stream of ours is the caller's, to use in the current stream."""
    current = device.current_stream(index)
    for block in memory:
        device.lend(block, current)


def bring_over(
    device: Accelerator, buffers: Sequence[torch.Tensor], stream: Stream, after: Event
) -> Sequence[torch.Tensor]:
    """The same buffers on the device of the stream; copied there where they are on another.

    Args:
        device: of the buffers, all of which are on one device.
        buffers: 1-D uint8; the caller holds them until the stream has come past.
        stream: where the result is used.
        after: when it is done, the buffers are full.
    """
    index = here.device_of(buffers[0]).index
    if index == stream.index:
        return buffers
    # A copy between devices is queued on that of the source, between two events of the target's.
    outbound = device.stream(index)
    device.wait(outbound, after)
    near = [device.allocate(buffer.numel(), stream) for buffer in buffers]
    device.wait(outbound, device.record(stream))
    for target, source in zip(near, buffers, strict=True):
        device.copy(target, source, outbound)
    device.wait(stream, device.record(outbound))
    return near
