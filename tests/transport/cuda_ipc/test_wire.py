"""What the ends of a cuda_ipc route tell each other, there and back, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.errors import ProtocolError
from aiocomm.transport.cuda_ipc.wire import (
    HANDLE,
    Piece,
    pack_body,
    pack_offer,
    parse_body,
    parse_offer,
)

FIRST, SECOND, THIRD = (bytes([number]) * HANDLE for number in range(3))
PIECES = [Piece(FIRST, 0, 5), Piece(SECOND, 2**40, 2**33), Piece(FIRST, 7, 1)]


def test_there_and_back() -> None:
    assert parse_offer(pack_offer([FIRST, SECOND], THIRD)) == ([FIRST, SECOND], THIRD)
    assert parse_body(pack_body(3, PIECES)) == (3, PIECES)
    assert parse_body(pack_body(0, [])) == (0, [])


def test_an_allocation_is_named_once() -> None:
    one, two = (pack_body(0, [Piece(FIRST, n, 1) for n in range(count)]) for count in (1, 2))
    assert len(two) - len(one) < HANDLE


@pytest.mark.parametrize("cut", [0, 1, 5, HANDLE, -1])
def test_what_is_cut_off_is_refused(cut: int) -> None:
    for parse, whole in (
        (parse_offer, pack_offer([FIRST], SECOND)),
        (parse_body, pack_body(3, PIECES)),
    ):
        with pytest.raises(ProtocolError, match="of cuda_ipc"):
            parse(whole[:cut])
        with pytest.raises(ProtocolError, match="not as long as it says"):
            parse(whole + b"x")


def test_an_offer_of_no_event_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not as long"):
        parse_offer(pack_offer([], FIRST))


def test_an_allocation_that_is_not_named_is_refused() -> None:
    body = bytearray(pack_body(0, [Piece(FIRST, 0, 5)]))
    body[-20:-16] = (1).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match="cannot be read"):
        parse_body(bytes(body))


@given(st.binary(max_size=200))
def test_rubbish_is_refused_and_nothing_else_happens(value: bytes) -> None:
    for parse in (parse_offer, parse_body):
        with contextlib.suppress(ProtocolError):
            parse(value)
