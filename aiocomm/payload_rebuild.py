"""What lies in the buffers of a message, made into tensors and memoryviews without a copy.

Knows the table and the buffers, not the object that they belong to. Believes neither: a slot
outside its buffer is an error before anything is made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .device import here
from .errors import ProtocolError
from .packing_places import Laid
from .payload_bytes import DTYPES, RAW, view_of
from .payload_table import PLACED, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

_UINT8 = torch.uint8
_TENSOR = torch.Tensor
_frombuffer = torch.frombuffer


def own(buffer: torch.Tensor) -> torch.Tensor:
    """A tensor over the buffer's memory that autograd takes for nobody's view.

    A view of a packed block shares its version counter with its neighbours, and a change of one
    would count as a change of all.
    """
    return buffer.data if buffer._is_view() else buffer


def rebuild(table: Table, buffers: Sequence[torch.Tensor]) -> list[Any]:
    """The slots of a message as tensors and memoryviews, in order.

    Args:
        table: what the meta says.
        buffers: as many and as large as the table says, without that of the stream.

    Raises:
        ProtocolError: the slots do not fit the buffers.
    """
    if table.flags & PLACED:
        return _shared(table, buffers)
    laid = buffers if isinstance(buffers, Laid) else None
    memory, offsets = (buffers, None) if laid is None else (laid.memory, laid.offsets)
    items: list[Any] = []
    home, count, sizes = 0, len(buffers), table.sizes
    for code, shape, nbytes in zip(table.codes, table.shapes, table.slot_bytes(), strict=True):
        if not nbytes:
            items.append(_empty_item(code, shape, table.device))
            continue
        if home >= count or sizes[home] != nbytes:
            raise ProtocolError("the tensors of a message do not fit its buffers")
        base, offset = memory[home], 0 if offsets is None else offsets[home]
        home += 1
        if isinstance(base, _TENSOR):
            base = own(base)
            items.append(typed(code, shape, base) if code else _raw(base, 0, nbytes))
        elif not code:
            items.append(_raw_part(base, offset, nbytes))
        else:
            items.append(cut(code, shape, nbytes, base, offset))
    if home != count:
        raise ProtocolError("a message has more buffers than it uses")
    return items


def _shared(table: Table, buffers: Sequence[torch.Tensor]) -> list[Any]:
    bases = [own(buffer) for buffer in buffers]
    items: list[Any] = []
    slots = zip(table.codes, table.shapes, table.slot_bytes(), strict=True)
    places = zip(table.homes, table.offsets, strict=True)
    for (code, shape, nbytes), (home, offset) in zip(slots, places, strict=True):
        if not nbytes:
            items.append(_empty_item(code, shape, table.device))
            continue
        if home >= len(bases) or offset + nbytes > table.sizes[home]:
            raise ProtocolError("a tensor of a message lies outside its buffers")
        base = bases[home]
        if code == RAW:
            items.append(_raw(base, offset, nbytes))
        else:
            items.append(typed(code, shape, base[offset : offset + nbytes]))
    return items


def cut(
    code: int, shape: tuple[int, ...], nbytes: int, memory: bytearray | memoryview, offset: int
) -> torch.Tensor:
    """A tensor over its bytes in memory of the CPU, which it keeps alive."""
    dtype, itemsize = DTYPES[code]
    tensor = _frombuffer(memory, dtype=dtype, count=nbytes // itemsize, offset=offset)
    # In place: quicker than a view, and autograd takes it for nobody's.
    return tensor if len(shape) == 1 else tensor.resize_(*shape or ((),))


def typed(code: int, shape: tuple[int, ...], base: torch.Tensor) -> torch.Tensor:
    """Exactly the bytes of a tensor as that tensor."""
    dtype = DTYPES[code][0]
    try:
        tensor = base.view(dtype)
    except RuntimeError:  # at an address that is no multiple of its item size, as at the sender
        tensor = (
            torch.frombuffer(view_of(base), dtype=dtype)
            if here.on_cpu(base)
            else _moved(base).view(dtype)
        )
    # Of a contiguous tensor that is a view, and quicker than asking for one.
    return tensor if len(shape) == 1 else torch.reshape(tensor, shape)


def _moved(base: torch.Tensor) -> torch.Tensor:
    """The same bytes of a device at an address of their own, there when this returns."""
    device, index = here.accelerator, here.device_of(base).index
    stream = device.stream(index)  # the current one may have much to do before
    copy = device.allocate(base.numel(), stream)
    device.copy(copy, base, stream)
    device.lend(copy, device.current_stream(index))
    device.finish(device.record(stream))
    return copy


def _raw(base: torch.Tensor, offset: int, nbytes: int) -> memoryview:
    if not here.on_cpu(base):
        raise ProtocolError("a message has raw bytes that are not on the CPU")
    return view_of(base, offset, nbytes)


def _raw_part(memory: bytearray | memoryview, offset: int, nbytes: int) -> memoryview:
    if isinstance(memory, memoryview):
        # A slice of a view keeps what that was made of, not the view itself, by whose death the
        # peer gets its memory back. A tensor keeps the view.
        return view_of(_frombuffer(memory, dtype=_UINT8, count=nbytes, offset=offset))
    return memoryview(memory)[offset : offset + nbytes]


def _empty_item(code: int, shape: tuple[int, ...], device: int) -> torch.Tensor | memoryview:
    return empty(code, shape, device) if code != RAW else memoryview(bytearray())


def empty(code: int, shape: tuple[int, ...], device: int) -> torch.Tensor:
    """A tensor of no element on the CPU or on the current device, by the numbers of a table."""
    dtype = DTYPES[code][0]
    try:  # torch.empty would warn of some dtypes
        if device:
            return here.accelerator.empty(dtype, shape)
        return torch.empty(0, dtype=_UINT8, device="cpu").view(dtype).view(shape)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ProtocolError(f"a message has an empty tensor that cannot be: {error}") from error
