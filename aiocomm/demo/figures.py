"""Percentiles and rates, defined once for the demo's table and for the benchmarks.

Pure arithmetic. Rejected: ``statistics.quantiles``, which interpolates between samples, so that a
p99 may be a value that nobody has measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that is not exceeded by ``percent`` per cent of them (nearest rank).

    Raises:
        ValueError: there are no samples, or the percentage is not in (0, 100].
    """
    if not samples:
        raise ValueError("no samples")
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} is not a percentage above 0 and up to 100")
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def median(samples: Sequence[float]) -> float:
    """The nearest-rank median: one of the samples."""
    return percentile(samples, 50)


def busy(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of the intervals: the time in which at least one was under way."""
    total, until = 0, None
    for start, end in sorted(intervals):
        if until is None or start > until:
            total += end - start
            until = end
        elif end > until:
            total += end - until
            until = end
    return total
