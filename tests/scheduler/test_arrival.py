"""Where the bytes of a message lie, and how they become its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiocomm.errors import ProtocolError
from aiocomm.packing import inline
from aiocomm.payload import Packed, pack, pack_tensor
from aiocomm.scheduler.arrival import Arrival
from aiocomm.scheduler.envelope import Envelope
from aiocomm.scheduler.schemas import KeptSchemas

from .lanes import blank, envelope, ramp


def arrived(packed: Packed, way: str) -> tuple[Arrival, int]:
    """By the link (in the body), in one process (by reference), or by a bulk route."""
    body: Any = {"link": inline(packed.buffers), "memory": tuple(packed.buffers)}.get(way, b"")
    frame = envelope(packed, 0, body, bulk=way == "bulk")
    arrival, size = Arrival.of(Envelope.read(frame.head), frame.body, KeptSchemas())
    if way == "bulk":
        arrival.buffers = packed.buffers
    return arrival, size


each_way = pytest.mark.parametrize("way", ["link", "memory", "bulk"])


@each_way
def test_objects_are_rebuilt_and_counted_whole(way: str) -> None:
    packed = pack({"a": ramp(300), "b": [ramp(7, 3)], "c": ramp(0)})
    arrival, size = arrived(packed, way)
    got = arrival.rebuild()
    assert list(got) == ["a", "b", "c"]
    assert torch.equal(got["a"], ramp(300))
    assert torch.equal(got["b"][0], ramp(7, 3))
    assert arrival.nbytes == len(packed.meta) + packed.nbytes
    assert size >= packed.nbytes
    assert arrival.in_process is (way == "memory")


@each_way
def test_tensors_fill_a_buffer(way: str) -> None:
    arrival, size = arrived(pack_tensor(ramp(300)), way)
    into = blank(300)
    arrival.fill(into)
    assert torch.equal(into, ramp(300))
    assert size == 300
    assert str(arrival.spec) == "uint8[300] on cpu"


@each_way
def test_nothing_but_empty_tensors(way: str) -> None:
    arrival, size = arrived(pack([ramp(0), ramp(0)]), way)
    assert [list(tensor.shape) for tensor in arrival.rebuild()] == [[0], [0]]
    assert size == 0


def test_a_value_that_was_built_is_not_built_again() -> None:
    arrival, _ = arrived(pack([1]), "link")
    arrival.value = None
    assert arrival.rebuild() is None


@pytest.mark.parametrize("body", [b"", b"123", b"12345"])
def test_a_body_that_is_not_as_long_as_its_meta_says(body: bytes) -> None:
    packed = pack_tensor(ramp(4))
    arrival, _ = Arrival.of(Envelope.read(envelope(packed, 0, body).head), body, KeptSchemas())
    into = blank(4)
    with pytest.raises(ProtocolError, match="not as many as its shape says"):
        arrival.fill(into)
    assert not into.any()
    packed = pack([ramp(4)])
    arrival, _ = Arrival.of(Envelope.read(envelope(packed, 0, body).head), body, KeptSchemas())
    with pytest.raises(ProtocolError):
        arrival.rebuild()


def test_meta_that_lies_is_the_peers_fault() -> None:
    packed = Packed(pack_tensor(ramp(4)).kind, b"\xff" * 40, (), 0)
    for bulk in (True, False):
        with pytest.raises(ProtocolError):
            read = Envelope.read(envelope(packed, 0, b"", bulk=bulk).head)
            Arrival.of(read, b"", KeptSchemas())
