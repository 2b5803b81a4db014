"""Every kind of object makes the way and back; what cannot is refused before anything is sent."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.errors import DecodeError, PayloadError, ProtocolError
from aiocomm.packing import inline, outline
from aiocomm.payload import (
    STREAM_LIMIT,
    Kind,
    Packed,
    buffer_sizes,
    pack,
    pack_tensor,
    spec_of,
    tensor_spec,
    unpack,
    unpack_body,
)
from aiocomm.payload_bytes import CODES
from aiocomm.payload_table import Form, Table, read_object, write_object

from .payloads import OBJECTS, Both, by_bulk, by_link, same, t

TORCH_DTYPES = sorted(CODES, key=str)
Way = Callable[[Packed], Any]
ways = pytest.mark.parametrize("way", [by_link, by_bulk])


@ways
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_come_back_as_they_went(name: str, way: Way) -> None:
    obj = OBJECTS[name]()
    packed = pack(obj)
    assert packed.kind is Kind.OBJECT
    assert packed.nbytes == sum(buffer.numel() for buffer in packed.buffers)
    assert buffer_sizes(packed.kind, packed.meta) == tuple(b.numel() for b in packed.buffers)
    assert all(b.dtype is torch.uint8 and b.dim() == 1 for b in packed.buffers)
    assert same(way(packed), obj)


@ways
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (2, 3)], ids=str)
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...], way: Way) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.arange(1, count + 1, dtype=torch.uint8).view(dtype).view(shape)
    if dtype is torch.bool:
        tensor = tensor.view(torch.uint8).bitwise_and(1).view(torch.bool)
    other = tensor.view(-1).view(torch.uint8).clone().view(dtype).view(shape)
    for obj in (tensor, [tensor, other], {"a": {"deep": tensor}}):
        assert same(way(pack(obj)), obj)
    spec = tensor_spec(pack_tensor(tensor).meta)
    assert spec == spec_of(tensor)
    assert spec.nbytes == count


def test_nothing_is_copied_on_the_way_out() -> None:
    tensor, array = t(100), np.zeros(100)
    first, second = pack({"t": tensor, "n": array}).buffers
    assert first.data_ptr() == tensor.data_ptr()
    assert second.data_ptr() == array.ctypes.data


def test_what_arrives_is_writable_and_shares_the_buffers() -> None:
    packed = pack([np.arange(3), t(3)])
    memory = outline(inline(packed.buffers), buffer_sizes(packed.kind, packed.meta))
    array, tensor = unpack(packed.meta, memory)
    array[:] = 7
    assert memory[0].view(torch.int64).tolist() == [7, 7, 7]
    assert tensor.data_ptr() == memory[1].data_ptr()


def test_read_only_memory_arrives_read_only() -> None:
    array = np.frombuffer(b"abcd", dtype=np.uint8)
    back = by_link(pack(array))
    assert back.tolist() == [97, 98, 99, 100]
    assert not back.flags.writeable


def test_a_slice_costs_its_own_bytes() -> None:  # F9
    packed = pack(torch.zeros(10**6)[:1])
    assert packed.nbytes == 4
    assert len(packed.meta) < 100
    base = torch.zeros(1000)
    assert pack([base[:10], base[10:20], base[900:]]).nbytes == 4 * 120


@ways
def test_aliases_travel_once_and_share_again(way: Way) -> None:  # F9
    x = torch.arange(10.0)
    packed = pack([x, x[:], x[2:5], x[4:8].view(torch.int32), x[8:8], x.view(2, 5), np.arange(3)])
    assert packed.nbytes == 40 + 24
    back = way(packed)
    back[0].fill_(7)
    assert back[1].tolist() == [7] * 10
    assert back[2].tolist() == [7] * 3
    assert back[3].view(torch.float32).tolist() == [7] * 4
    assert back[4].numel() == 0
    assert back[5].tolist() == [[7] * 5] * 2


@ways
def test_overlapping_slices_send_their_union(way: Way) -> None:
    x = torch.arange(100.0)
    packed = pack({"a": x[10:20], "b": x[15:30], "c": x[50:60]})
    assert packed.nbytes == 4 * (20 + 10)
    back = way(packed)
    assert back["b"].tolist() == list(range(15, 30))
    back["a"].fill_(0)
    assert back["b"].tolist() == [0] * 5 + list(range(20, 30))


def test_memory_shared_across_storages_is_shared_again() -> None:
    memory = bytearray(range(24))
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=16)
    later = torch.frombuffer(memory, dtype=torch.uint8, count=16, offset=8)
    odd = torch.frombuffer(memory, dtype=torch.float64, count=1, offset=1)
    packed = pack([whole, later, odd])
    assert packed.nbytes == 24
    back = by_link(packed)
    assert back[1].tolist() == list(range(8, 24))
    back[0].fill_(1)
    assert back[1].tolist() == [1] * 8 + list(range(16, 24))
    assert same(back[2], torch.ones(8, dtype=torch.uint8).view(torch.float64))


def test_one_object_in_two_places_stays_one() -> None:
    x = t(3)
    for obj in ([x, x], {"a": x, "b": x}, (x, [x])):
        back = by_link(pack(obj))
        items = list(back.values()) if isinstance(back, dict) else back
        second = items[1][0] if isinstance(items[1], list) else items[1]
        assert items[0] is second


def test_arrives_detached_but_parameters_stay_parameters() -> None:
    leaf = torch.ones(2, requires_grad=True)
    back = by_link(pack([leaf, leaf * 2, torch.nn.Parameter(t(2)), {"x": 1}]))
    assert [tensor.requires_grad for tensor in back[:3]] == [False, False, True]
    assert type(back[2]) is torch.nn.Parameter
    assert back[2].is_leaf


@ways
def test_a_module_arrives_whole_and_trains(way: Way) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    model.tied = model[0].weight
    back = way(pack(model))
    assert back.tied is back[0].weight
    assert all(map(same, model.state_dict().values(), back.state_dict().values()))
    back(torch.randn(3, 4)).sum().backward()
    assert back[0].weight.grad is not None


@ways
def test_a_change_of_one_tensor_is_no_change_of_its_neighbours(way: Way) -> None:
    """Received tensors share memory blocks, which autograd must not notice."""
    weight, other = way(pack([t(3), t(3), 1]))[:2]
    loss = (torch.ones(3, requires_grad=True) * weight).sum()
    other.add_(1)
    loss.backward()
    other.mul_(torch.ones(3, requires_grad=True))
    assert other.requires_grad
    assert not weight.requires_grad


class FailsOnLoad:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_failure_to_load_is_the_receivers_error() -> None:  # F12
    packed = pack([t(3), FailsOnLoad()])
    with pytest.raises(DecodeError, match="not a number") as caught:
        by_link(packed)
    assert isinstance(caught.value.__cause__, ValueError)
    assert by_link(pack([1])) == [1]


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x], lambda x: {"k": x}, lambda x: {1: [x]}]
)
def test_what_cannot_be_sent_is_refused_at_the_call(wrap: Callable[[Any], Any]) -> None:  # F1, F12
    for bad in (torch.ones(2, 3).T, torch.ones(4, 4)[:, ::2], torch.ones(2, 2).to_sparse(),
                torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64).conj(),
                lambda: 0, threading.Lock()):  # fmt: skip
        with pytest.raises(PayloadError, match=r"send|materialise"):
            pack(wrap(bad))
    with pytest.raises(ValueError, match=r"\.contiguous\(\)"):
        pack_tensor(torch.ones(2, 3).T)


def test_specs_tell_dtypes_shapes_and_devices_apart() -> None:  # F2
    spec = tensor_spec(pack_tensor(torch.ones(3, 4)).meta)
    assert str(spec) == "float32[3, 4] on cpu"
    assert spec == spec_of(torch.zeros(3, 4))
    for other in (torch.ones(3, 4, dtype=torch.int32), torch.ones(12), torch.ones(3, 2).double()):
        assert spec != spec_of(other)
    assert spec != spec_of(torch.ones(3, 4, device="meta"))
    assert buffer_sizes(Kind.TENSOR, pack_tensor(torch.empty(0, 3)).meta) == (0,)


def test_a_long_stream_is_a_buffer() -> None:
    packed = pack(list(range(100_000)))
    assert len(packed.meta) < 100
    assert len(packed.buffers) == 1
    assert by_link(packed) == list(range(100_000))


def test_meta_stays_below_its_limit() -> None:
    huge = [torch.empty([1] * 200)] * 2 + [torch.empty([1] * 250) for _ in range(9000)]
    with pytest.raises(PayloadError, match="several messages"):
        pack(huge)


def test_packed_keeps_memory_alive_and_leaves_no_ring() -> None:  # F15, F20
    tensor, array = t(1000), np.ones(1000)
    gone = [weakref.ref(tensor), weakref.ref(array)]
    gc.disable()
    try:
        packed = pack({"a": [tensor, array]})
        expected = tensor.clone()
        del tensor, array
        assert gone[1]() is not None
        assert same(by_link(packed)["a"][0], expected)
        del packed
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_packing_within_packing_and_in_threads() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(50):
                obj = {"n": number, "r": Reenters(torch.full((8,), number)), "s": step}
                back = by_link(pack(obj))
                assert back["r"].tensor.tolist() == [number] * 8
                assert back["r"].copy.tolist() == [number] * 8
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class Reenters:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Any:
        return self.tensor, pack([self.tensor, 1]).meta, pickle.dumps(1)

    def __setstate__(self, state: Any) -> None:
        self.tensor = state[0]
        self.copy = by_link(pack([self.tensor, 1]))[0]


dtypes = st.sampled_from([torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64])
tensors = st.builds(
    lambda dtype, shape: torch.ones(shape).to(dtype),
    dtypes,
    st.lists(st.integers(0, 4), max_size=3),
)
leaves = tensors | st.none() | st.integers() | st.text() | st.binary()
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.builds(Both, tensors, inner)
    ),
)


@given(objects)
def test_whatever_is_made_of_these_comes_back(obj: Any) -> None:
    packed = pack(obj)
    assert same(by_link(packed), obj)
    assert same(by_bulk(packed), obj)
    assert same(unpack(packed.meta, packed.buffers), obj)


@pytest.mark.parametrize("obj", [t(3), torch.empty(0, 2), t(), [t(3), t(2)], "x", {"a": t(9)}])
def test_a_body_is_unpacked_at_once(obj: Any) -> None:
    packed = pack(obj)
    body = inline(packed.buffers)
    assert same(unpack_body(packed.meta, body), obj)
    with pytest.raises(ProtocolError, match="sizes say"):
        unpack_body(packed.meta, body + b"\0")


def test_the_structure_is_what_a_loop_repeats() -> None:
    steps = [pack({"step": number, "w": {"a": t(3), "b": t(2)}}) for number in (1, 2)]
    assert steps[0].meta != steps[1].meta
    assert {packed.meta[4 : packed.structure] for packed in steps} == {
        steps[0].meta[4 : -len(read_object(steps[0].meta).stream)]
    }
    named = pack({"a": t(3), "b": t(2)})
    assert named.structure == len(named.meta)  # its keys too
    assert [pack(obj).structure for obj in (1, "x", t(3))] == [0, 0, 0]


HOSTILE = [
    pack(obj)
    for obj in (
        t(3),
        [t(2), t(1)],
        {"a": t(3)},
        [t(2), [np.arange(3)]],
        (lambda x: [x, x[1:]])(t(5)),
    )
]


@pytest.mark.parametrize("packed", HOSTILE)
def test_damaged_meta_is_a_protocol_error(packed: Packed) -> None:  # F8
    meta = packed.meta
    damaged = [meta[:at] for at in range(len(meta))]
    damaged += [meta[:at] + bytes([meta[at] ^ 0xFF]) + meta[at + 1 :] for at in range(len(meta))]
    for bad in damaged:
        with pytest.raises(ProtocolError):
            buffer_sizes(packed.kind, bad)
        with pytest.raises(ProtocolError):
            unpack(bad, packed.buffers)


@pytest.mark.parametrize("packed", HOSTILE)
def test_buffers_of_other_sizes_are_a_protocol_error(packed: Packed) -> None:
    short = [buffer[:-1] for buffer in packed.buffers]
    for buffers in ((), short, [*packed.buffers, torch.ones(1, dtype=torch.uint8)]):
        with pytest.raises(ProtocolError):
            unpack(packed.meta, buffers)


@pytest.mark.parametrize("packed", HOSTILE)
def test_a_sealed_lie_is_refused_or_stays_inside_its_buffers(packed: Packed) -> None:  # F8
    """The table lies and its checksum is right; the stream is as it was."""
    rng = random.Random(2)
    single = packed.meta[4] == Form.TENSOR
    end = len(packed.meta) if single else len(packed.meta) - len(read_object(packed.meta).stream)
    refused = 0
    for _ in range(400):
        body = bytearray(packed.meta[4:])
        for _ in range(rng.randint(1, 2)):
            body[rng.randrange(end - 4)] = rng.choice([0, 1, 2, 4, 0x7F, 0x80, 0xFF])
        meta = zlib.crc32(body).to_bytes(4, "little") + body
        try:
            unpack(meta, packed.buffers)
        except (ProtocolError, DecodeError):
            refused += 1
    assert refused > 100


def test_a_dict_with_keys_that_cannot_be_is_a_protocol_error() -> None:
    wrong: list[Any] = [[], (), ([],), ("a", "b"), (1,), "a"]
    for keys in wrong:
        stream = pickle.dumps(keys)
        meta = write_object(Table(Form.DICT, 0, 0, [4], [1], [(1,)], stream=stream))
        with pytest.raises(ProtocolError, match="keys"):
            unpack(meta, [torch.zeros(4, dtype=torch.uint8)])


def test_the_callers_default_device_and_modes_change_nothing() -> None:
    obj = {"a": [t(3), np.arange(3), torch.empty(0), "x" * STREAM_LIMIT], "b": t(2, 2)}
    for mode in (torch.device("meta"), torch.inference_mode(), torch.no_grad()):
        with mode:
            packed = pack(obj)
            back = [by_link(packed), by_bulk(packed), by_link(pack(obj["b"]))]
        assert same(back, [obj, obj, obj["b"]])
