"""The heads of the frames that the lanes of two members exchange.

An envelope's head is a fixed part and the message's meta; its body holds the buffers of a message
that rides along, and is empty for one that goes by a bulk route.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import ProtocolError
from ..payload import Kind

_ENVELOPE = struct.Struct("<BBI")  # kind, bulk, bytes it takes of the receiver's window
_CREDIT = struct.Struct("<BIQ")  # whole window or given back, messages, bytes


@dataclass(slots=True)
class Envelope:
    """Read from the head of an ENVELOPE frame."""

    kind: Kind
    bulk: bool
    charge: int
    meta: bytes

    @classmethod
    def read(cls, head: bytes) -> Envelope:
        """Raises: ProtocolError: the head is too short or the kind unknown."""
        try:
            kind, bulk, charge = _ENVELOPE.unpack_from(head)
            return cls(_KINDS[kind], bool(bulk), charge, head[_ENVELOPE.size :])
        except (struct.error, KeyError) as error:
            raise ProtocolError("an envelope of the peer cannot be read") from error


_KINDS = {kind.value: kind for kind in Kind}


def envelope_head(kind: Kind, meta: bytes, charge: int, *, bulk: bool) -> bytes:
    """The head of an ENVELOPE frame."""
    return _ENVELOPE.pack(kind, bulk, charge) + meta


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
