"""The meta of a message as bytes: which buffers there are, and what lies where in them.

Written as columns, because struct packs a column of thousands in one call. Reading believes
nothing: a checksum catches what was damaged, and every size, offset and shape is checked against
the others before anything is made of it. The pickle stream at the end is not examined, since
whoever knows the group's secret may run code here anyway.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
import zlib
from dataclasses import dataclass, field

from .errors import PayloadError, ProtocolError
from .payload_bytes import DEVICES, DTYPES, MAX_DIMS, RAW

MAX_META = 16 * 1024 * 1024
MAX_BYTES = (1 << 63) - 1  # of a message, and of any size, offset or dimension in it

STREAM_IN_BUFFER = 1  # the last buffer is the pickle stream, not the end of the meta
PLACED = 2  # slots name their buffer and offset; else each takes the next buffer, whole

_CRC = struct.Struct("<I")
_OBJECT = struct.Struct("<BBBBIII")  # form, flags, device, 0, buffers, slots, dims of all slots
_TENSOR = struct.Struct("<BBBB")  # form, device, dtype, dims
CRC_SIZE = _CRC.size
_START = CRC_SIZE + _OBJECT.size
_TENSOR_START = CRC_SIZE + _TENSOR.size
_TENSOR_FORMATS = tuple(f"<BBBB{rank}Q" for rank in range(MAX_DIMS + 1))


class Form(enum.IntEnum):
    """What a meta describes; the first byte after the checksum."""

    BUFFER = 1  # a tensor for recv_tensor
    TENSOR = 2  # an object that is one tensor
    PICKLED = 3  # the stream is the object
    LIST = 4  # of the slots; the stream is empty
    TUPLE = 5
    DICT = 6  # of the slots; the stream is the tuple of the keys


_PLAIN = _OBJECT.pack(Form.PICKLED, 0, 0, 0, 0, 0, 0)
_FORMS = {form.value: form for form in (Form.PICKLED, Form.LIST, Form.TUPLE, Form.DICT)}


@dataclass(slots=True)
class Table:
    """What the meta of an object says, as columns with one entry per slot.

    A slot is what the pickle stream takes out of band: a tensor, or raw bytes (``RAW``).
    """

    form: Form
    flags: int = 0
    device: int = 0
    sizes: list[int] | tuple[int, ...] = ()  # of the buffers
    codes: list[int] | bytes = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    homes: list[int] | tuple[int, ...] = ()  # with PLACED: buffer numbers, and offsets there
    offsets: list[int] | tuple[int, ...] = ()
    stream: bytes | memoryview = b""
    nbytes: list[int] | None = None  # of the slots, once they were asked for
    keys: tuple[str, ...] | None = None  # of a dict, once they were loaded

    def slot_bytes(self) -> list[int]:
        """Bytes of each slot.

        Raises:
            ProtocolError: a slot cannot be.
        """
        if self.nbytes is None:
            self.nbytes = list(map(nbytes_of, self.codes, self.shapes))
        return self.nbytes

    @property
    def has_values(self) -> bool:
        """Whether the stream is the values of one message, not a part of its structure."""
        return self.form is Form.PICKLED


REMEMBERED = 64
"""Descriptions of single tensors that are remembered: a training loop sends the same ones again."""


def _seal(body: bytes) -> bytes:
    if len(body) + CRC_SIZE >= MAX_META:
        raise PayloadError(
            f"the description of the object takes {len(body)} bytes, more than {MAX_META}: "
            "send it in several messages, or with fewer and larger tensors"
        )
    return _CRC.pack(zlib.crc32(body)) + body


def _unseal(meta: bytes | memoryview, least: int) -> memoryview:
    view = memoryview(meta)
    if not least <= len(view) < MAX_META:
        raise ProtocolError(f"the description of a message has {len(view)} bytes")
    if zlib.crc32(view[CRC_SIZE:]) != _CRC.unpack_from(view)[0]:
        raise ProtocolError("the description of a message is damaged: its checksum differs")
    return view


def write_object(table: Table) -> bytes:
    """The meta of an object.

    Raises:
        PayloadError: it would be 16 MiB or more.
    """
    sizes, shapes = table.sizes, table.shapes
    count, slots = len(sizes), len(shapes)
    if not slots and not count:
        head = _OBJECT.pack(table.form, table.flags, table.device, 0, 0, 0, 0)
        return _seal(head + table.stream)
    dims = [dim for shape in shapes for dim in shape]
    placed = b""
    if table.flags & PLACED:
        placed = struct.pack(f"<{slots}I{slots}Q", *table.homes, *table.offsets)
    head = _OBJECT.pack(table.form, table.flags, table.device, 0, count, slots, len(dims))
    columns = struct.pack(f"<{count}Q{len(dims)}Q", *sizes, *dims)
    ranks = bytes(map(len, shapes))
    return _seal(b"".join((head, columns, placed, bytes(table.codes), ranks, table.stream)))


def write_plain(stream: bytes | memoryview) -> bytes:
    """The meta of an object without buffers, as ``write_object`` would write it.

    Args:
        stream: its pickle stream, much shorter than a meta may be.
    """
    body = _PLAIN + stream
    return _CRC.pack(zlib.crc32(body)) + body


def read_plain(meta: bytes | memoryview) -> bytes | memoryview | None:
    """The pickle stream of an object without buffers; None if it has some.

    Raises:
        ProtocolError: the meta is damaged.
    """
    if meta[CRC_SIZE:_START] != _PLAIN:
        return None
    return _unseal(meta, _START)[_START:]


def read_sizes(meta: bytes | memoryview) -> tuple[int, ...]:
    """Sizes of the buffers of an object in bytes.

    Raises:
        ProtocolError: they cannot be.
    """
    view = _unseal(meta, _START)
    form, _, _, _, count, _, _ = _OBJECT.unpack_from(view, CRC_SIZE)
    if form not in _FORMS:
        raise ProtocolError("a message has an unknown form")
    return _sizes(view, count)


def _sizes(view: memoryview, count: int) -> tuple[int, ...]:
    if not count:
        return ()
    if _START + 8 * count > len(view):
        raise ProtocolError("the description of a message is too short for its buffers")
    sizes = struct.unpack_from(f"<{count}Q", view, _START)
    if sum(sizes) > MAX_BYTES:
        raise ProtocolError("the buffers of a message would be larger than memory can be")
    return sizes


def read_object(meta: bytes | memoryview) -> Table:
    """The table of an object; columns have their length, sizes and places are possible.

    Raises:
        ProtocolError: the meta is damaged, or contradicts itself.
    """
    view = _unseal(meta, _START)
    form, flags, device, _, count, slots, total = _OBJECT.unpack_from(view, CRC_SIZE)
    if form not in _FORMS or device >= len(DEVICES) or flags & ~(STREAM_IN_BUFFER | PLACED):
        raise ProtocolError("a message has an unknown form, device or flag")
    if not slots and not count:
        if total or flags:
            raise ProtocolError("the description of a message contradicts itself")
        return Table(_FORMS[form], flags, device, stream=view[_START:])
    sizes = _sizes(view, count)
    at = _START + 8 * count
    placed = 12 * slots if flags & PLACED else 0
    end = at + 8 * total + placed + 2 * slots
    if end > len(view):
        raise ProtocolError("the description of a message is too short for its table")
    dims = struct.unpack_from(f"<{total}Q", view, at)
    at += 8 * total
    homes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    if placed:
        both = struct.unpack_from(f"<{slots}I{slots}Q", view, at)
        homes, offsets = both[:slots], both[slots:]
        at += placed
    codes = bytes(view[at : at + slots])
    ranks = view[at + slots : end]
    if sum(ranks) != total:
        raise ProtocolError("the description of a message contradicts itself about dimensions")
    shapes, at = [], 0
    for rank in ranks:
        shapes.append(dims[at : at + rank])
        at += rank
    return Table(_FORMS[form], flags, device, sizes, codes, shapes, homes, offsets, view[end:])


@functools.lru_cache(maxsize=4096)
def nbytes_of(code: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor by its dtype's number and shape.

    Raises:
        ProtocolError: no such dtype here, or too large.
    """
    known = DTYPES.get(code)
    if known is None:
        if code == RAW and len(shape) == 1:
            return shape[0]
        raise ProtocolError(f"a message has a dtype (number {code}) that torch here does not know")
    nbytes = math.prod(shape) * known[1]
    if nbytes > MAX_BYTES:
        raise ProtocolError("a tensor of a message would be larger than memory can be")
    return nbytes


@functools.lru_cache(REMEMBERED)
def write_tensor(form: Form, device: int, code: int, shape: tuple[int, ...]) -> bytes:
    """The meta of a message that is one tensor, in one buffer."""
    rank = len(shape)
    return _seal(struct.pack(_TENSOR_FORMATS[rank], form, device, code, rank, *shape))


def is_tensor(meta: bytes | memoryview) -> bool:
    """Whether an object is one tensor and nothing else; then ``read_tensor`` reads it."""
    return len(meta) > CRC_SIZE and meta[CRC_SIZE] == Form.TENSOR


def read_tensor(form: Form, meta: bytes | memoryview) -> tuple[int, int, tuple[int, ...], int]:
    """Device, dtype's number, shape and bytes of a message that is one tensor.

    Raises:
        ProtocolError: the meta is damaged, or there can be no such tensor.
    """
    view = _unseal(meta, _TENSOR_START)
    found, device, code, rank = _TENSOR.unpack_from(view, CRC_SIZE)
    if (
        found != form
        or len(view) != _TENSOR_START + 8 * rank
        or device >= len(DEVICES)
        or code == RAW
    ):
        raise ProtocolError("the description of a tensor contradicts itself")
    shape = struct.unpack_from(f"<{rank}Q", view, _TENSOR_START)
    nbytes = nbytes_of(code, shape)
    if not nbytes and max(shape) > MAX_BYTES:
        raise ProtocolError("a tensor has a dimension that cannot be")
    return device, code, shape, nbytes
