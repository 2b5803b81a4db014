"""Objects to meta and buffers, and back.

One pickle (protocol 5) walks the object; each tensor in it leaves the stream and becomes an entry
of a table and bytes of a buffer, never copied. Tensors whose memory overlaps share a buffer and
share again on arrival; a slice costs its own bytes. On arrival the tensors are views of the
buffers. Knows neither links nor routes, nor whether a message is large.

Rejected: torch's own pickling (180 us for any tensor, and a slice ships its storage); a registry
of classes instead of pickle (arbitrary objects are promised); numbers in the stream that a global
table resolves on loading (pickle's own queue of out-of-band buffers hands over whatever it is
given, so the tensors themselves go there and nothing is global).
"""

from __future__ import annotations

import enum
import operator
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import DecodeError, ProtocolError
from .payload_bytes import (
    CODES,
    DEVICES,
    DTYPES,
    RAW,
    address_of,
    as_bytes,
    flat,
    refuse,
    spec_text,
    tensor_at,
    view_of,
)
from .payload_pickle import Refused, Slots, walk
from .payload_table import (
    PLACED,
    STREAM_IN_BUFFER,
    Table,
    nbytes_of,
    read_object,
    read_sizes,
    read_tensor,
    write_object,
    write_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Kind",
    "Packed",
    "TensorSpec",
    "as_bytes",
    "buffer_sizes",
    "pack",
    "pack_tensor",
    "spec_of",
    "tensor_spec",
    "unpack",
]

STREAM_LIMIT = 64 * 1024
"""A pickle stream of more bytes travels as a buffer, so that the meta stays small."""

_TENSOR = torch.Tensor
_UINT8 = torch.uint8
_PICKLED, _BARE = 0, 1  # forms: a pickle stream, or the one slot itself


class Kind(enum.IntEnum):
    """Which pair of calls a message belongs to."""

    TENSOR = 1  # send_tensor, recv_tensor
    OBJECT = 2  # send, recv


@dataclass(frozen=True, slots=True)
class Packed:
    """A message, ready to travel.

    Args:
        kind: which pair of calls it belongs to.
        meta: everything but the bulk bytes, less than 16 MiB.
        buffers: 1-D uint8 views of the sender's memory on one device; they keep it alive.
        nbytes: bytes of all buffers.
    """

    kind: Kind
    meta: bytes
    buffers: tuple[torch.Tensor, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a sent tensor and the buffer that receives it must agree on; nbytes in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    device_type: str

    def __str__(self) -> str:
        return f"{spec_text(self.dtype, self.shape)} on {self.device_type}"


# --- sending ---


def pack(obj: object) -> Packed:
    """Turn an object into a message; no tensor's memory is copied.

    Args:
        obj: a tensor, containers or dataclasses of tensors, or anything that pickle takes.

    Raises:
        PayloadError: it cannot be sent; the text says what, where and how to mend it.
    """
    if type(obj) is _TENSOR and not obj.__dict__:
        return _pack_bare(obj)
    stream, slots = walk(obj)
    device = slots.device
    if device is not None and device.type != "cpu" and RAW in slots.codes:
        # The bytes of other providers lie on the CPU, and one message has one device.
        stream, slots = walk(obj, raw_in_band=True)
    table = Table(_PICKLED, 0, DEVICES.index(device.type) if device is not None else 0)
    buffers = _fill(table, slots) if slots.codes else []
    size = stream.tell()
    if size > STREAM_LIMIT and not table.device:
        table.flags |= STREAM_IN_BUFFER
        table.sizes = [*table.sizes, size]
        buffers.append(torch.frombuffer(stream.getbuffer(), dtype=_UINT8))
    else:
        table.stream = stream.getvalue()
    return Packed(Kind.OBJECT, write_object(table), tuple(buffers), sum(table.sizes))


def _pack_bare(tensor: torch.Tensor) -> Packed:
    slots = Slots()
    try:
        slots.add(tensor)
        assert slots.device is not None
        table = Table(_BARE, 0, DEVICES.index(slots.device.type))
        buffers = _fill(table, slots)
    except Refused as refused:
        raise refuse(tensor, cause=refused.cause) from refused.cause
    return Packed(Kind.OBJECT, write_object(table), tuple(buffers), slots.nbytes[0])


def _fill(table: Table, slots: Slots) -> list[torch.Tensor]:
    """The buffers for the slots, and the columns of the table that describe them."""
    table.codes, table.shapes = slots.codes, slots.shapes
    pointers, nbytes = slots.pointers, slots.nbytes
    if len(pointers) > 1:
        order = sorted(range(len(pointers)), key=pointers.__getitem__)
        starts = [pointers[slot] for slot in order if nbytes[slot]]
        ends = [pointers[slot] + nbytes[slot] for slot in order if nbytes[slot]]
        if any(map(operator.gt, ends, starts[1:])):
            return _fill_shared(table, slots, order)
    buffers = []
    sizes = table.sizes = []
    for owner, size in zip(slots.owners, nbytes, strict=True):
        if size:
            buffers.append(_buffer(owner))
            sizes.append(size)
    return buffers


def _buffer(owner: Any) -> torch.Tensor:
    if type(owner) is _TENSOR:
        try:
            return flat(owner)
        except Exception as error:  # torch will not show its bytes (named dimensions)
            raise refuse(owner, cause=error) from error
    return tensor_at(address_of(owner), owner.nbytes, owner)


def _fill_shared(table: Table, slots: Slots, order: list[int]) -> list[torch.Tensor]:
    """The same where memory overlaps: each run of overlapping slots becomes one buffer."""
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
    whole = torch.empty(0, dtype=_UINT8, device=slots.device)
    storage = owners[0].untyped_storage()
    return whole.set_(storage, start - storage.data_ptr(), (end - start,), (1,))


def pack_tensor(tensor: torch.Tensor) -> Packed:
    """Turn one tensor into a message for ``recv_tensor``: one buffer, maybe of 0 bytes.

    Raises:
        PayloadError: it cannot be sent; the text says why and how to mend it.
    """
    buffer = as_bytes(tensor)
    device = DEVICES.index(buffer.device.type)
    meta = write_tensor(device, CODES[tensor.dtype], tuple(tensor.shape))
    return Packed(Kind.TENSOR, meta, (buffer,), buffer.numel())


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """What a tensor that is to be received into asks for."""
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.nbytes, tensor.device.type)


# --- receiving ---


def tensor_spec(meta: bytes | memoryview) -> TensorSpec:
    """What a message of kind TENSOR brings.

    Raises:
        ProtocolError: the meta is damaged, or there can be no such tensor.
    """
    device, code, shape, nbytes = read_tensor(meta)
    return TensorSpec(DTYPES[code][0], shape, nbytes, DEVICES[device])


def buffer_sizes(kind: Kind, meta: bytes | memoryview) -> tuple[int, ...]:
    """Bytes of each buffer of a message; nothing is allocated.

    Raises:
        ProtocolError: the meta is damaged, or the sizes cannot be.
    """
    if kind is Kind.TENSOR:
        return (read_tensor(meta)[3],)
    return read_sizes(meta)


def unpack(meta: bytes | memoryview, buffers: Sequence[torch.Tensor]) -> Any:
    """Rebuild an object; its tensors are views of the buffers, and keep them alive.

    Args:
        meta: of a message of kind OBJECT.
        buffers: its 1-D uint8 buffers, filled.

    Raises:
        ProtocolError: the meta is damaged, contradicts itself, or the buffers do not fit it.
        DecodeError: the object cannot be rebuilt here; the cause is chained.
    """
    table = read_object(meta)
    if tuple(map(_TENSOR.numel, buffers)) != tuple(table.sizes):
        raise ProtocolError("the buffers of a message are not those that it describes")
    stream = table.stream
    if table.flags & STREAM_IN_BUFFER:
        if not buffers or not buffers[-1].is_cpu:
            raise ProtocolError("a message has no buffer for its stream")
        stream = view_of(buffers[-1])
        buffers = buffers[:-1]
    items = _rebuild(table, buffers) if table.shapes else []
    if table.form == _BARE and len(items) == 1:
        return items[0]
    if table.form != _PICKLED:
        raise ProtocolError("a message has an unknown form")
    try:
        return pickle.loads(stream, buffers=items)
    except Exception as error:
        raise DecodeError(
            f"the object cannot be rebuilt here ({type(error).__name__}: {error}): its classes "
            "must be importable on both sides, and load what they dump"
        ) from error


def _rebuild(table: Table, buffers: Sequence[torch.Tensor]) -> list[Any]:
    # A view of a packed block shares autograd's version counter with its neighbours; `data` does
    # not.
    bases = [buffer.data if buffer._is_view() else buffer for buffer in buffers]
    sizes = table.sizes
    placed = table.flags & PLACED
    items: list[Any] = []
    home = offset = 0
    for slot, (code, shape) in enumerate(zip(table.codes, table.shapes, strict=True)):
        nbytes = nbytes_of(code, shape)
        if not nbytes:
            items.append(_empty(code, shape, bases, table.device))
            continue
        if placed:
            home, offset = table.homes[slot], table.offsets[slot]
        if home >= len(bases) or (
            offset + nbytes > sizes[home] if placed else nbytes != sizes[home]
        ):
            raise ProtocolError("a tensor of a message lies outside its buffers")
        items.append(_item(code, shape, bases[home], offset, nbytes))
        if not placed:
            home += 1
    return items


def _item(code: int, shape: tuple[int, ...], base: torch.Tensor, offset: int, nbytes: int) -> Any:
    if code == RAW:
        if not base.is_cpu:
            raise ProtocolError("a message has raw bytes that are not on the CPU")
        return view_of(base, offset, nbytes)
    if nbytes != base.numel():
        base = base[offset : offset + nbytes]
    dtype = DTYPES[code][0]
    try:
        typed = base.view(dtype)
    except RuntimeError:  # its address there was no multiple of its item size either
        typed = (
            torch.frombuffer(view_of(base), dtype=dtype)
            if base.is_cpu
            else base.clone().view(dtype)
        )
    return typed if len(shape) == 1 else typed.view(shape)


def _empty(
    code: int, shape: tuple[int, ...], bases: Sequence[torch.Tensor], device: int
) -> torch.Tensor | memoryview:
    if code == RAW:
        return memoryview(bytearray())
    place = bases[0].device if bases else DEVICES[device]
    try:
        return torch.empty(0, dtype=_UINT8, device=place).view(DTYPES[code][0]).view(shape)
    except RuntimeError as error:
        raise ProtocolError(f"a message has an empty tensor that cannot be: {error}") from error
