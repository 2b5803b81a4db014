"""Slots become tensors inside their buffers, or nothing."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from aiocomm.errors import ProtocolError
from aiocomm.packing_places import Laid
from aiocomm.payload_bytes import CODES, RAW
from aiocomm.payload_rebuild import cut, empty, own, rebuild, typed
from aiocomm.payload_table import PLACED, Form, Table

FLOAT, DOUBLE = CODES[torch.float32], CODES[torch.float64]


def buffer(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.uint8)


def test_slots_take_the_buffers_in_turn() -> None:
    table = Table(Form.LIST, 0, 0, (8, 4), [FLOAT, RAW, FLOAT, RAW], [(2, 1), (0,), (0, 3), (4,)])
    buffers = [buffer(8), buffer(4)]
    first, nothing, empty_one, raw = rebuild(table, buffers)
    assert first.shape == (2, 1)
    assert first.data_ptr() == buffers[0].data_ptr()
    assert nothing == b""
    assert empty_one.shape == (0, 3)
    assert raw == bytes(range(4))


@pytest.mark.parametrize(
    ("sizes", "codes", "shapes"),
    [
        ((8,), [FLOAT], [(3,)]),  # larger than its buffer
        ((8,), [FLOAT], [(1,)]),  # smaller than its buffer
        ((8,), [FLOAT, FLOAT], [(2,), (2,)]),  # no buffer left
        ((8, 8), [FLOAT], [(2,)]),  # a buffer left
    ],
)
def test_slots_that_do_not_fit_are_refused(
    sizes: tuple[int, ...], codes: list[int], shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(ProtocolError):
        rebuild(Table(Form.LIST, 0, 0, sizes, codes, shapes), [buffer(size) for size in sizes])


@pytest.mark.parametrize(
    ("home", "offset"), [(1, 0), (0xFFFFFFFF, 0), (0, 8), (0, 5), (0, (1 << 64) - 4)]
)
@pytest.mark.parametrize("code", [FLOAT, RAW])
def test_places_outside_the_buffers_are_refused(home: int, offset: int, code: int) -> None:
    table = Table(Form.LIST, PLACED, 0, (8,), [code], [(4,)], [home], [offset])
    with pytest.raises(ProtocolError, match="outside"):
        rebuild(table, [buffer(8)])


def test_placed_slots_share() -> None:
    table = Table(Form.LIST, PLACED, 0, (8,), [FLOAT, RAW], [(2,), (4,)], [0, 0], [0, 4])
    tensor, raw = rebuild(table, [buffer(8)])
    raw[:] = bytes(4)
    assert tensor[1] == 0


def test_a_misaligned_place_still_shares() -> None:
    table = Table(Form.LIST, PLACED, 0, (9,), [RAW, DOUBLE], [(9,), (1,)], [0, 0], [0, 1])
    raw, tensor = rebuild(table, [torch.zeros(9, dtype=torch.uint8)])
    tensor.fill_(1.0)
    assert bytes(raw[1:]) == torch.ones(1, dtype=torch.float64).view(torch.uint8).numpy().tobytes()


def test_typed_views_its_base() -> None:
    base = torch.zeros(8, dtype=torch.uint8)
    assert typed(FLOAT, (2,), base).data_ptr() == base.data_ptr()
    assert typed(FLOAT, (), base[:4]).shape == ()


def test_own_has_its_own_version() -> None:
    block = torch.zeros(8, dtype=torch.uint8)
    part = own(block[:4])
    block.fill_(1)
    assert part._version == 0
    assert part.tolist() == [1] * 4
    assert own(block) is block


def test_an_empty_tensor_that_cannot_be_is_refused() -> None:
    assert empty(CODES[torch.float64], (4, 0), 0).shape == (4, 0)
    with pytest.raises(ProtocolError, match="empty"):
        empty(CODES[torch.float32], (0, 1 << 64), 0)


@pytest.mark.parametrize("dtype", sorted(CODES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 2, 1, 3)], ids=str)
def test_what_is_cut_out_of_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    memory = bytearray(range(64 + nbytes))
    tensor = cut(CODES[dtype], shape, nbytes, memory, 64)
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == nbytes  # its own bytes, not its neighbours'
    assert not tensor._is_view()
    flat = tensor.reshape(-1).view(torch.uint8)
    assert flat.tolist() == list(range(64, 64 + nbytes))
    flat[0] = 7
    assert memory[64] == 7


def test_slots_are_cut_out_of_where_they_lie() -> None:
    table = Table(Form.LIST, 0, 0, (8, 4, 4), [FLOAT, RAW, FLOAT], [(2, 1), (4,), (1,)])
    memory, whole = bytearray(80), buffer(4)
    laid = Laid([memory, memory, whole], [0, 64, 0], (8, 4, 4))
    first, raw, last = rebuild(table, laid)
    first.fill_(1.0)
    raw[:] = b"abcd"
    assert memory[:8] == first.numpy().tobytes()
    assert memory[64:68] == b"abcd"
    assert last.data_ptr() == whole.data_ptr()
    version = last._version
    first.fill_(2.0)
    assert last._version == version


@pytest.mark.parametrize("kept", [0, 1])
def test_each_part_keeps_the_view_that_it_was_cut_out_of(kept: int) -> None:
    # By whose death the peer gets its memory back.
    view = memoryview(bytearray(80))
    alive = weakref.ref(view)
    table = Table(Form.LIST, 0, 0, (8, 4), [FLOAT, RAW], [(2, 1), (4,)])
    items = rebuild(table, Laid([view, view], [0, 64], (8, 4)))
    part = np.frombuffer(items[1], dtype=np.uint8) if kept else items[0].numpy()
    del items, view
    assert alive() is not None
    del part
    assert alive() is None
