"""Tensors as bytes: every dtype has its number, every refusal says how to mend it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from aiocomm.errors import PayloadError
from aiocomm.payload_bytes import (
    CODES,
    DTYPES,
    address_of,
    as_bytes,
    memory_at,
    tensor_at,
    view_of,
)

ALL_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_but_quantized_ones_has_a_number(dtype: torch.dtype) -> None:
    assert (dtype in CODES) is (dtype not in QUANTIZED)


def test_numbers_of_dtypes_stay_what_they_are() -> None:
    # They are on the wire: a change here breaks every peer of another version.
    names = [str(DTYPES[code][0]).removeprefix("torch.") for code in range(1, 23)]
    assert names == [
        *("float32", "float64", "float16", "bfloat16"),
        *("uint8", "int8", "int16", "int32", "int64", "bool"),
        *("complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    ]
    assert CODES[torch.bits8] == 23
    assert CODES[torch.uint1] == 28
    assert CODES[torch.int7] == 41


def test_bytes_are_the_tensors_own_memory() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    seen = as_bytes(tensor)
    assert seen.dtype is torch.uint8
    assert seen.shape == (12,)
    seen.zero_()
    assert tensor.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.ones(4, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.ones(4)[1:3],
        torch.ones(10)[::5][:1],
        torch.ones(10, 10)[::5, ::7][:1, :1],
    ],
    ids=["0-dim", "empty", "empty 3-d", "grad", "parameter", "slice", "one of every 5", "one 2-d"],
)
def test_shapes_of_bytes(tensor: torch.Tensor) -> None:
    seen = as_bytes(tensor)
    assert type(seen) is torch.Tensor
    assert seen.shape == (tensor.numel() * tensor.itemsize,)
    assert not seen.requires_grad


def test_tensors_of_inference_mode_can_be_written_to_outside() -> None:
    with torch.inference_mode():
        buffer = torch.zeros(2, 2)
    as_bytes(buffer).copy_(as_bytes(torch.ones(2, 2)))
    assert buffer.tolist() == [[1, 1], [1, 1]]


REFUSED: list[tuple[str, Any, str]] = [
    ("transposed", lambda: torch.ones(2, 3).T, r"float32\[3, 2\] is not contiguous: .*contiguous"),
    ("strided", lambda: torch.ones(4, 4)[:, ::2], "contiguous"),
    ("expanded", lambda: torch.ones(1).expand(3), "contiguous"),
    ("sparse", lambda: torch.ones(2, 2).to_sparse(), "sparse.*to_dense"),
    ("meta", lambda: torch.ones(2, device="meta"), "meta device"),
    ("conj", lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
    ("neg", lambda: torch.ones(1, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ("zero", lambda: torch._efficientzerotensor(3), "clone"),
    ("256-d", lambda: torch.ones([1] * 256), "dimensions"),
]


@pytest.mark.parametrize(("make", "text"), [case[1:] for case in REFUSED],
                         ids=[case[0] for case in REFUSED])  # fmt: skip
def test_what_has_no_plain_memory_is_refused(make: Any, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        as_bytes(make())


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_is_refused() -> None:
    with pytest.raises(PayloadError, match="int_repr"):
        as_bytes(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_is_refused() -> None:
    with pytest.raises(PayloadError, match="unbind"):
        as_bytes(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))


@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="this torch has no named tensors")
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_named_dimensions_are_refused() -> None:
    with pytest.raises(PayloadError, match="rename"):
        as_bytes(getattr(torch, "ones")(2, names=("n",)))  # noqa: B009


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(PayloadError, match="not list"):
        as_bytes([1])  # type: ignore[arg-type]


# --- memory by address ---


@pytest.mark.parametrize("source", [b"abc", bytearray(b"abc")], ids=["read-only", "writable"])
def test_address_of_any_memory(source: bytes | bytearray) -> None:
    view = memoryview(source)
    assert bytes(memory_at(address_of(view), 3, view)) == b"abc"


def test_no_memory_has_no_bytes() -> None:
    assert memory_at(0, 0, None).nbytes == 0
    assert view_of(torch.empty(0, dtype=torch.uint8)).nbytes == 0


class Owner:
    pass


def test_views_keep_the_owner_alive_and_no_longer() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    memory = bytearray(b"12345678")
    tensor = tensor_at(address_of(memoryview(memory)), 8, (owner, memory))
    inner = view_of(tensor[2:], 1, 3)[1:]
    del owner, tensor
    gc.collect()
    assert gone() is not None
    assert bytes(inner) == b"56"
    inner[0] = ord("x")
    assert memory == b"1234x678"
    del inner
    gc.collect()
    assert gone() is None
