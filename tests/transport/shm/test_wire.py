"""What the two ends say comes back as it went, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.errors import ProtocolError
from aiocomm.transport.shm.mailbox import TOKEN_SIZE
from aiocomm.transport.shm.wire import (
    Op,
    Piece,
    pack_mailbox,
    pack_numbers,
    pack_ring,
    unpack_mailbox,
    unpack_numbers,
    unpack_ring,
)

words = st.integers(0, 2**64 - 1)


@given(st.sampled_from(Op), st.integers(0, 2**32 - 1), words, words)
def test_pieces(op: Op, segment: int, offset: int, nbytes: int) -> None:
    piece = Piece(op, segment, offset, nbytes)
    assert Piece.unpack(piece.pack()) == piece


@given(st.binary(max_size=40))
def test_other_bytes_are_no_piece(data: bytes) -> None:
    if len(data) == 21 and 1 <= data[0] <= len(Op):
        return
    with pytest.raises(ProtocolError, match="piece"):
        Piece.unpack(data)


@given(st.lists(words, min_size=1, max_size=50))
def test_numbers(numbers: list[int]) -> None:
    assert list(unpack_numbers(pack_numbers(numbers))) == numbers


@pytest.mark.parametrize("head", [b"", b"1234567", bytes(9)])
def test_other_bytes_are_no_numbers(head: bytes) -> None:
    with pytest.raises(ProtocolError, match="gives back"):
        unpack_numbers(head)


def test_openings() -> None:
    token = bytes(range(TOKEN_SIZE))
    assert unpack_mailbox(pack_mailbox("name", token)) == ("name", token)
    assert unpack_ring(pack_ring(5, 2**63)) == (5, 2**63)


@pytest.mark.parametrize("value", [b"", bytes(TOKEN_SIZE), bytes(TOKEN_SIZE) + b"\xff", b"x" * 200])
def test_a_mailbox_has_a_name(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="no usable name"):
        unpack_mailbox(value)


@pytest.mark.parametrize("value", [b"", bytes(15), bytes(17)])
def test_a_ring_is_two_numbers(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="ring"):
        unpack_ring(value)
