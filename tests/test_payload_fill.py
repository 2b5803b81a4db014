"""Buffers over slots: each its own, those that overlap together, empty ones none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiocomm.packing_places import Held
from aiocomm.payload_fill import fill
from aiocomm.payload_pickle import Slots
from aiocomm.payload_table import PLACED, Form, Table


def filled(*items: Any) -> tuple[Table, Any]:
    slots = Slots()
    slots.add(items)
    table = Table(Form.LIST)
    return table, fill(table, slots)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_each_tensor_has_a_buffer_over_its_memory(count: int) -> None:
    tensors = [torch.full((3, 2), float(number)) for number in range(count)]
    table, buffers = filled(*tensors)
    assert isinstance(buffers, Held) is (count > 1)
    assert [buffer.data_ptr() for buffer in buffers] == [each.data_ptr() for each in tensors]
    assert list(table.sizes) == [24] * count
    assert list(table.codes) == [1] * count
    assert not table.flags


def test_empty_tensors_have_none() -> None:
    table, buffers = filled(torch.ones(2), torch.empty(0, 3), torch.ones(3), torch.empty(0))
    assert list(table.sizes) == [buffer.nbytes for buffer in buffers] == [8, 12]
    assert [tuple(shape) for shape in table.shapes] == [(2,), (0, 3), (3,), (0,)]
    table, buffers = filled(torch.empty(0), torch.empty(0))
    assert list(buffers) == list(table.sizes) == []


def test_neighbours_in_one_storage_stay_apart() -> None:
    whole = torch.arange(12)
    parts = [whole[8:], whole[:4], whole[4:8], whole[2:2]]
    table, buffers = filled(*parts)
    assert not table.flags
    assert [buffer.data_ptr() for buffer in buffers] == [part.data_ptr() for part in parts[:3]]


def test_what_overlaps_shares_a_buffer() -> None:
    whole, other = torch.arange(10, dtype=torch.uint8), torch.ones(2)
    table, buffers = filled(whole[4:], other, whole[:6], whole[5:6])
    assert table.flags == PLACED
    run = [slot for slot in (0, 2, 3) if table.homes[slot] == table.homes[0]]
    assert run == [0, 2, 3]
    assert [table.offsets[slot] for slot in (0, 2, 3)] == [4, 0, 5]
    assert sorted(table.sizes) == [8, 10]
    shared = buffers[table.homes[0]]
    assert shared.data_ptr() == whole.data_ptr()
    assert shared.nbytes == 10


def test_one_that_spans_the_others_is_the_buffer() -> None:
    whole = torch.arange(10, dtype=torch.uint8)
    table, buffers = filled(whole[3:4], whole, whole[9:])
    assert list(table.offsets) == [3, 0, 9]
    assert [buffer.data_ptr() for buffer in buffers] == [whole.data_ptr()]


def test_bytes_beside_tensors() -> None:
    raw = memoryview(bytearray(b"abc"))
    _, buffers = filled(torch.ones(1), raw)
    buffers[1].fill_(ord("x"))
    assert bytes(raw) == b"xxx"
