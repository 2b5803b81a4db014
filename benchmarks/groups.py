"""What open groups cost while nothing happens: threads, memory and processor time by their number.

One process opens 1, 16 and 256 groups with the same other one, each of which has carried an object
both ways; then both do nothing for a while. The second table has the bulk routes of both directions
set up too. Memory is the process's resident set, and that of a group what it grew by since there
was one.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import MEMBERS, run_pair, threads
from .outcome import Outcome

if TYPE_CHECKING:
    from aiocomm import Collective, CollectiveGroup

    from .harness import Settings

COUNTS = (0, 1, 16, 256)
KIB = 1024
CPU, MEMORY = 1.0, 100.0


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def main(collective: Collective, rank: int, idle: float, ready: bool) -> list[dict[str, Any]]:
    """Both sides alike: figures by number of groups."""
    meeting = collective.create_collective_group(MEMBERS, "meeting")
    warm = collective.create_collective_group(MEMBERS, "warm")
    await _open(warm, ready)  # modules and code paths are there from now on
    await warm.aclose()
    groups: list[CollectiveGroup] = []
    found = []
    for count in COUNTS:
        for number in range(len(groups), count):
            group = collective.create_collective_group(MEMBERS, f"group {number}")
            await _open(group, ready)
            groups.append(group)
        await _open(meeting, ready=False)
        memory = resident()
        spent, start = time.process_time(), time.perf_counter()
        await asyncio.sleep(idle)
        share = (time.process_time() - spent) / (time.perf_counter() - start)
        found.append({"groups": count, "threads": threads(), "bytes": memory, "cpu": share})
        await _open(meeting, ready=False)
    return found


async def _open(group: CollectiveGroup, ready: bool) -> None:
    if ready:
        await group.ready()
    await group.send({"here": group.rank})
    await group.recv()


def run(settings: Settings) -> list[Outcome]:
    """Measure; bars on the groups that have carried objects."""
    return [_table(settings, ready=False), _table(settings, ready=True)]


def _table(settings: Settings, *, ready: bool) -> Outcome:
    idle = 0.5 if settings.quick else 5.0
    state = "with their bulk routes" if ready else "that have carried objects"
    outcome = Outcome(
        f"idle groups in one process {state} (uvloop; the meeting's group comes on top)",
        ("groups", "threads", "RSS MiB", "KiB per group", "idle CPU, % of a core"),
    )
    results = run_pair(main, idle, ready)
    figures = {each["groups"]: each for each in results[0]}
    one = figures[1]
    for count, each in figures.items():
        per = (each["bytes"] - one["bytes"]) / (count - 1) / KIB if count > 1 else None
        each["KiB per group"] = per
        shown = "" if per is None else f"{per:.1f}"
        mib, cpu = f"{each['bytes'] / KIB**2:.1f}", f"{each['cpu'] * 100:.2f}"
        outcome.rows.append((str(count), str(each["threads"]), mib, shown, cpu))
    outcome.figures = {"rank 0": results[0], "rank 1": results[1]}
    most = figures[max(figures)]
    if not ready:
        outcome.at_most("idle CPU of an open group", one["cpu"] * 100, CPU, "% of a core")
        text = f"threads with {max(figures)} groups"
        outcome.at_most(text, most["threads"], one["threads"], "threads")
        outcome.at_most("memory of an idle group", most["KiB per group"], MEMORY, "KiB")
    return outcome
