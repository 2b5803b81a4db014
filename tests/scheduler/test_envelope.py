"""Heads of frames there and back, and what is not one."""

from __future__ import annotations

import pytest

from aiocomm.errors import ProtocolError
from aiocomm.payload import Kind
from aiocomm.scheduler.envelope import (
    KEEP,
    KNOWN,
    Envelope,
    credit_head,
    envelope_head,
    numbered_head,
    read_credit,
)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("charge", [0, 7, 2**32 - 1])
def test_envelopes_there_and_back(kind: Kind, bulk: bool, charge: int) -> None:
    read = Envelope.read(envelope_head(kind, b"meta", charge, bulk=bulk))
    assert read == Envelope(kind, bulk, charge, b"meta")
    assert read.bulk is bulk


@pytest.mark.parametrize("flags", [KEEP, KNOWN])
@pytest.mark.parametrize("bulk", [True, False])
def test_numbers_of_structures_there_and_back(flags: int, bulk: bool) -> None:
    read = Envelope.read(numbered_head(flags | bulk, 255, b"meta", 7))
    assert read == Envelope(Kind.OBJECT, bulk, 7, b"meta", 255, flags == KNOWN)
    assert read.bulk is bulk


def test_a_memoryview_is_a_head_too() -> None:
    head = envelope_head(Kind.OBJECT, b"m", 1, bulk=False)
    assert bytes(Envelope.read(memoryview(head)).meta) == b"m"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "head",
    [
        *(b"", b"\1", b"\1\0\0\0\0", b"\0\0\0\0\0\0meta", b"\xff\0\0\0\0\0"),
        *(b"\2\2\0\0\0\0", b"\2\4\0\0\0\0"),  # no number
        *(b"\2\6\0\0\0\0\0meta", b"\2\x20\0\0\0\0\0meta"),  # flags that cannot be
        *(
            b"\2\x11\0\0\0\0\0meta",
            b"\2\x18\0\0\0\0\0meta",
        ),  # by a device, not far or bulk
        b"\1\2\0\0\0\0\0meta",  # a send_tensor with a structure
    ],
)
def test_what_is_no_envelope_is_the_peers_fault(head: bytes) -> None:
    with pytest.raises(ProtocolError, match="an envelope of the peer cannot be read"):
        Envelope.read(head)


@pytest.mark.parametrize("first", [True, False])
def test_credits_there_and_back(first: bool) -> None:
    head = credit_head(2**32 - 1, 2**64 - 1, first=first)
    assert read_credit(head) == (first, 2**32 - 1, 2**64 - 1)


@pytest.mark.parametrize("head", [b"", b"\0" * 12, b"\0" * 14])
def test_what_is_no_credit_is_the_peers_fault(head: bytes) -> None:
    with pytest.raises(ProtocolError, match="a credit of the peer cannot be read"):
        read_credit(head)
