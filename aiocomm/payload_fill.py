"""The buffers of a message: over the memory of what left the stream, nothing copied.

Knows slots and the table's columns that say where each lies; nothing of streams or messages.
Memory that overlaps becomes one buffer, so what shared memory at the sender shares it again.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from .packing_places import Held
from .payload_bytes import address_of, flat, refuse, tensor_at
from .payload_pickle import FEW
from .payload_table import PLACED, Table

if TYPE_CHECKING:
    from .payload_pickle import Slots

_TENSOR = torch.Tensor
_UINT8 = torch.uint8


def fill(table: Table, slots: Slots) -> list[torch.Tensor] | Held:
    """The buffers for the slots, and the columns of the table that describe them."""
    table.codes, table.shapes = slots.codes, slots.shapes
    owners, pointers, nbytes = slots.owners, slots.pointers, slots.nbytes
    if 0 in nbytes:
        full = [slot for slot, size in enumerate(nbytes) if size]
        owners, pointers, nbytes = ([each[n] for n in full] for each in (owners, pointers, nbytes))
    if len(nbytes) > 1:
        # Sorted apart: none overlaps another if and only if each ends before the next one starts.
        starts, ends = sorted(pointers), sorted(map(operator.add, pointers, nbytes))
        if any(map(operator.gt, ends, starts[1:])):
            return _fill_shared(table, slots)
    table.sizes = nbytes
    if len(nbytes) <= FEW:
        return list(map(_buffer, owners))
    return Held(owners, pointers, nbytes, on_cpu=not table.device)


def _buffer(owner: Any) -> torch.Tensor:
    if type(owner) is _TENSOR:
        try:
            return flat(owner)
        except Exception as error:  # torch will not show its bytes (named dimensions)
            raise refuse(owner, cause=error) from error
    return tensor_at(address_of(owner), owner.nbytes, owner)


def _fill_shared(table: Table, slots: Slots) -> list[torch.Tensor]:
    """The same where memory overlaps: each run of overlapping slots becomes one buffer."""
    order = sorted(range(len(slots.pointers)), key=slots.pointers.__getitem__)
    runs: list[list[int]] = []
    end = 0
    for slot in order:
        start, size = slots.pointers[slot], slots.nbytes[slot]
        if not size:
            continue
        if runs and start < end:
            runs[-1].append(slot)
            end = max(end, start + size)
        else:
            runs.append([slot])
            end = start + size
    table.flags |= PLACED
    count = len(slots.codes)
    homes, offsets = [0] * count, [0] * count
    buffers = []
    for home, run in enumerate(runs):
        first = slots.pointers[run[0]]
        for slot in run:
            homes[slot], offsets[slot] = home, slots.pointers[slot] - first
        buffers.append(_union(slots, run))
    table.homes, table.offsets = homes, offsets
    table.sizes = [buffer.nbytes for buffer in buffers]
    return buffers


def _union(slots: Slots, run: list[int]) -> torch.Tensor:
    """One buffer over the memory of several slots, which overlap."""
    start = slots.pointers[run[0]]
    end = max(slots.pointers[slot] + slots.nbytes[slot] for slot in run)
    for slot in run:
        if slots.nbytes[slot] == end - start:  # one spans them all
            return _buffer(slots.owners[slot])
    owners = [slots.owners[slot] for slot in run]
    if slots.device is None or slots.device.type == "cpu":
        return tensor_at(start, end - start, owners)
    whole = torch.empty(0, dtype=_UINT8, device=owners[0].device)
    storage = owners[0].untyped_storage()
    return whole.set_(storage, start - storage.data_ptr(), (end - start,), (1,))
