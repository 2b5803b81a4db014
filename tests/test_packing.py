"""Layout of buffers in bodies and blocks: exact, aligned, equal on both sides, never too large."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.errors import ProtocolError
from aiocomm.packing import (
    ALIGN,
    BLOCK,
    LARGE,
    MOST_REMEMBERED,
    allocate,
    gather,
    inline,
    outline,
    plan,
    scatter,
    sizes_of,
    staged_bytes,
)
from aiocomm.payload import pack

GIB = 1 << 30
small_sizes = st.lists(st.integers(0, 3 * ALIGN) | st.sampled_from([0, 1, ALIGN]), max_size=30)
any_sizes = st.lists(
    st.integers(0, 3 * ALIGN) | st.integers(0, 2 * LARGE) | st.integers(LARGE, 1 << 50),
    max_size=60,
)


def filled(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.full((size,), number % 251 + 1, dtype=torch.uint8)
            for number, size in enumerate(sizes)]  # fmt: skip


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@given(small_sizes)
def test_a_body_gives_back_its_buffers(sizes: list[int]) -> None:
    buffers = filled(sizes)
    assert same(outline(inline(buffers), sizes), buffers)


@given(small_sizes)
def test_a_body_of_another_length_is_an_error(sizes: list[int]) -> None:
    body = inline(filled(sizes))
    for wrong in (body + b"\0", body[:-1] if body else b"\0\0"):
        with pytest.raises(ProtocolError, match="sizes say"):
            outline(wrong, sizes)


def test_a_body_shorter_than_its_sizes_allocates_nothing() -> None:
    with pytest.raises(ProtocolError):
        outline(b"12345678", [1 << 62])


def test_a_body_is_aligned_and_clean_between_its_buffers() -> None:
    body = inline(filled([1, 0, 70, 3]))
    assert body == b"\1" + bytes(63) + b"\3" * 70 + bytes(58) + b"\4" * 3


def test_layouts_of_many_are_not_remembered() -> None:
    sizes = [1] * (MOST_REMEMBERED + 1)
    assert plan(sizes) == plan(sizes)
    assert plan(sizes) is not plan(sizes)
    assert plan(sizes[1:]) is plan(sizes[1:])
    assert [buffer.nbytes for buffer in outline(inline(filled(sizes)), sizes)] == sizes


def test_sizes_of_buffers() -> None:
    assert sizes_of(filled([3, 0, 5])) == (3, 0, 5)
    assert sizes_of(outline(inline(filled([3, 0, 5])), [3, 0, 5])) == (3, 0, 5)
    assert sizes_of(pack([torch.ones(2), torch.ones(3)]).buffers) == (8, 12)


def test_memory_by_address_is_staged_as_tensors_are() -> None:
    buffers = pack([torch.full((size,), size, dtype=torch.uint8) for size in (1, 70, 3)]).buffers
    assert inline(buffers) == inline(list(buffers))
    (ours,), (theirs,) = (gather(plan((1, 70, 3)), each) for each in (buffers, list(buffers)))
    assert torch.equal(ours, theirs)


def test_a_body_may_be_a_memoryview_and_is_copied() -> None:
    source = bytearray(b"abcd")
    (buffer,) = outline(memoryview(source), [4])
    source[0] = 0
    assert buffer.tolist() == [97, 98, 99, 100]
    buffer.fill_(1)
    assert source[1] == ord("b")


def test_buffers_of_a_body_do_not_share_a_version() -> None:
    first, second = outline(inline(filled([8, 8])), [8, 8])
    before = second._version
    first.fill_(9)
    assert second._version == before
    assert not first._is_view()


@given(any_sizes)
def test_a_plan_places_every_byte_once(sizes: list[int]) -> None:
    blocks = plan(sizes)
    placed = {}
    for block in blocks:
        end = 0
        for number, offset, size in block.parts:
            assert offset % ALIGN == 0
            assert offset >= end
            end = offset + size
            assert number not in placed
            placed[number] = size
        assert end == block.nbytes
        assert len(block.parts) == 1 or block.nbytes <= BLOCK
    assert placed == {number: size for number, size in enumerate(sizes) if size}
    assert blocks == plan(tuple(sizes))


def test_large_buffers_go_alone_and_small_ones_together_across_them() -> None:
    blocks = plan([100, LARGE, 200, 5 * GIB, LARGE - 1, 0])
    assert [block.parts for block in blocks] == [
        ((1, 0, LARGE),),
        ((3, 0, 5 * GIB),),
        ((0, 0, 100), (2, 128, 200), (4, 384, LARGE - 1)),
    ]
    assert [block.nbytes for block in blocks] == [LARGE, 5 * GIB, 384 + LARGE - 1]
    assert staged_bytes(blocks) == blocks[2].nbytes


def test_two_hundred_small_buffers_are_one_transfer() -> None:
    assert len(plan([1024] * 200)) == 1
    assert len(plan([1024] * 10_000)) == 3


def test_sizes_beyond_32_bits_are_kept() -> None:
    sizes = [6 * GIB, 1 << 40, (1 << 32) + 1]
    assert [block.nbytes for block in plan(sizes)] == sizes


def test_nothing_makes_no_block() -> None:
    assert plan([]) == plan([0, 0]) == ()
    assert gather((), []) == allocate(()) == []
    assert [buffer.shape for buffer in scatter((), [], (0, 0))] == [(0,), (0,)]
    assert inline([]) == b""
    assert len(outline(b"", [])) == 0
    assert [buffer.shape for buffer in outline(b"", [0, 0])] == [(0,), (0,)]


@pytest.mark.parametrize(
    "sizes", [[1, 0, 65, 64], [LARGE, 3, LARGE + 1, 5], [LARGE - 1] * 20, [7]], ids=str
)
def test_blocks_carry_buffers_over(sizes: list[int]) -> None:
    buffers = filled(sizes)
    blocks = plan(sizes)
    sent = gather(blocks, buffers)
    received = allocate(blocks)
    for ours, theirs in zip(sent, received, strict=True):
        assert ours.dtype is torch.uint8
        assert theirs.shape == ours.shape
        theirs.copy_(ours)
    assert same(scatter(blocks, received, sizes), buffers)


def test_a_block_of_one_buffer_is_that_buffer() -> None:
    buffers = filled([LARGE, 10])
    blocks = plan([LARGE, 10])
    staged = gather(blocks, buffers)
    assert staged[0] is buffers[0]
    assert staged[1] is buffers[1]
    assert staged_bytes(blocks) == 0


def test_a_staged_block_is_clean_between_its_buffers() -> None:
    (staged,) = gather(plan([1, 2]), filled([1, 2]))
    assert staged.tolist() == [1, *[0] * 63, 2, 2]


def test_scattered_buffers_are_views_of_the_block() -> None:
    blocks = plan([4, 4])
    (memory,) = allocate(blocks)
    first, second = scatter(blocks, [memory], (4, 4))
    memory.fill_(5)
    assert first.tolist() == second.tolist() == [5] * 4


@pytest.mark.gpu
def test_blocks_are_staged_on_the_device() -> None:
    sizes = [1, 0, 65, LARGE]
    buffers = [buffer.cuda() for buffer in filled(sizes)]
    blocks = plan(sizes)
    staged = gather(blocks, buffers)
    assert all(block.is_cuda for block in staged)
    assert same(
        [buffer.cpu() for buffer in scatter(blocks, staged, sizes)],
        [buffer.cpu() for buffer in buffers],
    )
    assert inline(buffers[:3]) == inline(filled(sizes)[:3])
