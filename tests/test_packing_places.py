"""Buffers by where they lie: a tensor of one when asked for, and memory that stays what it was."""

from __future__ import annotations

import gc
import weakref

import torch

from aiocomm.packing import gather, inline, plan
from aiocomm.packing_places import Held, Laid
from aiocomm.payload_bytes import view_of


def held(*tensors: torch.Tensor) -> Held:
    pointers = [tensor.data_ptr() for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    return Held(list(tensors), pointers, sizes, on_cpu=True)


def test_held_tensors_are_seen_as_their_own_bytes() -> None:
    tensors = [torch.ones(2, 3), torch.arange(4)[1:3], torch.tensor(True)]
    buffers = held(*tensors)
    assert len(buffers) == 3
    assert [buffer.dtype for buffer in buffers] == [torch.uint8] * 3
    assert [buffer.shape for buffer in buffers] == [(24,), (16,), (1,)]
    assert [buffer.data_ptr() for buffer in buffers] == buffers.pointers
    assert [buffer.shape for buffer in buffers[1:]] == [(16,), (1,)]
    buffers[1].zero_()
    assert tensors[1].tolist() == [0, 0]


def test_what_was_there_at_the_call_is_what_travels() -> None:
    tensor = torch.arange(8, dtype=torch.uint8)
    buffers = held(tensor[2:])
    part = buffers._owners[0]
    part.data = torch.zeros(100, dtype=torch.uint8)
    del tensor
    gc.collect()
    assert buffers[0].tolist() == [2, 3, 4, 5, 6, 7]
    with torch.inference_mode():
        assert not buffers[0].is_inference()


def test_memory_that_this_process_may_not_read_is_asked_for_as_tensors() -> None:
    tensors = [torch.full((size,), size, dtype=torch.uint8) for size in (1, 70, 3)]
    pointers, sizes = [each.data_ptr() for each in tensors], [1, 70, 3]
    elsewhere = Held(list(tensors), pointers, sizes, on_cpu=False)  # as if on a device
    assert inline(elsewhere) == inline(held(*tensors))
    (ours,), (theirs,) = (gather(plan(sizes), each) for each in (elsewhere, held(*tensors)))
    assert torch.equal(ours, theirs)


def test_raw_bytes_and_what_is_appended() -> None:
    view = view_of(torch.tensor([1, 2, 3], dtype=torch.uint8))
    buffers = held()
    buffers.append(torch.tensor([7], dtype=torch.uint8))
    raw = Held([view], [torch.frombuffer(view, dtype=torch.uint8).data_ptr()], [3], on_cpu=True)
    assert raw[0].tolist() == [1, 2, 3]
    assert [each.tolist() for each in buffers] == [[7]]


def test_what_is_laid_is_a_tensor_or_cut_out_of_memory() -> None:
    whole = torch.arange(3, dtype=torch.uint8)
    memory = bytearray(b"abcdef")
    laid = Laid([whole, memory, memory], [0, 1, 4], (3, 2, 2))
    assert len(laid) == 3
    assert laid[0] is whole
    assert bytes(view_of(laid[1])) == b"bc"
    assert [bytes(view_of(each)) for each in laid[1:]] == [b"bc", b"ef"]
    laid[2].fill_(ord("x"))
    assert memory == b"abcdxx"
    before = laid[1]._version
    laid[2].fill_(0)
    assert laid[1]._version == before


def test_pieces_keep_their_block_alive_and_no_longer() -> None:
    block = torch.arange(64, dtype=torch.uint8)
    gone = weakref.ref(block)
    laid = Laid([view_of(block)], [3], (2,))
    del block
    piece = laid[0]
    del laid
    gc.collect()
    assert piece.tolist() == [3, 4]
    assert gone() is not None
    del piece
    gc.collect()
    assert gone() is None
