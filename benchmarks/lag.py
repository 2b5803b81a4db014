"""How late the event loop gets while 256 MiB tensors go both ways over aiocomm.

Rounds take turns: an idle loop, then transfers in both directions, awaited on the same loop that is
watched; once with the routes that aiocomm takes by itself and once with Gloo. Nothing else runs in
the processes. Timers of uvloop count in whole milliseconds, so an idle loop shows up to one as
well: that is what the idle rounds are for.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import torch

import aiocomm
from aiocomm.demo.figures import median
from aiocomm.demo.lag import Lag, LagWatch

from .harness import MEMBERS, run_pair
from .outcome import Outcome

if TYPE_CHECKING:
    from aiocomm import Collective, CollectiveGroup

    from .harness import Settings

SIZE = 256 << 20
BAR = 0.005


async def stream(group: CollectiveGroup, out: torch.Tensor, into: torch.Tensor, count: int) -> None:
    """So many tensors out and in at once."""

    async def send() -> None:
        for _ in range(count):
            await group.send_tensor(out)

    async def receive() -> None:
        for _ in range(count):
            await group.recv_tensor(into)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        tasks.create_task(receive())


async def main(collective: Collective, rank: int, rounds: int, count: int) -> dict[str, Any]:
    """Both sides alike."""
    torch.set_num_threads(1)
    group = collective.create_collective_group(MEMBERS)
    out = torch.full((SIZE,), rank, dtype=torch.uint8)
    into = torch.zeros_like(out)
    await stream(group, out, into, 1)
    found: dict[str, list[Lag]] = {"idle": [], "streaming": []}
    seconds = []
    for _ in range(rounds):
        await _meet(group)
        async with LagWatch() as watch:
            start = time.perf_counter()
            await stream(group, out, into, count)
            seconds.append(time.perf_counter() - start)
            found["streaming"].append(watch.lag())
        await _meet(group)
        async with LagWatch() as watch:
            await asyncio.sleep(seconds[-1])
            found["idle"].append(watch.lag())
    routes = list(group.statistics().sent)
    return {"lag": found, "rate": [2 * count * SIZE / each for each in seconds], "routes": routes}


async def _meet(group: CollectiveGroup) -> None:
    await group.send("here")
    await group.recv()


def run(settings: Settings) -> Outcome:
    """Measure; the bar is on the median of the rounds' p99, at the worse of the two ends."""
    rounds, count = (1, 1) if settings.quick else (5, 4)
    outcome = Outcome(
        "loop lag while 256 MiB tensors go both ways (uvloop)",
        ("route, end, state", "p50 ms", "p99 ms", "largest ms", "GB/s both ways"),
    )
    for route in (None, "gloo"):
        results = run_pair(main, rounds, count, options=aiocomm.Options(route=route))
        _note(outcome, route or "default", results)
    return outcome


def _note(outcome: Outcome, route: str, results: list[dict[str, Any]]) -> None:
    worst = 0.0
    for rank, result in enumerate(results):
        for state, lags in result["lag"].items():
            p99 = median([lag.p99 for lag in lags])
            figures = (median([lag.p50 for lag in lags]), p99, max(lag.largest for lag in lags))
            rate = f"{median(result['rate']) / 1e9:.2f}" if state == "streaming" else ""
            texts = [f"{each * 1e3:.2f}" for each in figures]
            name = f"{route}, rank {rank}, {state}"
            outcome.rows.append((name, *texts, rate))
            outcome.figures[name] = dict(zip(("p50", "p99", "max"), figures, strict=True))
            if state == "streaming":
                worst = max(worst, p99)
    outcome.at_most(f"loop lag p99, {route} route", worst * 1e3, BAR * 1e3, "ms")
    carried = {route for result in results for route in result["routes"]} - {"link"}
    outcome.figures[f"{route} carried by"] = sorted(carried)
    if route == "gloo":
        outcome.bar(f"carried by the gloo route: {', '.join(carried)}", carried == {"gloo"})
