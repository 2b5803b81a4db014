"""Round trip of a small object, against the fastest a Python process can do over the same socket.

The raw side is an ``asyncio.Protocol`` on a Unix socket that echoes as many bytes as the object
pickles to, and answers from ``data_received`` itself: no frames, no pickling, no futures, no tasks.
A second raw line awaits a future for each echo, as a coroutine must. All take turns in the same two
processes, on uvloop and on asyncio.

Where the two processes run decides more than the code: on one CPU a raw round trip takes some 6 us,
on two CPUs some 65 us, most of it the waking of the other one, and a scheduler left alone picks now
this and now that. So both are measured with the processes pinned. The bar is on two CPUs, where two
workers would be; the one-CPU rows show the price in CPU time without the wakings. The peers go
through the same on two CPUs, each in its own two processes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiocomm.demo.figures import median

from .contest import Cell, Plan
from .harness import LOOPS, MEMBERS, folder, run_pair
from .outcome import Outcome, ratios
from .payloads import MESSAGE
from .peers.lines import FLOOR, OURS

if TYPE_CHECKING:
    from aiocomm import Collective, CollectiveGroup

    from .contest import Scores
    from .harness import Settings

BODY = pickle.dumps(MESSAGE, 5)
BAR = 2.0
SLOWER = ("pyzmq asyncio", "Dask comm", "ucxx", "Ray actor", "RLinf")


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Ping(asyncio.Protocol):
    """Counts echoes; sends the next one itself until a run is over, or wakes whoever waits."""

    def __init__(self) -> None:
        self._missing = 0
        self._runs = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def start(self, runs: int) -> asyncio.Future[None]:
        """Send, and so many echoes later the future completes."""
        self._runs = runs
        self._missing = len(BODY)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(BODY)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing:
            return
        self._runs -= 1
        if self._runs:
            self._missing = len(BODY)
            self.transport.write(BODY)
        elif self._done is not None:
            self._done.set_result(None)


async def drive(group: CollectiveGroup, path: str, rounds: int, count: int) -> dict[str, Any]:
    """Rank 0: the rounds, each kind in turn; seconds per round trip, by kind."""
    await group.recv()  # the other side listens
    loop = asyncio.get_running_loop()
    _, ping = await loop.create_unix_connection(Ping, path)
    seconds: dict[str, list[float]] = {"raw": [], "raw awaited": [], "aiocomm": []}
    for number in range(rounds + 1):
        start = time.perf_counter()
        await ping.start(count)
        raw = time.perf_counter()
        for _ in range(count):
            await ping.start(1)
        awaited = time.perf_counter()
        for _ in range(count):
            reply = group.recv()
            await group.send(MESSAGE)
            await reply
        ours = time.perf_counter()
        if number:  # the first round warms up
            seconds["raw"].append((raw - start) / count)
            seconds["raw awaited"].append((awaited - raw) / count)
            seconds["aiocomm"].append((ours - awaited) / count)
    ping.transport.close()
    return seconds


async def answer(group: CollectiveGroup, path: str, total: int) -> None:
    """Rank 1: echoes on the socket and in the group."""
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    await group.send("listening")
    for _ in range(total):
        await group.send(await group.recv())
    server.close()
    await group.recv()


async def main(
    collective: Collective, rank: int, path: str, rounds: int, count: int, cpus: int
) -> Any:
    """Both sides, by rank, on that many CPUs."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % cpus]})
    group = collective.create_collective_group(MEMBERS)
    if rank == 0:
        seconds = await drive(group, path, rounds, count)
        await group.send("enough")
        return seconds
    await answer(group, path, (rounds + 1) * count)
    return None


def run(settings: Settings) -> Outcome:
    """Measure; the bar holds on uvloop, on two CPUs, against the raw callbacks."""
    rounds, count = (3, 200) if settings.quick else (15, 500)
    outcome = Outcome(
        f"round trip of a small dict ({len(BODY)} bytes pickled)",
        ("loop", "CPUs", "raw us", "raw awaited us", "aiocomm us", "x raw", "x raw awaited"),
    )
    for loop in LOOPS:
        for cpus in range(min(2, len(os.sched_getaffinity(0))), 0, -1):
            with folder() as path:
                seconds = run_pair(main, str(Path(path) / "s"), rounds, count, cpus, loop=loop)[0]
            ratio = ratios(seconds["aiocomm"], seconds["raw"])
            awaited = ratios(seconds["aiocomm"], seconds["raw awaited"])
            medians = [f"{median(values) * 1e6:.1f}" for values in seconds.values()]
            outcome.rows.append((loop, str(cpus), *medians, f"{ratio:.2f}", f"{awaited:.2f}"))
            figures = {"seconds": seconds, "x raw": ratio, "x raw awaited": awaited}
            outcome.figures[f"{loop}, CPUs {cpus}"] = figures
            if loop == "uvloop" and cpus == 2:
                outcome.at_most("object round trip, of a raw uvloop socket's", ratio, BAR)
    return outcome


def plan(settings: Settings) -> Plan:
    """The same dict through every peer, a core for each process."""
    cpus = min(2, len(os.sched_getaffinity(0)))
    count = 100 if settings.quick else 300
    arguments = {"payload": "dict", "count": count, "cpus": cpus}
    return Plan([Cell("us", "exchange", arguments)], 3 if settings.quick else 11)


def report(scores: Scores, settings: Settings) -> Outcome:
    """Peers by time; the bar is to be ahead of those that run on event loops or on actors."""
    (cell,) = plan(settings).cells
    outcome = scores.table(
        "round trip of a small dict through each peer (and times aiocomm's)",
        [cell],
        lambda _, seconds: f"{seconds * 1e6:.1f}",
    )
    outcome.figures["x raw"] = scores.ratio(cell.name, OURS, FLOOR)
    for peer in SLOWER:
        outcome.at_most(f"object round trip, of {peer}'s", scores.ratio(cell.name, OURS, peer), 1.0)
    return outcome
