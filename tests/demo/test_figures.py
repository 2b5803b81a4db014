"""Percentiles are samples, and busy time counts overlaps once."""

from __future__ import annotations

import pytest

from aiocomm.demo.figures import busy, median, percentile


def test_percentile_is_the_nearest_rank() -> None:
    samples = [float(each) for each in range(100, 0, -1)]
    assert percentile(samples, 50) == 50
    assert percentile(samples, 99) == 99
    assert percentile(samples, 100) == 100
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert percentile([1.0, 2.0, 3.0, 100.0], 99) == 100.0


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_percentile_refuses_what_is_none(percent: float) -> None:
    with pytest.raises(ValueError, match="percentage"):
        percentile([1.0], percent)


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_busy_counts_overlaps_once() -> None:
    assert busy([]) == 0
    assert busy([(0, 10), (20, 25)]) == 15
    assert busy([(5, 12), (0, 10)]) == 12
    assert busy([(0, 10), (2, 3), (10, 11)]) == 11
