"""The bytes of frames: encoding, and a decoder that takes any fragmentation.

No I/O and no event loop. The decoder offers memory to be filled and returns whole frames, so a
socket can receive straight into it: a small frame is copied once out of the receive buffer, the
bulk of a large one is never copied after the kernel. Everything that the peer declares is checked
before memory is set aside for it.

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
"""Bytes of receive buffer per link. Only the pages that bytes ever reach become real memory."""

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


class Decoder:
    """Turns received bytes into frames, whatever pieces they come in.

    Fill some of ``buffer()`` from the front, call ``advance`` with the count, take the frames.

    Attributes:
        error: set once the bytes broke the protocol; no frame comes out after that.
    """

    __slots__ = ("_bulk", "_end", "_filled", "_frame", "_memory", "_start", "_view", "error")

    def __init__(self) -> None:
        self._memory = bytearray(BUFFER_SIZE)
        self._view = memoryview(self._memory)
        self._start = 0  # of what is received and not yet decoded
        self._end = 0
        self._frame: Frame | None = None  # too large for the buffer, under way
        self._bulk: list[memoryview] = []  # parts of it still to fill
        self._filled = 0  # of the first of these
        self.error: ProtocolError | None = None

    @property
    def in_frame(self) -> bool:
        """Whether part of a frame is here, and the rest of it is not."""
        return self._frame is not None or self._end > self._start

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._frame is not None:
            return self._bulk[0][self._filled :]
        return self._view[self._end :] if self._end else self._view

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
        start = self._start
        end = self._end = self._end + count
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
                if body_end - start > BUFFER_SIZE:
                    self._begin(Frame(kind, sequence, b"", b""), head_start, head_size, body_size)
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
        if start == end:
            self._start = self._end = 0
        else:
            self._keep(start)
        return frames

    def _keep(self, start: int) -> None:
        """Leave a part of a frame in the buffer, with room behind it for the rest."""
        if start and self._end > BUFFER_SIZE // 2:
            rest = self._end - start
            self._view[:rest] = self._view[start : self._end]
            start, self._end = 0, rest
        self._start = start

    def _begin(self, frame: Frame, start: int, head_size: int, body_size: int) -> None:
        """Set memory aside for a frame larger than the buffer, and move in what is here of it."""
        rest = self._view[start : self._end]
        self._start = self._end = 0
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
                raise AssertionError("a frame larger than the buffer was in the buffer whole")

    def _filled_by(self, count: int) -> bool:
        """Count bytes put into the large frame; return whether it is whole now."""
        self._filled += count
        if self._filled == len(self._bulk[0]):
            self._filled = 0
            self._bulk.pop(0).release()
        return not self._bulk

    def _refuse(self, magic: int, version: int, code: int, head_size: int, body_size: int) -> None:
        self._start = self._end = 0
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
