"""Which bytes of the ring are in use, for every order of taking and giving back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.packing import ALIGN
from aiocomm.transport.shm.ring import Ring

SIZE = 16 * ALIGN


@given(st.lists(st.one_of(st.integers(1, SIZE + 1), st.integers(-20, -1)), max_size=60))
def test_pieces_never_overlap_and_lie_inside(steps: list[int]) -> None:
    """A positive step takes so many bytes, a negative one gives the n-th oldest piece back."""
    ring = Ring(SIZE)
    taken: dict[int, int] = {}
    for step in steps:
        if step > 0:
            offset = ring.take(step, SIZE)
            if offset is None:
                assert taken or step > SIZE
                continue
            assert offset % ALIGN == 0
            assert offset + step <= SIZE
            assert all(offset + step <= o or o + n <= offset for o, n in taken.items())
            taken[offset] = step
        elif taken:
            offset = list(taken)[-step % len(taken)]
            ring.give_back(offset)
            del taken[offset]
        assert ring.used == len(taken)
    for offset in taken:
        ring.give_back(offset)
    assert ring.take(SIZE, SIZE) == 0  # all of it again, from the start


def test_light_traffic_stays_where_it_is_warm() -> None:
    ring = Ring(SIZE)
    for _ in range(3):
        assert ring.take(ALIGN, SIZE) == 0
        ring.give_back(0)


def test_it_wraps_around_what_is_still_in_use() -> None:
    ring = Ring(SIZE)
    first, second, third = (ring.take(5 * ALIGN, SIZE) for _ in range(3))
    assert ring.take(5 * ALIGN, SIZE) is None
    assert first == 0
    ring.give_back(first)
    assert ring.take(6 * ALIGN, SIZE) is None
    assert ring.take(4 * ALIGN, SIZE) == 0
    assert ring.take(2 * ALIGN, SIZE) is None
    assert second is not None
    ring.give_back(second)
    assert ring.take(6 * ALIGN, SIZE) == 4 * ALIGN
    assert third is not None
    assert ring.take(1, SIZE) is None  # full to the brim


def test_room_comes_back_in_the_order_of_taking() -> None:
    ring = Ring(SIZE)
    first, second = ring.take(8 * ALIGN, SIZE), ring.take(8 * ALIGN, SIZE)
    assert second is not None
    ring.give_back(second)
    assert ring.take(8 * ALIGN, SIZE) is None  # the older one is in the way
    assert first is not None
    ring.give_back(first)
    assert ring.take(16 * ALIGN, SIZE) == 0


def test_what_was_not_taken_cannot_be_given_back() -> None:
    ring = Ring(SIZE)
    with pytest.raises(KeyError):
        ring.give_back(0)
    assert ring.take(1, SIZE) == 0
    with pytest.raises(KeyError):
        ring.give_back(ALIGN)
    ring.give_back(0)
    with pytest.raises(KeyError):
        ring.give_back(0)


def test_small_pieces_keep_to_the_start_of_the_ring() -> None:
    ring = Ring(SIZE)
    within = 4 * ALIGN
    offsets = [ring.take(ALIGN, within) for _ in range(5)]
    assert offsets == [0, ALIGN, 2 * ALIGN, 3 * ALIGN, None]
    large = ring.take(8 * ALIGN, SIZE)
    assert large == 4 * ALIGN
    assert ring.take(ALIGN, within) is None
    ring.give_back(0)
    assert ring.take(ALIGN, within) == 0
    for offset in (ALIGN, 2 * ALIGN, 3 * ALIGN, large, 0):
        ring.give_back(offset)
    assert ring.used == 0
