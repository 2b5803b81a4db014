"""The heads of the frames that the lanes of two members exchange.

An envelope's head is a fixed part and the message's meta; its body holds the buffers of a message
that rides along, and is empty for one that goes by a bulk route. The structure of a message can be
kept under a number, and later ones of the same structure name it (see ``schemas.py``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import ProtocolError
from ..payload import Kind

BULK = 1  # the flags of an envelope: its buffers go by the bulk route
KEEP = 2  # its structure is to be kept under the number that follows
KNOWN = 4  # its structure is the one that was kept under the number that follows
FAR = 8  # its tensors belong in memory of a device
BY_DEVICE = 16  # its buffers go by the bulk route for such memory; with BULK and FAR

_ENVELOPE = struct.Struct("<BBI")  # kind, flags, bytes it takes of the receiver's window
_NUMBERED = struct.Struct("<BBIB")  # the same, and the number of its structure
_CREDIT = struct.Struct("<BIQ")  # whole window or given back, messages, bytes


@dataclass(slots=True)
class Envelope:
    """Read from the head of an ENVELOPE frame.

    Args:
        kind: which pair of calls it belongs to.
        bulk: whether its buffers go by the bulk route.
        charge: bytes it takes of the receiver's window.
        meta: with ``known``, without its structure.
        number: of the structure; -1 where it has none.
        known: whether the structure was kept under the number before, and is left out.
        far: ``FAR`` where its tensors belong in memory of a device, with ``BY_DEVICE`` where its
            buffers go by the bulk route for such memory; else 0.
    """

    kind: Kind
    bulk: bool
    charge: int
    meta: bytes
    number: int = -1
    known: bool = False
    far: int = 0

    @classmethod
    def read(cls, head: bytes) -> Envelope:
        """Raises: ProtocolError: the head is too short, or the kind or a flag unknown."""
        try:
            code, flags, charge = _ENVELOPE.unpack_from(head)
            kind, bulk = _KINDS[code], flags & BULK != 0
            if flags <= BULK:
                return cls(kind, bulk, charge, head[_ENVELOPE.size :])
            far, kept = flags & _MEMORY, flags & _STRUCTURE
            if flags <= _ALL and far != BY_DEVICE and (bulk or far != _MEMORY):
                if not kept:
                    return cls(kind, bulk, charge, head[_ENVELOPE.size :], far=far)
                if kept != _STRUCTURE and kind is Kind.OBJECT:
                    number, meta = head[_ENVELOPE.size], head[_NUMBERED.size :]
                    return cls(kind, bulk, charge, meta, number, kept == KNOWN, far)
        except (struct.error, LookupError) as error:
            raise ProtocolError("an envelope of the peer cannot be read") from error
        raise ProtocolError("an envelope of the peer cannot be read: its flags cannot be")


_STRUCTURE = KEEP | KNOWN
_MEMORY = FAR | BY_DEVICE
_ALL = BULK | _STRUCTURE | _MEMORY
_KINDS = {kind.value: kind for kind in Kind}


def envelope_head(kind: Kind, meta: bytes, charge: int, *, bulk: bool, far: int = 0) -> bytes:
    """The head of an ENVELOPE frame.

    Args:
        kind: which pair of calls it belongs to.
        meta: of the message.
        charge: bytes it takes of the receiver's window.
        bulk: whether its buffers go by a bulk route.
        far: ``FAR``, with or without ``BY_DEVICE``, where its tensors are on a device.
    """
    return _ENVELOPE.pack(kind, bulk | far, charge) + meta


def numbered_head(flags: int, number: int, meta: bytes, charge: int) -> bytes:
    """The head of the ENVELOPE frame of an object whose structure has a number.

    Args:
        flags: with ``KEEP`` or ``KNOWN``.
        number: of the structure.
        meta: with ``KNOWN``, without the structure.
        charge: bytes it takes of the receiver's window.
    """
    return _NUMBERED.pack(Kind.OBJECT, flags, charge, number) + meta


def credit_head(messages: int, nbytes: int, *, first: bool = False) -> bytes:
    """The head of a CREDIT frame: the whole window (first), or what was taken since."""
    return _CREDIT.pack(first, messages, nbytes)


def read_credit(head: bytes) -> tuple[bool, int, int]:
    """First, messages, bytes.

    Raises:
        ProtocolError: the head is not of that form.
    """
    try:
        first, messages, nbytes = _CREDIT.unpack(head)
    except struct.error as error:
        raise ProtocolError("a credit of the peer cannot be read") from error
    return bool(first), messages, nbytes
