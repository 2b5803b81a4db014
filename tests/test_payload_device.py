"""Objects with tensors on a device as meta and buffers, and back, simulated."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from aiocomm.errors import PayloadError, ProtocolError
from aiocomm.packing_places import Held
from aiocomm.payload import (
    OnDevice,
    Packed,
    pack,
    pack_tensor,
    spec_of,
    tensor_spec,
    unpack,
    unpack_body,
)
from aiocomm.payload_table import PLACED, STREAM_IN_BUFFER, read_object

from .simulated import Simulated, simulated

VALUES = torch.arange(12, dtype=torch.float32)


def values_of(sim: Simulated, obj: Any) -> Any:
    if isinstance(obj, dict):
        return {key: values_of(sim, value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [values_of(sim, value) for value in obj]
    return sim.read(obj).tolist() if isinstance(obj, torch.Tensor) else obj


@pytest.mark.parametrize("form", ["tensor", "list", "dict", "pickled"])
def test_there_and_back(form: str) -> None:
    with simulated() as sim:
        one, two = sim.tensor(VALUES, 1), sim.tensor(VALUES.view(3, 4) + 1, 1)
        obj: Any = {
            "tensor": one,
            "list": [one, two],
            "dict": {"one": one, "two": two},
            "pickled": {"a": [{"b": (one, 3)}], "c": two},
        }[form]
        packed = pack(obj)
        assert packed.device == OnDevice(1)
        assert packed.nbytes == (48 if form == "tensor" else 96)
        assert values_of(sim, unpack(packed.meta, packed.buffers)) == values_of(sim, obj)
        assert one.tolist() != VALUES.tolist(), "the host has seen none of it"


def test_one_tensor_for_recv_tensor() -> None:
    with simulated() as sim:
        tensor = sim.tensor(VALUES, 1)
        packed = pack_tensor(tensor)
        assert packed.device == OnDevice(1)
        assert tensor_spec(packed.meta) == spec_of(tensor) != spec_of(VALUES)
        assert str(spec_of(tensor)) == "float32[12] on cuda"


def test_on_the_cpu_there_is_no_device() -> None:
    assert pack({"x": VALUES}).device is pack_tensor(VALUES).device is None
    assert pack("nothing of the kind").device is None


def test_shared_memory_stays_shared() -> None:
    with simulated() as sim:
        whole = sim.tensor(VALUES)
        packed = pack([whole[:8], whole[4:]])
        assert read_object(packed.meta).flags & PLACED
        left, right = unpack(packed.meta, packed.buffers)
        sim.write(right[:1], torch.tensor([99.0]))
        sim.run()
        assert sim.read(left)[4].item() == 99


def test_what_is_not_aligned_there_gets_memory_of_its_own() -> None:
    with simulated() as sim:
        raw = sim.tensor(torch.arange(40, dtype=torch.uint8))
        words = raw[4:36].view(torch.int32)
        packed = pack([raw[3:30], words])
        arrived = unpack(packed.meta, [each.clone() for each in _on(sim, packed)])
        assert values_of(sim, arrived) == values_of(sim, [raw[3:30], words])
        moved = next(each for each in arrived if each.dtype is torch.int32)
        assert (moved.data_ptr(), sim.default[0]) in sim.lent, "it was made in another stream"


class _Copy:
    """A buffer that is copied as a route would."""

    def __init__(self, sim: Simulated, tensor: torch.Tensor) -> None:
        self._sim, self._tensor = sim, tensor

    def clone(self) -> torch.Tensor:
        return self._sim.tensor(self._sim.read(self._tensor))


def _on(sim: Simulated, packed: Packed) -> list[_Copy]:
    return [_Copy(sim, buffer) for buffer in packed.buffers]


def test_other_bytes_stay_in_the_stream() -> None:
    with simulated() as sim:
        blob = pickle.PickleBuffer(bytearray(b"x" * 1000))
        obj = {"x": sim.tensor(VALUES), "blob": blob}
        packed = pack(obj)
        assert packed.nbytes == 48
        got = unpack(packed.meta, packed.buffers)
        assert bytes(got["blob"]) == b"x" * 1000


def test_a_long_stream_stays_in_the_meta() -> None:
    with simulated() as sim:
        packed = pack({"x": sim.tensor(VALUES), "text": "y" * 100_000})
        assert not read_object(packed.meta).flags & STREAM_IN_BUFFER
        assert unpack(packed.meta, packed.buffers)["text"] == "y" * 100_000


def test_many_are_held_by_address() -> None:
    with simulated() as sim:
        tensors = [sim.tensor(VALUES + number) for number in range(5)]
        packed = pack(tensors)
        assert isinstance(packed.buffers, Held)
        assert not packed.buffers.on_cpu
        assert values_of(sim, [each.view(torch.float32) for each in packed.buffers]) == [
            (VALUES + number).tolist() for number in range(5)
        ]


@pytest.mark.parametrize("nested", [True, False])
def test_two_kinds_of_memory_are_refused(nested: bool) -> None:
    with simulated() as sim:
        tensors = [sim.tensor(VALUES), VALUES]
        for order in (tensors, tensors[::-1]):
            obj = {"deep": [order, 1]} if nested else order
            with pytest.raises(PayloadError, match="move them to one device, or send them in two"):
                pack(obj)


def test_raw_bytes_on_a_device_are_the_peers_fault() -> None:
    with simulated() as sim:
        packed = pack({"blob": pickle.PickleBuffer(bytearray(64))})
        with pytest.raises(ProtocolError, match="raw bytes that are not on the CPU"):
            unpack(packed.meta, [sim.tensor(torch.zeros(64, dtype=torch.uint8))])


def test_empty_tensors_are_made_on_the_device_and_no_byte_has_to_reach_it() -> None:
    with simulated() as sim:
        empty = sim.empty(torch.float32, (0, 2))
        for obj in (empty, [empty, sim.empty(torch.int8, (0,))]):
            packed = pack(obj)
            assert packed.device is None
            for got in (unpack(packed.meta, packed.buffers), unpack_body(packed.meta, b"")):
                assert not sim.on_cpu(got[0] if isinstance(got, list) else got)
        assert got[0].shape == (0, 2)
        assert spec_of(empty).device_type == "cuda"
        assert tensor_spec(pack_tensor(empty).meta) == spec_of(empty)
        packed = pack([sim.tensor(VALUES), empty])
        values, got = unpack(packed.meta, packed.buffers)
        assert values.numel() == 12
        assert not sim.on_cpu(got)
