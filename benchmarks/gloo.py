"""A stream of CPU tensors over the gloo route, against the bare Gloo broadcast it is made of.

Both use the same two processes and the same memory, post a whole round at once and wait for all of
it, and take turns. The bare one blocks its thread in ``Work.wait``, which a program with an event
loop could not.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import aiocomm
from aiocomm.demo.figures import median

from .harness import MEMBERS, folder, run_pair
from .outcome import Outcome, ratios
from .peers.gloo import bare, bare_group

if TYPE_CHECKING:
    from aiocomm import Collective, CollectiveGroup

    from .harness import Settings

MIB = 1 << 20
SIZES = {1 * MIB: 64, 16 * MIB: 16, 256 * MIB: 3}
"""Tensors per round, by size."""

BAR = 0.95


async def ours(group: CollectiveGroup, rank: int, tensors: list[torch.Tensor]) -> None:
    """The same through the group."""
    call = group.recv_tensor if rank else group.send_tensor
    await asyncio.gather(*[call(tensor) for tensor in tensors])


async def main(collective: Collective, rank: int, path: str, rounds: int) -> Any:
    """Rank 0 sends, rank 1 receives and takes the time: seconds by size and kind."""
    torch.set_num_threads(1)
    group = collective.create_collective_group(MEMBERS)
    gloo = bare_group(str(Path(path) / "store"), rank)
    found: dict[int, dict[str, list[float]]] = {}
    for size, count in SIZES.items():
        # Few enough to fit, and more than one, so that no tensor is the previous one.
        buffers = [torch.full((size,), rank, dtype=torch.uint8) for _ in range(min(count, 4))]
        tensors = [buffers[number % len(buffers)] for number in range(count)]
        seconds: dict[str, list[float]] = {"aiocomm": [], "bare": []}
        for number in range(rounds + 1):
            kinds = ("aiocomm", "bare") if number % 2 else ("bare", "aiocomm")
            for kind in kinds:
                await _meet(group)
                start = time.perf_counter()
                if kind == "bare":
                    bare(gloo, tensors)
                else:
                    await ours(group, rank, tensors)
                if number:  # the first round warms up
                    seconds[kind].append(time.perf_counter() - start)
        found[size] = seconds
    return found, list(group.statistics().sent)


async def _meet(group: CollectiveGroup) -> None:
    await group.send("here")
    await group.recv()


def run(settings: Settings) -> Outcome:
    """Measure; the bar is the ratio of the rates from 1 MiB up."""
    outcome = Outcome(
        "stream of CPU tensors over the gloo route (uvloop)",
        ("size", "bare GB/s", "aiocomm GB/s", "x bare"),
    )
    with folder() as path:
        results = run_pair(
            main, path, 2 if settings.quick else 9, options=aiocomm.Options(route="gloo")
        )
    (_, sent), (found, _) = results
    for size, count in SIZES.items():
        seconds = found[size]
        ratio = ratios(seconds["bare"], seconds["aiocomm"])
        rates = {kind: size * count / median(each) / 1e9 for kind, each in seconds.items()}
        name = f"{size // MIB} MiB"
        outcome.rows.append(
            (name, f"{rates['bare']:.2f}", f"{rates['aiocomm']:.2f}", f"{ratio:.2f}")
        )
        outcome.figures[name] = {"seconds": seconds, "x bare": ratio}
        outcome.at_least(f"gloo route, {name}, of bare Gloo", ratio, BAR)
    outcome.bar(f"carried by the gloo route: {', '.join(sent)}", set(sent) <= {"gloo", "link"})
    return outcome
