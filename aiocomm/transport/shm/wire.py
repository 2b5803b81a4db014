"""What the two ends of a shared-memory route say to each other.

While it opens, in STORE frames::

    receiver  mailbox   name of its mailbox, and the token that it asks for
    sender    ring      bytes of the ring (segment 0, which lies in the mailbox by now), and bytes
                        that the receiver may keep lent at a time

Then the sender says in CHUNK frames, one piece a frame: op, segment, offset, bytes; the first piece
of a message may come in the envelope instead, whose body is empty otherwise::

    COPY    the next bytes of the message at work lie there: take them, then give them back
    LEND    the whole message lies there: take it or keep it, give it back when it is not used
    ALIAS   the next buffer of the message lies there, and the sender uses that memory too
    FORGET  that segment is not used any more

and the receiver gives back the pieces that are its own no more in GRANT frames: their numbers, in
any order. Pieces (all but FORGET) are numbered from 0 in each direction. The buffers of a message
lie as ``lay_out`` says; a piece begins where the one before it ends, aligned.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from ...errors import ProtocolError
from .mailbox import TOKEN_SIZE

_PIECE = struct.Struct("<BIQQ")
_RING = struct.Struct("<QQ")
_NUMBER: Final = 8  # bytes

RING_NUMBER: Final = 0


class Op(enum.IntEnum):
    """What a piece is."""

    COPY = 1
    LEND = 2
    ALIAS = 3
    FORGET = 4


_OPS = {op.value: op for op in Op}


@dataclass(slots=True)
class Piece:
    """Some bytes of a segment."""

    op: Op
    segment: int
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        """The head of a CHUNK frame."""
        return _PIECE.pack(self.op, self.segment, self.offset, self.nbytes)

    @classmethod
    def unpack(cls, head: bytes) -> Piece:
        """Raises: ProtocolError: it is no piece."""
        try:
            op, segment, offset, nbytes = _PIECE.unpack(head)
            return cls(_OPS[op], segment, offset, nbytes)
        except (struct.error, KeyError) as error:
            raise ProtocolError("a piece of the peer cannot be read") from error


def pack_mailbox(name: str, token: bytes) -> bytes:
    """What the receiver says first."""
    return token + name.encode()


def unpack_mailbox(value: bytes) -> tuple[str, bytes]:
    """Name and token.

    Raises:
        ProtocolError: it is not that.
    """
    try:
        name = value[TOKEN_SIZE:].decode("ascii")
    except ValueError:
        name = ""
    if not 0 < len(name) <= 100:
        raise ProtocolError("the peer's mailbox for memory has no usable name")
    return name, value[:TOKEN_SIZE]


def pack_ring(nbytes: int, lend_limit: int) -> bytes:
    """What the sender answers."""
    return _RING.pack(nbytes, lend_limit)


def unpack_ring(value: bytes) -> tuple[int, int]:
    """Bytes of the ring, bytes that may be kept lent.

    Raises:
        ProtocolError: it is not that.
    """
    if len(value) != _RING.size:
        raise ProtocolError("the peer's ring of memory cannot be read")
    nbytes, lend_limit = _RING.unpack(value)
    return nbytes, lend_limit


def pack_numbers(numbers: list[int]) -> bytes:
    """The head of a GRANT frame."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(head: bytes) -> tuple[int, ...]:
    """Raises: ProtocolError: it has none, or a part of one."""
    count, rest = divmod(len(head), _NUMBER)
    if rest or not count:
        raise ProtocolError("what the peer gives back cannot be read")
    return struct.unpack(f"<{count}Q", head)
