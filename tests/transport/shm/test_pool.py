"""Lent segments are found again by size, bounded by the cap, and let go of when idle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiocomm.transport.shm.pool import STEPS, Lent, Pool, size_class

MIB = 1 << 20
CAP = 64 * MIB


class Maker:
    """Makes segments that are sizes only, until there are no more to be had."""

    def __init__(self, cap: int = CAP) -> None:
        self.made: list[int] = []
        self.dropped: list[int] = []
        self.exhausted = False
        self.pool = Pool(cap, self._make, lambda lent: self.dropped.append(lent.number))

    def _make(self, nbytes: int) -> Lent | None:
        if self.exhausted:
            return None
        segment: Any = SimpleNamespace(nbytes=nbytes)
        self.made.append(nbytes)
        return Lent(len(self.made), segment)

    def take(self, nbytes: int) -> Lent:
        lent = self.pool.take(nbytes)
        assert lent is not None
        return lent


@given(st.integers(1, 1 << 40))
def test_a_class_fits_and_wastes_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size < nbytes + max(4096, nbytes // STEPS + 1)
    assert size % 4096 == 0
    assert size_class(size) == size


def test_what_came_back_serves_the_next_message_of_its_size() -> None:
    maker = Maker()
    first = maker.take(4 * MIB)
    second = maker.take(4 * MIB)
    assert second is not first
    maker.pool.give_back(first)
    assert maker.take(4 * MIB - 1000) is first
    assert len(maker.made) == 2


def test_the_tightest_fit_is_taken_and_a_far_larger_one_is_not() -> None:
    maker = Maker()
    large, small = maker.take(16 * MIB), maker.take(5 * MIB)
    maker.pool.give_back(large)
    maker.pool.give_back(small)
    assert maker.take(4 * MIB) is small
    assert maker.take(4 * MIB) is not large


def test_past_the_cap_idle_ones_make_room_and_busy_ones_do_not() -> None:
    maker = Maker()
    first, second = maker.take(32 * MIB), maker.take(24 * MIB)
    assert maker.pool.take(16 * MIB) is None  # both are with the receiver
    assert maker.dropped == []
    maker.pool.give_back(second)
    assert maker.pool.take(40 * MIB) is None  # would not fit without it either
    assert maker.dropped == []
    assert maker.take(32 * MIB).number == 3
    assert maker.dropped == [second.number]
    assert maker.pool.nbytes == 64 * MIB
    maker.pool.give_back(first)
    assert maker.take(30 * MIB) is first


def test_more_than_the_cap_is_never_lent() -> None:
    maker = Maker(cap=MIB)
    assert maker.pool.take(MIB + 1) is None
    assert maker.made == []
    assert maker.pool.take(MIB) is not None


def test_without_memory_nothing_is_lent_and_the_pool_stays_as_it_is() -> None:
    maker = Maker()
    maker.exhausted = True
    assert maker.pool.take(MIB) is None
    assert maker.pool.nbytes == 0
    maker.exhausted = False
    assert maker.take(MIB).number == 1


def test_what_is_idle_for_a_whole_turn_is_let_go_of() -> None:
    maker = Maker()
    idle, used, busy = maker.take(2 * MIB), maker.take(8 * MIB), maker.take(2 * MIB)
    maker.pool.give_back(idle)
    maker.pool.give_back(used)
    assert maker.pool.age()
    assert maker.take(8 * MIB) is used
    maker.pool.give_back(used)
    assert maker.pool.age()
    assert maker.dropped == [idle.number]
    assert maker.pool.age()
    assert maker.dropped == [idle.number, used.number]
    maker.pool.give_back(busy)
    assert not maker.pool.age()
    assert maker.dropped == [idle.number, used.number, busy.number]


def test_clearing_hands_all_of_them_out() -> None:
    maker = Maker()
    first, second = maker.take(MIB), maker.take(MIB)
    assert maker.pool.clear() == [first, second]
    assert maker.pool.nbytes == 0
    first.drop()
    assert not hasattr(first, "segment")
