"""Frames: whole, in pieces, large, several at once, and hostile."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import hypothesis
import pytest
from hypothesis import strategies as st

from aiocomm.errors import ProtocolError
from aiocomm.transport import frames
from aiocomm.transport.base import MAX_BODY, MAX_HEAD, Frame, FrameKind
from aiocomm.transport.frames import (
    BUFFER_SIZE,
    HEADER_SIZE,
    WAITS,
    Decoder,
    encode,
    encode_header,
    receive_buffer,
)

CONTENT = st.tuples(
    st.sampled_from(list(FrameKind)),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=40),
    st.binary(max_size=200),
)


def header(
    magic: int = frames.MAGIC,
    version: int = frames.VERSION,
    kind: int = FrameKind.CHUNK,
    sequence: int = 0,
    head: int = 0,
    body: int = 0,
) -> bytes:
    return struct.pack(">HBBQIQ", magic, version, kind, sequence, head, body)


@hypothesis.given(contents=st.lists(CONTENT, max_size=20), sizes=st.lists(st.integers(1, 500)))
def test_any_pieces_give_the_same_frames(
    contents: list[tuple[FrameKind, int, bytes, bytes]], sizes: list[int]
) -> None:
    data = b"".join(itertools.starmap(encode, contents))
    decoder = Decoder()
    got = []
    for size in (*sizes, len(data) or 1):
        got += decoder.feed(data[:size])
        data = data[size:]
    got += decoder.feed(data)
    assert got == list(itertools.starmap(Frame, contents))
    assert decoder.error is None
    assert not decoder.in_frame


@pytest.mark.parametrize("first", [1, HEADER_SIZE, HEADER_SIZE + 1, BUFFER_SIZE])
@pytest.mark.parametrize(
    ("head", "body"),
    [
        (0, BUFFER_SIZE),
        (1, BUFFER_SIZE),
        (BUFFER_SIZE, 0),
        (BUFFER_SIZE, 1),
        (BUFFER_SIZE - HEADER_SIZE, 1),
        (3 * BUFFER_SIZE, 3 * BUFFER_SIZE),
    ],
)
def test_a_frame_larger_than_the_buffer(head: int, body: int, first: int) -> None:
    sent = Frame(FrameKind.CHUNK, 7, bytes(range(251)) * (head // 251 + 1), b"b" * body)
    sent.head = sent.head[:head]
    data = encode(sent.kind, sent.sequence, sent.head, sent.body)
    follower = Frame(FrameKind.ENVELOPE, 8, b"x", b"y")
    data += encode(follower.kind, follower.sequence, follower.head, follower.body)
    decoder = Decoder()
    got = decoder.feed(data[:first])
    assert decoder.in_frame
    got += decoder.feed(data[first:])
    assert got == [sent, follower]
    assert type(got[0].head) is type(got[0].body) is bytes


def test_the_largest_frame_is_received_in_place() -> None:
    body = b"\xa5" * MAX_BODY
    data = memoryview(encode(FrameKind.CHUNK, 1, b"", body))
    decoder = Decoder()
    tracemalloc.start()
    try:
        (frame,) = decoder.feed(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert frame.body == body
    assert peak < MAX_BODY + 100_000


def test_many_frames_around_the_end_of_the_buffer() -> None:
    sent = [Frame(FrameKind.CHUNK, n, b"", bytes([n % 256]) * 10_007) for n in range(200)]
    data = b"".join(encode(each.kind, each.sequence, each.head, each.body) for each in sent)
    decoder = Decoder()
    got = []
    while data:
        room = decoder.buffer()
        count = min(len(room), len(data), 70_001)
        room[:count] = data[:count]
        data = data[count:]
        got += decoder.advance(count)
    assert got == sent


@pytest.mark.parametrize("body", [10, WAITS - HEADER_SIZE, WAITS, 2 * BUFFER_SIZE])
def test_decoders_that_share_a_buffer_take_turns_in_the_middle_of_frames(body: int) -> None:
    memory = receive_buffer()
    sent = [
        [Frame(FrameKind.CHUNK, n, b"h", bytes([who]) * body) for n in (1, 2)] for who in (0, 1)
    ]
    data = [b"".join(encode(f.kind, f.sequence, f.head, f.body) for f in both) for both in sent]
    decoders = [Decoder(memory), Decoder(memory)]
    got: list[list[Frame]] = [[], []]
    step = max(7, body // 3)
    for start in range(0, len(data[0]), step):
        for decoder, frames_got, piece in zip(decoders, got, data, strict=True):
            frames_got += decoder.feed(piece[start : start + step])
            decoder.buffer()  # a read that brings nothing
    assert got == sent
    assert not any(decoder.in_frame for decoder in decoders)


@pytest.mark.parametrize(
    ("hostile", "text"),
    [
        (header(magic=0), "opens with 0x0000"),
        (b"GET / HTTP/1.1\r\nHost: example\r\n", "opens with 0x4745"),
        (header(version=9), "version 9"),
        (header(kind=0), "unknown kind, 0"),
        (header(kind=200), "unknown kind, 200"),
        (header(head=MAX_HEAD + 1), "declares"),
        (header(head=2**32 - 1), "declares 4294967295"),
        (header(body=MAX_BODY + 1), "declares"),
        (header(body=2**63), "declares"),
        (header(body=2**64 - 1), "18446744073709551615 of body"),  # -1, if it were signed
    ],
)
def test_hostile_headers_are_refused_before_memory_is_set_aside(hostile: bytes, text: str) -> None:
    decoder = Decoder()
    good = encode(FrameKind.ENVELOPE, 1, b"h", b"b")
    tracemalloc.start()
    try:
        got = decoder.feed(good + hostile + good)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got == [Frame(FrameKind.ENVELOPE, 1, b"h", b"b")]
    assert isinstance(decoder.error, ProtocolError)
    assert text in str(decoder.error)
    assert peak < 100_000
    assert decoder.feed(good) == []
    assert decoder.advance(5) == []


@hypothesis.given(st.binary(min_size=HEADER_SIZE, max_size=300))
def test_noise_never_raises(noise: bytes) -> None:
    decoder = Decoder()
    got = decoder.feed(noise)
    assert decoder.error is not None or got or decoder.in_frame


def test_encode_is_the_header_and_what_follows() -> None:
    data = encode(FrameKind.REJECT, 2**64 - 1, memoryview(b"head"), b"body")
    assert data == encode_header(FrameKind.REJECT, 2**64 - 1, 4, 4) + b"headbody"
    assert encode_header(FrameKind.CHUNK, 3, 5, 6) == header(sequence=3, head=5, body=6)
