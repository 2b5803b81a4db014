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
import functools
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .device import here
from .errors import AiocommError, DecodeError, ProtocolError
from .packing import outline, sizes_of
from .payload_bytes import (
    CODES,
    DEVICES,
    DTYPES,
    RAW,
    as_bytes,
    refuse,
    spec_text,
    view_of,
)
from .payload_fill import fill
from .payload_find import where_is
from .payload_pickle import Refused, Slots, walk
from .payload_rebuild import cut, empty, own, rebuild, typed
from .payload_table import (
    REMEMBERED,
    STREAM_IN_BUFFER,
    Form,
    Table,
    is_tensor,
    read_object,
    read_plain,
    read_sizes,
    read_tensor,
    write_object,
    write_plain,
    write_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .device.base import Event

__all__ = [
    "Kind",
    "Packed",
    "TensorSpec",
    "as_bytes",
    "assemble",
    "buffer_sizes",
    "pack",
    "pack_tensor",
    "spec_of",
    "tensor_spec",
    "unpack",
    "unpack_body",
]

STREAM_LIMIT = 64 * 1024
"""A pickle stream of more bytes travels as a buffer, so that the meta stays small."""
KEYS_LIMIT = 256 * 1024
"""The same for the keys of a dict of tensors, which are its structure and need not travel again."""

_TENSOR = torch.Tensor
_UINT8 = torch.uint8
_CONTAINERS: dict[type, Form] = {list: Form.LIST, tuple: Form.TUPLE, dict: Form.DICT}
_ONLY_STRINGS = {str}
_ONLY_TENSORS = {_TENSOR}
_STATE = object.__getstate__  # None without attributes; asking for __dict__ would make one


class Kind(enum.IntEnum):
    """Which pair of calls a message belongs to."""

    TENSOR = 1  # send_tensor, recv_tensor
    OBJECT = 2  # send, recv


_OBJECT = Kind.OBJECT


@dataclass(slots=True)
class OnDevice:
    """Where the buffers of a message are, and the event after which they hold what is sent."""

    index: int
    ready: Event | None = None


@dataclass(slots=True)
class Packed:
    """A message, ready to travel. Not frozen, since that would triple the cost of making one.

    Args:
        kind: which pair of calls it belongs to.
        meta: everything but the bulk bytes, less than 16 MiB.
        buffers: 1-D uint8 views of the sender's memory on one device; they keep it alive.
        nbytes: bytes of all buffers.
        structure: bytes at the start of the meta that are equal in every message whose tensors
            (and, in a dict of tensors, keys) are like these; 0 if it has none.
        device: where the buffers are, if not on the CPU.
    """

    kind: Kind
    meta: bytes
    buffers: Sequence[torch.Tensor]
    nbytes: int
    structure: int = 0
    device: OnDevice | None = None


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
    if type(obj) is _TENSOR and not _STATE(obj):
        return _pack_tensor(obj, Kind.OBJECT, Form.TENSOR)
    found = _pack_container(obj)
    return _pack_any(obj) if found is None else found


def _pack_container(obj: Any) -> Packed | None:
    """The commonest containers of plain tensors, without a pickler's cost for each tensor."""
    form = _CONTAINERS.get(type(obj))
    if form is None or not obj:
        return None
    tensors: Any = obj.values() if form is Form.DICT else obj
    if type(next(iter(tensors))) is not _TENSOR:  # as in most small messages
        return None
    if form is Form.DICT and set(map(type, obj)) != _ONLY_STRINGS:
        return None
    if set(map(type, tensors)) != _ONLY_TENSORS:
        return None
    tensors = list(tensors)
    if len(set(map(id, tensors))) != len(tensors) or any(map(_STATE, tensors)):
        return None  # one tensor in two places must stay one; attributes travel
    slots = Slots()
    try:
        slots.add(tensors)
    except AiocommError:
        raise
    except Refused as refused:
        where = where_is(refused.tensor, obj)
        raise refuse(refused.tensor, where, refused.cause) from refused.cause
    stream = io.BytesIO()
    if form is Form.DICT:
        stream.write(pickle.dumps(tuple(obj), 5))
    return _packed(form, stream, slots)


def _pack_any(obj: object) -> Packed:
    stream, slots = walk(obj)
    if slots is None:
        if stream.tell() <= STREAM_LIMIT:  # small data without tensors: the commonest message
            return Packed(_OBJECT, write_plain(stream.getbuffer()), (), 0)
        slots = Slots()
    if slots.device is not None and slots.device.type != "cpu" and RAW in slots.codes:
        # The bytes of other providers lie on the CPU, and one message has one device.
        stream, slots = walk(obj, raw_in_band=True)
        slots = slots or Slots()
    return _packed(Form.PICKLED, stream, slots)


def _packed(form: Form, stream: io.BytesIO, slots: Slots) -> Packed:
    table = Table(form, device=0 if slots.device is None else DEVICES.index(slots.device.type))
    buffers = fill(table, slots) if slots.codes else []
    size = stream.tell()
    if size > (STREAM_LIMIT if form is Form.PICKLED else KEYS_LIMIT) and not table.device:
        table.flags |= STREAM_IN_BUFFER
        table.sizes = [*table.sizes, size]
        buffers.append(torch.frombuffer(stream.getbuffer(), dtype=_UINT8))
    else:
        table.stream = stream.getvalue()
    meta = write_object(table)
    structure = len(meta) - len(table.stream) if form is Form.PICKLED else len(meta)
    packed = Packed(_OBJECT, meta, buffers, sum(table.sizes), structure)
    if table.device and packed.nbytes:
        packed.device = _place(slots.device)
    return packed


def _pack_tensor(tensor: torch.Tensor, kind: Kind, form: Form) -> Packed:
    buffer = as_bytes(tensor)
    if here.on_cpu(tensor):
        meta = write_tensor(form, 0, CODES[tensor.dtype], tensor.shape)
        return Packed(kind, meta, (buffer,), buffer.nbytes)
    home = here.device_of(tensor)
    meta = write_tensor(form, DEVICES.index(home.type), CODES[tensor.dtype], tensor.shape)
    place = _place(home) if buffer.nbytes else None
    return Packed(kind, meta, (buffer,), buffer.nbytes, device=place)


def _place(device: torch.device | None) -> OnDevice:
    assert device is not None
    return OnDevice(device.index or 0)


def pack_tensor(tensor: torch.Tensor) -> Packed:
    """Turn one tensor into a message for ``recv_tensor``: one buffer, maybe of 0 bytes.

    Raises:
        PayloadError: it cannot be sent; the text says why and how to mend it.
    """
    return _pack_tensor(tensor, Kind.TENSOR, Form.BUFFER)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """What a tensor that is to be received into asks for."""
    kind = here.device_of(tensor).type
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.nbytes, kind)


# --- receiving ---


@functools.lru_cache(REMEMBERED)
def tensor_spec(meta: bytes) -> TensorSpec:
    """What a message of kind TENSOR brings.

    Raises:
        ProtocolError: the meta is damaged, or there can be no such tensor.
    """
    device, code, shape, nbytes = read_tensor(Form.BUFFER, meta)
    return TensorSpec(DTYPES[code][0], shape, nbytes, DEVICES[device])


def buffer_sizes(kind: Kind, meta: bytes | memoryview) -> tuple[int, ...]:
    """Bytes of each buffer of a message; nothing is allocated.

    Raises:
        ProtocolError: the meta is damaged, or the sizes cannot be.
    """
    if kind is Kind.TENSOR:
        return (read_tensor(Form.BUFFER, meta)[3],)
    if is_tensor(meta):
        return (read_tensor(Form.TENSOR, meta)[3],)
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
    if not buffers and (plain := read_plain(meta)) is not None:
        return _load(plain, ())
    if is_tensor(meta):
        return _unpack_tensor(meta, buffers)
    table = read_object(meta)
    return assemble(table, table.stream, buffers)


def assemble(table: Table, stream: bytes | memoryview, buffers: Sequence[torch.Tensor]) -> Any:
    """``unpack`` for a meta that was read already: its table, and the stream that goes with it."""
    if sizes_of(buffers) != tuple(table.sizes):
        raise ProtocolError("the buffers of a message are not those that it describes")
    if table.flags & STREAM_IN_BUFFER:
        if not buffers or not here.on_cpu(buffers[-1]):
            raise ProtocolError("a message has no buffer for its stream")
        stream = view_of(buffers[-1])
        buffers = buffers[:-1]
    items = rebuild(table, buffers) if table.shapes else []
    if table.form is Form.PICKLED:
        return _load(stream, items)
    if table.form is Form.DICT:
        return dict(zip(_keys(table, stream), items, strict=True))
    return items if table.form is Form.LIST else tuple(items)


def _keys(table: Table, stream: bytes | memoryview) -> tuple[str, ...]:
    if table.keys is not None:
        return table.keys
    keys = _load(stream, ())
    if (
        type(keys) is not tuple
        or len(keys) != len(table.shapes)
        or set(map(type, keys)) != _ONLY_STRINGS
    ):
        raise ProtocolError("the keys of a message do not fit its values")
    if not table.flags & STREAM_IN_BUFFER:
        table.keys = keys
    return keys


def _load(stream: bytes | memoryview, items: Sequence[Any]) -> Any:
    try:
        return pickle.loads(stream, buffers=items)
    except Exception as error:
        raise DecodeError(
            f"the object cannot be rebuilt here ({type(error).__name__}: {error}): its classes "
            "must be importable on both sides, and load what they dump"
        ) from error


def _unpack_tensor(meta: bytes | memoryview, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    device, code, shape, nbytes = read_tensor(Form.TENSOR, meta)
    if len(buffers) != 1 or buffers[0].numel() != nbytes:
        raise ProtocolError("the buffers of a message are not those that it describes")
    if not nbytes:
        return empty(code, shape, device)
    return typed(code, shape, own(buffers[0]))


def unpack_body(meta: bytes | memoryview, body: bytes | memoryview) -> Any:
    """``unpack`` for a message whose buffers rode along, aligned in one body that is copied."""
    if not is_tensor(meta):
        if not body and (plain := read_plain(meta)) is not None:
            return _load(plain, ())
        table = read_object(meta)
        return assemble(table, table.stream, outline(body, table.sizes))
    device, code, shape, nbytes = read_tensor(Form.TENSOR, meta)
    if len(body) != nbytes:
        raise ProtocolError(f"a message has {len(body)} bytes where its sizes say {nbytes}")
    if not nbytes:
        return empty(code, shape, device)
    return cut(code, shape, nbytes, bytearray(body), 0)
