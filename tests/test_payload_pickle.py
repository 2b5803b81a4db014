"""The walk: what is taken out of the stream, what stays in it, and what is refused where."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiocomm.errors import PayloadError
from aiocomm.payload_bytes import RAW
from aiocomm.payload_pickle import Refused, Slots, walk


class Tagged(torch.Tensor):
    pass


class Wide(torch.nn.Parameter):
    pass


class Box:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def load(stream: Any, slots: Slots) -> Any:
    return pickle.loads(stream.getvalue(), buffers=slots.owners)


def test_tensors_leave_the_stream() -> None:
    tensors = [torch.ones(1000), torch.zeros(1000)]
    stream, slots = walk(Box({"a": tensors}))
    assert stream.tell() < 300
    back = load(stream, slots).inner["a"]
    assert back[0] is tensors[0]
    assert back[1] is tensors[1]


def test_one_object_in_two_places_is_taken_once() -> None:
    tensor = torch.ones(3)
    stream, slots = walk([tensor, {"again": tensor}])
    assert len(slots.owners) == 1
    first, second = load(stream, slots)
    assert first is second["again"]


def test_parameters_and_subclasses_come_back_as_they_were() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.note = "x"  # type: ignore[attr-defined]
    wide = Wide(torch.ones(2))
    plain = torch.ones(2)
    plain.mark = [plain]  # type: ignore[attr-defined]
    sent = [torch.nn.Parameter(torch.ones(2)), frozen, tagged, wide, plain]
    stream, slots = walk(sent)
    assert all(type(owner) is torch.Tensor for owner in slots.owners)
    back = load(stream, slots)
    assert list(map(type, back)) == list(map(type, sent))
    assert [tensor.requires_grad for tensor in back] == [True, False, False, True, False]
    assert back[2].note == "x"
    assert back[4].mark[0] is back[4]


def test_raw_bytes_leave_the_stream_unless_told_otherwise() -> None:
    memory = bytearray(1000)
    obj = [pickle.PickleBuffer(memory), torch.ones(1)]
    stream, slots = walk(obj)
    assert slots.codes[0] == RAW
    assert slots.nbytes == [1000, 4]
    stream, slots = walk(obj, raw_in_band=True)
    assert slots.nbytes == [4]
    assert stream.tell() > 1000


def test_memory_that_is_not_flat_is_refused_with_what_pickle_says() -> None:
    with pytest.raises(PayloadError, match="cannot be pickled"):
        walk(pickle.PickleBuffer(memoryview(bytearray(8))[::2]))


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda bad: {"a": [1, bad]}, r"at \['a'\]\[1\]"),
        (lambda bad: Box(Box(bad)), r"at \.inner\.inner"),
        (lambda bad: [torch.nn.Parameter(bad)], r"at \[0\]"),
        (lambda bad: [bad.as_subclass(Tagged)], r"at \[0\]"),
    ],
)
def test_the_error_says_where(wrap: Any, path: str) -> None:
    with pytest.raises(PayloadError, match=path):
        walk(wrap(torch.ones(3, 3).T[1:]))


class Explodes:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("boom")


def test_what_pickle_cannot_take_is_refused() -> None:
    for bad in (lambda: 0, Explodes(), (number for number in [1])):
        with pytest.raises(PayloadError, match="cannot be pickled") as caught:
            walk([torch.ones(1), bad])
        assert caught.value.__cause__ is not None


def test_a_tensor_that_torch_will_not_show_is_refused() -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(Refused):
            Slots().add([tensor])
        return tensor

    torch.func.vmap(inside)(torch.ones(2, 2))


BAD: dict[str, Callable[[], torch.Tensor]] = {
    "not contiguous": lambda: torch.ones(3, 3).T[1:],
    "conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "zero": lambda: torch._efficientzerotensor(3),
    "meta": lambda: torch.ones(2, device="meta"),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "256-d": lambda: torch.ones([1] * 256),
}


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*beta state")
@pytest.mark.parametrize("name", BAD)
def test_among_many_the_one_that_cannot_be_sent_is_found(name: str) -> None:
    bad = BAD[name]()
    with pytest.raises(Refused) as caught:
        Slots().add([torch.ones(2), torch.ones(2), bad, torch.ones(2)])
    assert caught.value.tensor is bad


def test_by_columns_is_as_one_by_one() -> None:
    whole = torch.arange(40, dtype=torch.int16)
    with torch.inference_mode():
        inferred = torch.ones(2)
    many = [
        *(torch.ones(2), torch.tensor(1.5), torch.ones(2, 3, dtype=torch.bfloat16)),
        *(whole[4:9], whole, torch.ones(1, requires_grad=True), inferred, torch.ones(4)[1:2]),
        torch.ones(3, dtype=torch.complex64),
    ]
    for items in (many, [*many, torch.empty(0, 2)], [*many, memoryview(b"abc")]):
        together = Slots()
        together.add(items)
        apart = Slots()
        for item in items:
            apart.add([item])
        for column in ("codes", "shapes", "pointers", "nbytes"):
            assert getattr(together, column) == getattr(apart, column)
        assert together.device == apart.device == torch.device("cpu")
        assert list(map(id, together.owners)) == list(map(id, apart.owners))


@pytest.mark.gpu
def test_two_devices_are_refused() -> None:
    with pytest.raises(PayloadError, match="one device"):
        walk([torch.ones(1), torch.ones(1, device="cuda")])
