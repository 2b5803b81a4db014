"""Trajectories follow from seed and number, and come in both kinds and in very different sizes."""

from __future__ import annotations

from typing import Any

from aiocomm.demo.checksum import checksum
from aiocomm.demo.messages import SHAPES, VOCABULARY, Trajectory, make_trajectory


def test_the_same_again() -> None:
    for number in (0, 1):
        again = checksum(make_trajectory(7, 2, number))
        assert checksum(make_trajectory(7, 2, number)) == again
        assert checksum(make_trajectory(8, 2, number)) != again
        assert checksum(make_trajectory(7, 3, number)) != again
        assert checksum(make_trajectory(7, 2, number + 2 * len(SHAPES))) != again


def test_both_kinds_by_turns() -> None:
    assert [type(make_trajectory(0, 0, number)) for number in range(4)] == [
        dict,
        Trajectory,
        dict,
        Trajectory,
    ]


def test_shapes_and_ranges() -> None:
    found = make_trajectory(0, 4, 1)
    assert isinstance(found, Trajectory)
    assert (found.step, found.number) == (4, 1)
    assert tuple(found.tokens.shape) == tuple(found.mask.shape) == SHAPES[1]
    assert found.rewards.shape == SHAPES[1][:1]
    assert 0 <= int(found.tokens.min()) <= int(found.tokens.max()) < VOCABULARY


def test_sizes_lie_on_both_sides_of_the_eager_limit() -> None:
    def nbytes(number: int) -> int:
        found: Any = make_trajectory(0, 0, number)
        tokens = found["prompt"]["tokens"] if isinstance(found, dict) else found.tokens
        return int(tokens.numel() * 15)

    sizes = [nbytes(number) for number in range(len(SHAPES))]
    assert min(sizes) < 2_000
    assert max(sizes) > 1_000_000
