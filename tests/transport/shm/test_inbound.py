"""Which memory the bytes of a message on its way in end in."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiocomm.packing import LARGE, lay_out
from aiocomm.packing_places import Laid
from aiocomm.transport.shm.copies import copy
from aiocomm.transport.shm.inbound import Inbound, blocks_for

from .ends import ramp

nothing: Any = None

sizes_of_messages = st.lists(
    st.one_of(st.just(0), st.integers(1, 200), st.just(LARGE), st.just(LARGE + 1)),
    min_size=1,
    max_size=7,
)


@given(sizes_of_messages)
def test_large_buffers_are_apart_and_small_neighbours_together(sizes: list[int]) -> None:
    offsets, _ = lay_out(sizes)
    blocks = blocks_for(sizes, offsets)
    previous_end = 0
    for block in blocks:
        assert previous_end <= block.start < block.end
        previous_end = block.end
    for offset, size in zip(offsets, sizes, strict=True):
        homes = [each for each in blocks if each.start <= offset and offset + size <= each.end]
        if size >= LARGE:
            assert [(home.start, home.end) for home in homes] == [(offset, offset + size)]
        elif size:
            assert len(homes) == 1
    runs = sum(size >= LARGE for size in sizes)
    assert len(blocks) <= 2 * runs + 1


@given(sizes_of_messages, st.integers(64, LARGE))
def test_pieces_of_any_length_bring_every_buffer(sizes: list[int], piece: int) -> None:
    offsets, total = lay_out(sizes)
    piece &= -64
    message = ramp(total + 1)
    blocks = blocks_for(sizes, offsets)
    job = Inbound(total, nothing, blocks, Laid([], offsets, sizes))
    for start in range(0, total, piece):
        end = min(total, start + piece)
        copy(job.ranges(start, end, message.data_ptr() + start))
    job.whole()
    assert job.buffers is not None
    assert [buffer.numel() for buffer in job.buffers] == sizes
    for buffer, offset, size in zip(job.buffers, offsets, sizes, strict=True):
        assert buffer.equal(message[offset : offset + size])


def test_memory_is_made_only_for_what_is_copied() -> None:
    sizes = [LARGE, LARGE]
    offsets, total = lay_out(sizes)
    job = Inbound(total, nothing, blocks_for(sizes, offsets), Laid([], offsets, sizes))
    job.ranges(LARGE, 2 * LARGE, 0)
    assert [block.memory is not None for block in job.blocks] == [False, True]
