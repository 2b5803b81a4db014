"""Structures that a direction knows by number, so that a training loop describes its message once.

Most of a meta says which tensors there are, and is the same at every step; only the values around
them differ. The sender numbers the last few structures that it has sent, in the order in which
envelopes leave, and decides alone which one a new one takes the place of. The receiver keeps what
it is told to under the number it is told. Both start empty with the direction and end with it.

The receiver keeps structures as read and checked, which spares it more time than the wire. The
checksum of a meta covers its structure also where that is left out, so a structure that is not the
sender's is found. Rejected: numbers by content (a hash can be wrong, and both sides would have to
agree on what is dropped), and keeping only what was sent twice (a loop's second step is the first
that can profit).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from ..payload_table import CRC_SIZE, Table, read_object
from .envelope import KEEP, KNOWN, envelope_head, numbered_head

if TYPE_CHECKING:
    from ..payload import Packed
    from .envelope import Envelope

SCHEMAS = 16
"""Structures that are known at a time: more than a loop has kinds of messages."""
LEAST = 32
"""Bytes from which a structure is numbered: one that has no tensor is shorter."""
MOST = 512 * 1024
"""Bytes up to which one is: enough for 10,000 tensors, and it stays in memory on both sides."""


class SentSchemas:
    """The sender's side: structures by their bytes, the one that was longest unused first."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def head(self, packed: Packed, charge: int, *, bulk: bool, far: int = 0) -> bytes:
        """The head of the envelope that leaves next; it has to leave. See ``envelope_head``."""
        meta, end = packed.meta, packed.structure
        if not LEAST <= end <= MOST:
            return envelope_head(packed.kind, meta, charge, bulk=bulk, far=far)
        numbers, structure = self._numbers, meta[CRC_SIZE:end]
        number = numbers.get(structure)
        if number is not None:
            numbers.move_to_end(structure)
            return numbered_head(KNOWN | bulk | far, number, meta[:CRC_SIZE] + meta[end:], charge)
        number = len(numbers)
        if number == SCHEMAS:
            _, number = numbers.popitem(last=False)
        numbers[structure] = number
        return numbered_head(KEEP | bulk | far, number, meta, charge)


class KeptSchemas:
    """The receiver's side: structures as they were read, by number."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Table, int]] = {}  # and the checksum of each

    def read(self, envelope: Envelope) -> tuple[Table, bytes | memoryview]:
        """The table of a message that has a number, and its stream.

        Raises:
            ProtocolError: the meta is damaged, or the number is not that of its structure.
        """
        if envelope.known:
            return self._recall(envelope)
        number, meta = envelope.number, memoryview(envelope.meta)
        if number >= SCHEMAS:
            raise ProtocolError(f"structure {number} is to be kept, of at most {SCHEMAS}")
        table = read_object(meta)
        stream, end = table.stream, len(meta)
        if table.has_values:
            end -= len(stream)
            table = replace(table, stream=b"")
        if end > MOST:
            raise ProtocolError(f"a structure of {end} bytes is to be kept, of at most {MOST}")
        self._kept[number] = table, zlib.crc32(meta[CRC_SIZE:end])
        return table, stream

    def _recall(self, envelope: Envelope) -> tuple[Table, bytes | memoryview]:
        number, meta = envelope.number, memoryview(envelope.meta)
        if number not in self._kept:
            raise ProtocolError(f"a message has structure {number}, which nobody has sent")
        table, checksum = self._kept[number]
        stream, given = meta[CRC_SIZE:], int.from_bytes(meta[:CRC_SIZE], "little")
        if len(meta) < CRC_SIZE or zlib.crc32(stream, checksum) != given:
            raise ProtocolError(f"a message does not have structure {number}, or is damaged")
        if table.has_values:
            return table, stream
        if stream:
            raise ProtocolError(f"a message has more than its structure {number}")
        return table, table.stream
