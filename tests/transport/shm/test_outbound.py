"""Where the bytes of a message on its way out come from."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiocomm.packing import lay_out
from aiocomm.transport.shm.outbound import Outbound

nothing: Any = None


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.data())
def test_every_byte_is_copied_from_its_buffer(sizes: list[int], data: st.DataObject) -> None:
    offsets, total = lay_out(sizes)
    base = 1 << 20  # of buffer n: n MiB
    parts = [
        (offset, offset + size, base * (number + 1))
        for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
        if size
    ]
    job = Outbound((), parts, total, nothing, lend=False)
    start = data.draw(st.integers(0, max(0, total - 1)))
    end = data.draw(st.integers(min(total, start + 1), total))
    got = {}
    for target, source, nbytes in job.ranges(start, end, 5000):
        assert nbytes > 0
        for index in range(nbytes):
            assert target + index not in got
            got[target + index] = source + index
    expected = {}
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        for index in range(size):
            if start <= offset + index < end:
                expected[5000 + offset + index - start] = base * (number + 1) + index
    assert got == expected
