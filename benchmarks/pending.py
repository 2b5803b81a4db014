"""Ten thousand receives pending on one loop: threads, memory and time of each.

Memory is what the allocator of Python and the process itself say; rounds take turns with one
pending receive, whose threads are the measure.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

from aiocomm.demo.figures import median

from .harness import MEMBERS, run_pair, threads
from .outcome import Outcome

if TYPE_CHECKING:
    from aiocomm import Collective

    from .harness import Settings

MANY = 10_000


async def main(collective: Collective, rank: int, rounds: int) -> list[dict[str, float]]:
    """Rank 0 receives, rank 1 sends once told to."""
    group = collective.create_collective_group(MEMBERS)
    found = []
    for number in range(rounds):
        if rank == 1:
            for count in (1, MANY):
                await group.recv()
                await asyncio.gather(*[group.send(each) for each in range(count)])
            continue
        one = group.recv()
        await group.send("go")
        before = threads()
        await one
        gc.collect()
        traced = number == rounds - 1  # tracing is slow: the last round gives memory, not time
        if traced:
            tracemalloc.start()
        start = time.perf_counter()
        works = [group.recv() for _ in range(MANY)]
        posted = time.perf_counter()
        memory = tracemalloc.get_traced_memory()[0] if traced else 0
        tracemalloc.stop()
        await asyncio.sleep(0)  # one turn, so that whatever would start a thread has its chance
        during = threads()
        await group.send("go")
        last = time.perf_counter()
        results = await asyncio.gather(*works)
        done = time.perf_counter()
        assert results == list(range(MANY))
        found.append(
            {
                "threads with one": before,
                "threads": during,
                "bytes each": memory / MANY,
                "post": (posted - start) / MANY,
                "complete": (done - last) / MANY,
            }
        )
    return found


def run(settings: Settings) -> Outcome:
    """Measure; the bar is that threads do not grow."""
    found: list[dict[str, Any]] = run_pair(main, 2 if settings.quick else 6)[0]
    timed, traced = found[:-1], found[-1]
    # The same round's: a thread of the rendezvous may still be there in the first one.
    worst = max(found, key=lambda each: each["threads"] - each["threads with one"])
    one, many = worst["threads with one"], worst["threads"]
    post = median([each["post"] for each in timed])
    complete = median([each["complete"] for each in timed])
    outcome = Outcome(
        f"{MANY:,} receives pending on one loop (uvloop)",
        ("receives", "threads", "bytes each", "us to post", "us to complete"),
        figures={"rounds": found},
    )
    outcome.rows.append(("1", str(one), "", "", ""))
    outcome.rows.append(
        (
            f"{MANY:,}",
            str(many),
            f"{traced['bytes each']:.0f}",
            f"{post * 1e6:.1f}",
            f"{complete * 1e6:.1f}",
        )
    )
    outcome.at_most(f"threads with {MANY:,} receives pending", many, one, "threads")
    return outcome
