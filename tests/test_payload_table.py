"""The meta reads back as it was written, and believes nobody."""

from __future__ import annotations

import math
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.errors import PayloadError, ProtocolError
from aiocomm.payload_bytes import CODES, DTYPES, RAW
from aiocomm.payload_table import (
    MAX_BYTES,
    MAX_META,
    PLACED,
    STREAM_IN_BUFFER,
    Form,
    Table,
    is_tensor,
    nbytes_of,
    read_object,
    read_sizes,
    read_tensor,
    write_object,
    write_tensor,
)

FLOAT = 1


def sealed(body: bytes) -> bytes:
    """A meta whose checksum is right, whatever it says."""
    return struct.pack("<I", zlib.crc32(body)) + body


slots = st.lists(
    st.tuples(st.sampled_from(sorted(CODES.values())), st.lists(st.integers(0, 1 << 40))),
    max_size=8,
)


@given(
    form=st.sampled_from([Form.PICKLED, Form.LIST, Form.TUPLE, Form.DICT]),
    flags=st.sampled_from([0, STREAM_IN_BUFFER, PLACED]),
    sizes=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8),
    slots=slots,
    stream=st.binary(),
)
def test_a_table_reads_back(
    form: Form, flags: int, sizes: list[int], slots: list[tuple[int, list[int]]], stream: bytes
) -> None:
    shapes = [tuple(shape) for _, shape in slots]
    codes = [code for code, _ in slots]
    places = list(range(len(slots))) if flags & PLACED else []
    table = Table(form, flags, 1, sizes, codes, shapes, places, places, stream)
    meta = write_object(table)
    assert read_sizes(meta) == tuple(sizes)
    read = read_object(memoryview(meta))
    assert (read.form, read.flags, read.device) == (form, flags, 1)
    assert (list(read.codes), read.shapes) == (codes, shapes)
    assert (list(read.homes), list(read.offsets)) == (places, places)
    assert bytes(read.stream) == stream


@given(st.lists(st.integers(0, 1 << 12), max_size=4), st.sampled_from(sorted(CODES.values())))
def test_a_tensor_reads_back(shape: list[int], code: int) -> None:
    for form in (Form.BUFFER, Form.TENSOR):
        meta = write_tensor(form, 0, code, tuple(shape))
        nbytes = math.prod(shape) * DTYPES[code][1]
        assert read_tensor(form, meta) == (0, code, tuple(shape), nbytes)
        assert is_tensor(meta) is (form is Form.TENSOR)


def test_what_is_too_long_is_refused_before_it_is_sent() -> None:
    table = Table(Form.PICKLED, stream=bytes(MAX_META))
    with pytest.raises(PayloadError, match="several messages"):
        write_object(table)


METAS = [
    write_object(Table(Form.PICKLED, stream=b"N.")),
    write_object(Table(Form.LIST, 0, 0, [12, 8], [FLOAT, RAW], [(3,), (8,)])),
    write_object(Table(Form.LIST, PLACED, 0, [12], [FLOAT] * 2, [(3,), (1,)], [0, 0], [0, 4])),
    write_tensor(Form.BUFFER, 0, FLOAT, (2, 3)),
    write_tensor(Form.TENSOR, 0, FLOAT, (2, 3)),
]


def read_all(meta: bytes) -> None:
    """Read it as everything that it could be; only a ProtocolError may come of it."""
    for form in (Form.BUFFER, Form.TENSOR):
        try:
            read_tensor(form, meta)
        except ProtocolError:
            pass
        else:
            return
    read_sizes(meta)
    read_object(meta)


@pytest.mark.parametrize("meta", METAS)
def test_every_flipped_byte_and_every_cut_is_found(meta: bytes) -> None:
    read_all(meta)
    for at in range(len(meta)):
        for bits in (1, 0x80, 0xFF):
            with pytest.raises(ProtocolError):
                read_all(meta[:at] + bytes([meta[at] ^ bits]) + meta[at + 1 :])
        with pytest.raises(ProtocolError):
            read_all(meta[:at])


@pytest.mark.parametrize("meta", METAS)
def test_a_lie_with_a_right_checksum_is_an_error_or_reads(meta: bytes) -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(500):
        body = bytearray(meta[4:])
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        try:
            read_all(sealed(bytes(body[: rng.randint(0, len(body))])))
        except ProtocolError:
            refused += 1
    assert refused > 50


def test_hostile_sizes_are_refused() -> None:
    # form, flags, device, 0, buffers, slots, dims
    for counts, columns in [
        ((1, 0, 0), struct.pack("<q", -1)),
        ((1, 0, 0), struct.pack("<Q", 1 << 63)),
        ((2, 0, 0), struct.pack("<QQ", MAX_BYTES, 1)),
        ((0xFFFFFFFF, 0, 0), b""),
    ]:
        meta = sealed(struct.pack("<BBBBIII", Form.PICKLED, 0, 0, 0, *counts) + columns)
        with pytest.raises(ProtocolError):
            read_sizes(meta)
        with pytest.raises(ProtocolError):
            read_object(meta)
    for counts in [(0, 0xFFFFFFFF, 0), (0, 0xFFFFFFFF, 0xFFFFFFFF), (0, 1, 0), (0, 0, 1)]:
        with pytest.raises(ProtocolError):
            read_object(sealed(struct.pack("<BBBBIII", Form.PICKLED, 0, 0, 0, *counts)))


def test_unknown_forms_devices_and_flags_are_refused() -> None:
    for form, flags, device in [(0, 0, 0), (99, 0, 0), (Form.PICKLED, 128, 0), (3, 0, 9)]:
        with pytest.raises(ProtocolError):
            read_object(sealed(struct.pack("<BBBBIII", form, flags, device, 0, 0, 0, 0) + b"N."))


def test_a_tensor_larger_than_memory_can_be_is_refused() -> None:
    for shape in [(1 << 61,), (1 << 32, 1 << 32), (MAX_BYTES + 1, 0)]:
        with pytest.raises(ProtocolError):
            read_tensor(Form.BUFFER, write_tensor(Form.BUFFER, 0, FLOAT, shape))
    assert read_tensor(Form.BUFFER, write_tensor(Form.BUFFER, 0, FLOAT, (1 << 40,)))[3] == 1 << 42


def test_unknown_dtypes_are_refused() -> None:
    for code in (200, RAW):
        with pytest.raises(ProtocolError):
            read_tensor(Form.BUFFER, write_tensor(Form.BUFFER, 0, code, (3,)))
    for code, shape in [(200, (3,)), (RAW, ()), (RAW, (3, 3))]:
        with pytest.raises(ProtocolError, match="dtype"):
            nbytes_of(code, shape)
