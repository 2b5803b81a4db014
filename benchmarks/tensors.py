"""Round trips of a dict of small tensors, from one to ten thousand of 1 KiB, through every peer.

What one more tensor costs is the slope between two counts; where it stays the same the cost is
linear.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from .contest import Cell, Plan
from .peers.lines import OURS

if TYPE_CHECKING:
    from .contest import Scores
    from .harness import Settings
    from .outcome import Outcome

NBYTES = 1024
JUDGED = 200
COUNTS = {1: 100, 10: 50, 100: 20, JUDGED: 10, 1_000: 3, 10_000: 1}
"""Round trips in a round, by tensors in the dict."""
QUICK = {1: 20, 10: 10, JUDGED: 4, 1_000: 1}
OF_MPI, OF_RLINF = 3.0, 20.0


def plan(settings: Settings) -> Plan:
    """A cell for each number of tensors."""
    cells = [
        Cell(f"{tensors:,}", "exchange", {"payload": f"tensors:{tensors}:{NBYTES}", "count": count})
        for tensors, count in (QUICK if settings.quick else COUNTS).items()
    ]
    return Plan(cells, 1 if settings.quick else 5)


def slopes(scores: Scores, line: str, counts: list[int]) -> dict[str, float]:
    """Seconds that one more tensor adds to a round trip, between neighbouring counts."""
    found = {}
    for few, many in pairwise(counts):
        less, more = scores.median(f"{few:,}", line), scores.median(f"{many:,}", line)
        if less is not None and more is not None:
            found[f"{few:,} to {many:,}"] = (more - less) / (many - few)
    return found


def report(scores: Scores, settings: Settings) -> Outcome:
    """Milliseconds by number of tensors, and the slope at the end."""
    cells = plan(settings).cells
    outcome = scores.table(
        f"round trip of a dict of float32 tensors of {NBYTES} bytes, ms (and times aiocomm's)",
        cells,
        lambda _, seconds: f"{seconds * 1e3:.3g}",
        compared=[f"{JUDGED:,}"],
    )
    counts = [count for count in (QUICK if settings.quick else COUNTS) if count != JUDGED]
    found = {line.name: slopes(scores, line.name, counts) for line in scores.lines}
    outcome.figures["seconds per tensor"] = found
    last = [f"{few:,} to {many:,}" for few, many in pairwise(counts)][-2:]
    outcome.columns = (*outcome.columns, *(f"us each, {each}" for each in last))
    outcome.rows = [
        (*row, *(_micro(found[row[0].splitlines()[0]].get(each)) for each in last))
        for row in outcome.rows
    ]
    name = f"{JUDGED:,}"
    what = f"dict of {JUDGED} tensors, round trip"
    outcome.at_most(f"{what}, of mpi4py's", scores.ratio(name, OURS, "mpi4py"), OF_MPI)
    outcome.at_least(f"{what}, RLinf's of aiocomm's", scores.ratio(name, "RLinf", OURS), OF_RLINF)
    return outcome


def _micro(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
