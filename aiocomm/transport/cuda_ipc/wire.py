"""What the two ends of a cuda_ipc route tell each other, as bytes.

The sender's **offer** when the route is opened: the handles of its events, and of a piece of memory
that the receiver tries to open. The **body** of each envelope: which event is recorded behind the
bytes, and where they lie. Receipts are counts (see ``transfer``). Knows nothing of devices.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

HANDLE = 64
"""Bytes of a handle: what CUDA's are."""

_OFFER = struct.Struct("!H")  # events
_BODY = struct.Struct("!HII")  # number of the event, allocations, pieces
_PIECE = struct.Struct("!IQQ")  # number of the allocation, offset, bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes in memory of the sender.

    Attributes:
        handle: of the allocation.
        offset: in it.
        nbytes: how many; not 0.
    """

    handle: bytes
    offset: int
    nbytes: int


def pack_offer(events: Sequence[bytes], probe: bytes) -> bytes:
    """The offer, from the handles of the events and of a piece of memory."""
    return _OFFER.pack(len(events)) + b"".join(events) + probe


def parse_offer(value: bytes) -> tuple[list[bytes], bytes]:
    """The handles of the events, and that of the memory.

    Raises:
        ProtocolError: it is not of that form.
    """
    try:
        (count,) = _OFFER.unpack_from(value)
    except struct.error as error:
        raise ProtocolError("an offer of cuda_ipc cannot be read") from error
    if not count or len(value) != _OFFER.size + (count + 1) * HANDLE:
        raise ProtocolError("an offer of cuda_ipc is not as long as it says")
    *events, probe = _handles(value, _OFFER.size, count + 1)
    return events, probe


def pack_body(slot: int, pieces: Sequence[Piece]) -> bytes:
    """The body of an envelope; each allocation is named once."""
    numbers: dict[bytes, int] = {}
    table = [
        _PIECE.pack(numbers.setdefault(each.handle, len(numbers)), each.offset, each.nbytes)
        for each in pieces
    ]
    return b"".join((_BODY.pack(slot, len(numbers), len(pieces)), *numbers, *table))


def parse_body(body: bytes) -> tuple[int, list[Piece]]:
    """The number of the event, and the pieces.

    Raises:
        ProtocolError: it is not of that form.
    """
    try:
        slot, allocations, pieces = _BODY.unpack_from(body)
        end = _BODY.size + allocations * HANDLE
        if len(body) != end + pieces * _PIECE.size:
            raise ProtocolError("an envelope of cuda_ipc is not as long as it says")
        handles = _handles(body, _BODY.size, allocations)
        table = _PIECE.iter_unpack(body[end:])
        return slot, [Piece(handles[number], offset, nbytes) for number, offset, nbytes in table]
    except (struct.error, IndexError) as error:
        raise ProtocolError("an envelope of cuda_ipc cannot be read") from error


def _handles(value: bytes, start: int, count: int) -> list[bytes]:
    ends = range(start, start + count * HANDLE, HANDLE)
    return [bytes(value[at : at + HANDLE]) for at in ends]
