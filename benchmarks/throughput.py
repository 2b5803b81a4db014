"""Tensors streamed one way into buffers that are ready, by size, through every peer.

A round is a stream of several tensors, posted as the library likes it best, and its time that of
the receiver, from the moment it begins to receive until the last buffer is filled. What a library
delivers in memory of its own is copied into the buffer. A pass of the same length goes before and
is not timed: pages and routes are there by then, and the kernel has given each process a core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .contest import Cell, Plan
from .payloads import MIB
from .peers.lines import ALIASED, BARE_GLOO, OURS, SHARED

if TYPE_CHECKING:
    from .contest import Scores
    from .harness import Settings
    from .outcome import Outcome

COUNTS = {64 << 10: 2048, MIB: 256, 4 * MIB: 64, 16 * MIB: 16, 256 * MIB: 3}
"""Tensors in a round, by size: enough that what the round begins with does not count."""
QUICK = {64 << 10: 64, MIB: 16, 16 * MIB: 4}
JUDGED = (MIB, 16 * MIB, 256 * MIB)
MPI = "mpi4py"
OF_MPI, OF_GLOO = 0.8, 2.0


def sizes(settings: Settings) -> dict[int, int]:
    """Tensors in a round, by size."""
    return QUICK if settings.quick else COUNTS


def size_name(size: int) -> str:
    """A size in words."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"


def plan(settings: Settings) -> Plan:
    """A cell for each size."""
    cells = [
        Cell(size_name(size), "stream", {"size": size, "count": count})
        for size, count in sizes(settings).items()
    ]
    return Plan(cells, 2 if settings.quick else 7)


def rates(scores: Scores, settings: Settings) -> dict[str, dict[int, float]]:
    """Bytes per second by line and size."""
    found: dict[str, dict[int, float]] = {}
    for line in scores.lines:
        for size, count in sizes(settings).items():
            seconds = scores.median(size_name(size), line.name)
            if seconds is not None:
                found.setdefault(line.name, {})[size] = size * count / seconds
    return found


def report(scores: Scores, settings: Settings) -> Outcome:
    """GB/s by size, and the bars on the sizes that have one."""
    counts = {size_name(size): size * count for size, count in sizes(settings).items()}
    outcome = scores.table(
        "stream of CPU tensors into ready buffers, GB/s (and times aiocomm's)",
        plan(settings).cells,
        lambda cell, seconds: f"{counts[cell.name] / seconds / 1e9:.2f}",
    )
    outcome.figures["bytes per second"] = rates(scores, settings)
    for size in sizes(settings):
        if size in JUDGED:
            _judge(outcome, scores, size_name(size))
    return outcome


def _judge(outcome: Outcome, scores: Scores, name: str) -> None:
    for peer, limit in ((MPI, OF_MPI), (BARE_GLOO, OF_GLOO)):
        ratio = scores.ratio(name, peer, OURS)
        outcome.at_least(f"stream of {name}, of {peer}'s rate", ratio, limit)
    for line in (SHARED, ALIASED):
        others = {
            other.name: ratio
            for other in scores.lines
            if other.module not in ("ours", "memcpy")
            and (ratio := scores.ratio(name, other.name, line)) is not None
        }
        best = min(others, key=others.__getitem__, default="the others")
        outcome.at_least(f"{line}, {name}, of {best}'s rate", others.get(best), 1.0)
