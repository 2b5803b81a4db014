"""The bytes of frames: encoding, and a decoder that takes any fragmentation.

No I/O and no event loop. The decoder offers memory to be filled and returns whole frames, so a
socket can receive straight into it: a small frame is copied once out of the receive buffer, the
bulk of a large one is never copied after the kernel. Everything that the peer declares is checked
before memory is set aside for it.

Between two reads nothing is left in the receive buffer, so decoders may share one: 256 idle links
then cost one buffer and not 256. What is here of a frame is copied out until the rest comes; for a
large one its own memory is made at once, and what is still to come is received into that.

Rejected: collecting chunks and joining them (two copies of every large body); handing out
``bytearray`` (it may be resized under a reader, and ctypes does not take it as memory).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from ..errors import ProtocolError
from .base import MAX_BODY, MAX_HEAD, Frame, FrameKind

MAGIC = 0xA10C
VERSION = 2
HEADER = struct.Struct(">HBBQIQ")  # magic, version, kind, sequence, bytes of head, bytes of body
HEADER_SIZE = HEADER.size

BUFFER_SIZE = 256 * 1024
"""Bytes of a receive buffer."""

WAITS = 128 * 1024
"""A frame of up to so many bytes waits for its rest as a copy, a larger one in its own memory.

Two copies of a part of 64 KiB cost less than one more read: with 4 KiB here, one-way messages of
64 KB fell by 6 % (two cores, uvloop)."""

_KINDS = {int(kind): kind for kind in FrameKind}

_pack_header = HEADER.pack
_unpack_header = HEADER.unpack_from

_bytes_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_bytes_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


def encode_header(kind: int, sequence: int, head_size: int, body_size: int) -> bytes:
    """The fixed header of a frame; sizes in bytes."""
    return _pack_header(MAGIC, VERSION, kind, sequence, head_size, body_size)


def encode(kind: int, sequence: int, head: Any = b"", body: Any = b"") -> bytes:
    """A whole frame as one piece of bytes."""
    header = _pack_header(MAGIC, VERSION, kind, sequence, len(head), len(body))
    return b"".join((header, head, body))


def _unfilled(size: int) -> tuple[bytes, memoryview]:
    """Fresh bytes of ``size`` > 0, and a view through which they are filled before use.

    The C interface allows writing to a bytes object that nobody else has seen yet. It spares
    zeroing the memory, and copying it to make it immutable.
    """
    fresh: bytes = _bytes_new(None, size)
    return fresh, _memory_view(_bytes_address(fresh), size, _PYBUF_WRITE)


def receive_buffer() -> memoryview:
    """Memory for decoders to receive into."""
    return memoryview(bytearray(BUFFER_SIZE))


class Decoder:
    """Turns received bytes into frames, whatever pieces they come in.

    Fill some of ``buffer()`` from the front, call ``advance`` with the count, take the frames.

    Args:
        memory: the receive buffer; others may use it, but not between ``buffer`` and ``advance``.

    Attributes:
        error: set once the bytes broke the protocol; no frame comes out after that.
    """

    __slots__ = ("_bulk", "_filled", "_frame", "_rest", "_view", "error")

    def __init__(self, memory: memoryview | None = None) -> None:
        self._view = receive_buffer() if memory is None else memory
        self._rest = b""  # what is here of a frame that waits
        self._frame: Frame | None = None  # a large one, under way
        self._bulk: list[memoryview] = []  # parts of it still to fill
        self._filled = 0  # of the first of these
        self.error: ProtocolError | None = None

    @property
    def in_frame(self) -> bool:
        """Whether part of a frame is here, and the rest of it is not."""
        return self._frame is not None or bool(self._rest)

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._frame is not None:
            return self._bulk[0][self._filled :]
        rest = self._rest
        if rest:
            self._view[: len(rest)] = rest
            return self._view[len(rest) :]
        return self._view

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Copy ``data`` in and return the frames that it completes."""
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest and self.error is None:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            frames += self.advance(count)
        return frames

    def advance(self, count: int) -> list[Frame]:
        """Take ``count`` bytes that were put into ``buffer()``; return the frames they complete."""
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        if self._frame is not None:
            if self._filled_by(count):
                frames.append(self._frame)
                self._frame = None
            return frames
        view = self._view
        start = 0
        end = len(self._rest) + count
        while end - start >= HEADER_SIZE:
            magic, version, code, sequence, head_size, body_size = _unpack_header(view, start)
            kind = _KINDS.get(code)
            if (
                magic != MAGIC
                or version != VERSION
                or kind is None
                or head_size > MAX_HEAD
                or body_size > MAX_BODY
            ):
                self._refuse(magic, version, code, head_size, body_size)
                return frames
            head_start = start + HEADER_SIZE
            body_start = head_start + head_size
            body_end = body_start + body_size
            if body_end > end:
                if body_end - start > WAITS:
                    frame = Frame(kind, sequence, b"", b"")
                    self._begin(frame, head_size, body_size, view[head_start:end])
                    return frames
                break
            frames.append(
                Frame(
                    kind,
                    sequence,
                    view[head_start:body_start].tobytes() if head_size else b"",
                    view[body_start:body_end].tobytes() if body_size else b"",
                )
            )
            start = body_end
        self._rest = view[start:end].tobytes() if start < end else b""
        return frames

    def _begin(self, frame: Frame, head_size: int, body_size: int, rest: memoryview) -> None:
        """Set memory aside for a frame that is not here whole, and move in what is."""
        self._rest = b""
        self._frame = frame
        if head_size:
            frame.head, view = _unfilled(head_size)
            self._bulk.append(view)
        if body_size:
            frame.body, view = _unfilled(body_size)
            self._bulk.append(view)
        while rest:
            part = self._bulk[0]
            count = min(len(part), len(rest))
            part[:count] = rest[:count]
            rest = rest[count:]
            if self._filled_by(count):
                raise AssertionError("a frame that was in the buffer whole was set aside")

    def _filled_by(self, count: int) -> bool:
        """Count bytes put into the large frame; return whether it is whole now."""
        self._filled += count
        if self._filled == len(self._bulk[0]):
            self._filled = 0
            self._bulk.pop(0).release()
        return not self._bulk

    def _refuse(self, magic: int, version: int, code: int, head_size: int, body_size: int) -> None:
        self._rest = b""
        if magic != MAGIC:
            what = f"its frame opens with {magic:#06x} where {MAGIC:#06x} is due"
        elif version != VERSION:
            what = f"its frame is of version {version}, this side speaks {VERSION}"
        elif code not in _KINDS:
            what = f"its frame is of an unknown kind, {code}"
        else:
            what = (
                f"its frame declares {head_size} bytes of head and {body_size} of body, "
                f"more than {MAX_HEAD} and {MAX_BODY}"
            )
        self.error = ProtocolError(f"the peer broke the protocol: {what}")
