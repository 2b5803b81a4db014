"""What is measured on a chip: throughput by size, latency, lag of the loop, memory over time."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from .checks import Notes, group_of
from .chip import Chip, hold

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiocomm import Collective, CollectiveGroup

KIB, MIB = 1024, 1024 * 1024
SIZES = (1, 4, 16, 64, 256, 1024)  # MiB
BAR = 0.95
"""Of a copy within one process, from 1 MiB up: docs/benchmarks.md. Told, not held."""
AHEAD = 6
"""Messages that are under way at a time."""
SPARE = 64 * MIB
"""Bytes by which what is free on a chip may differ that nobody uses."""


async def throughput(collective: Collective, rank: int, kind: str) -> Notes:
    """Tensors streamed one way into buffers that are ready, beside a copy within one process."""
    chip, group = group_of(collective, kind)
    found: dict[str, dict[str, float]] = {}
    for size in SIZES if chip.real else SIZES[:3]:
        count = max(12, min(400, 16 * KIB // size)) if chip.real else 12
        nbytes = size * MIB
        if chip.real and not await _both(group, rank, await _free(chip, group, rank) > 16 * nbytes):
            break
        ours = await _stream(chip, group, rank, nbytes, count)
        theirs = _copies(chip, nbytes, count) if rank == 1 else 0.0
        await _meet(group, rank)
        if rank == 1:
            row = {"GB/s": ours, "copy GB/s": theirs, "ratio": ours / theirs}
            found[f"{size} MiB"] = row
    missed = [size for size, row in found.items() if row["ratio"] < BAR]
    return {f"under {BAR} of a copy": missed, "by size": found} if rank == 1 else {}


async def _stream(chip: Chip, group: CollectiveGroup, rank: int, nbytes: int, count: int) -> float:
    """GB/s at the receiver, the first few messages not counted."""
    warm = 4
    if rank == 0:
        tensors = [torch.ones(nbytes, dtype=torch.uint8, device=chip.device) for _ in range(2)]
        await _ahead(warm + count, lambda number: group.send_tensor(tensors[number % 2]))
        return 0.0
    buffers = [torch.empty(nbytes, dtype=torch.uint8, device=chip.device) for _ in range(AHEAD)]
    await _ahead(warm, lambda number: group.recv_tensor(buffers[number % AHEAD]))
    start = time.perf_counter()
    await _ahead(count, lambda number: group.recv_tensor(buffers[number % AHEAD]))
    return nbytes * count / (time.perf_counter() - start) / 1e9


async def _ahead(count: int, call: Callable[[int], Awaitable[Any]]) -> None:
    pending: list[Awaitable[Any]] = []
    for number in range(count):
        pending.append(call(number))
        if len(pending) == AHEAD:
            await pending.pop(0)
    for work in pending:
        await work


def _copies(chip: Chip, nbytes: int, count: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=chip.device)
    targets = [torch.empty_like(source) for _ in range(2)]
    for target in targets:
        target.copy_(source)
    chip.synchronize()
    start = time.perf_counter()
    for number in range(count):
        targets[number % 2].copy_(source)
    chip.synchronize()
    return nbytes * count / (time.perf_counter() - start) / 1e9


async def _meet(group: CollectiveGroup, rank: int) -> None:
    """Nobody goes on before the other is here."""
    if rank == 0:
        await group.send(None)
        await group.recv()
    else:
        await group.recv()
        await group.send(None)


async def _both(group: CollectiveGroup, rank: int, fact: bool) -> bool:
    """Whether it is so on both sides."""
    if rank == 0:
        await group.send(fact)
        return bool(await group.recv()) and fact
    theirs = await group.recv()
    await group.send(fact)
    return bool(theirs) and fact


async def latency(collective: Collective, rank: int, kind: str) -> Notes:
    """Round trips of small and of larger tensors, one at a time."""
    chip, group = group_of(collective, kind)
    found: dict[str, float] = {}
    payloads: dict[str, Any] = {
        "int": 7,
        "dict with 1 KiB": {"step": 1, "x": torch.ones(256, device=chip.device)},
        "128 KiB": torch.ones(32 * KIB, device=chip.device),
        "1 MiB": torch.ones(256 * KIB, device=chip.device),
        "200 tensors of 1 KiB": {str(n): torch.ones(256, device=chip.device) for n in range(200)},
    }
    for name, payload in payloads.items():
        times = []
        for number in range(220):
            start = time.perf_counter()
            if rank == 0:
                await group.send(payload)
                await group.recv()
            else:
                await group.send(await group.recv())
            if number >= 20:
                times.append(time.perf_counter() - start)
        found[f"{name}, us"] = 1e6 * statistics.median(times)
    return found if rank == 0 else {}


async def lag(collective: Collective, rank: int, kind: str) -> Notes:
    """How late the loop runs its timers while 256 MiB tensors go both ways."""
    chip, group = group_of(collective, kind)
    nbytes, count = (256 * MIB, 40) if chip.real else (16 * MIB, 8)
    tensor = torch.ones(nbytes, dtype=torch.uint8, device=chip.device)
    buffer = torch.empty_like(tensor)
    await asyncio.gather(group.send_tensor(tensor), group.recv_tensor(buffer))
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 1e-3
            await asyncio.sleep(1e-3)
            late.append(time.perf_counter() - due)

    ticking = asyncio.ensure_future(tick())
    for _ in range(count):
        await asyncio.gather(group.send_tensor(tensor), group.recv_tensor(buffer))
    ticking.cancel()
    late.sort()
    p99 = late[int(0.99 * (len(late) - 1))] if late else 0.0
    return {"p99_ms": 1e3 * p99, "most_ms": 1e3 * max(late, default=0.0)}


async def memory(collective: Collective, rank: int, kind: str) -> Notes:
    """10,000 messages, and 1 GiB twenty times, leave no memory behind on the chip."""
    chip, group = group_of(collective, kind)
    kept = torch.ones(MIB, dtype=torch.uint8, device=chip.device)
    marks = []
    for _ in range(5):
        for number in range(2000 if chip.real else 100):
            if rank == 0:
                await group.send(kept if number % 2 else kept.clone())
            else:
                await group.recv()
        await _meet(group, rank)
        gc.collect()
        free = await _free(chip, group, rank)
        marks.append((chip.allocated(), free))
    growth = marks[-1][0] - marks[1][0]
    hold(growth <= 0, f"tensors that are left after 6,000 more messages: {growth} bytes")
    lost = marks[1][1] - marks[-1][1]
    hold(lost <= SPARE, f"free memory of the chip is less by {lost} bytes after 6,000 messages")
    # F49: what a producer had shared was never freed.
    before = await _free(chip, group, rank)
    large = (1024 if await _both(group, rank, before > 8 * 1024 * MIB) else 16) * MIB
    for _ in range(20):
        if rank == 0:
            await group.send(torch.ones(large, dtype=torch.uint8, device=chip.device))
        else:
            await group.recv()
    gc.collect()
    lost = before - await _free(chip, group, rank)
    hold(lost <= SPARE, f"{lost} bytes of the chip are lost after 20 messages of {large}")
    return {"lost_bytes": lost, "allocated": [mark[0] for mark in marks]}


async def _free(chip: Chip, group: CollectiveGroup, rank: int) -> int:
    """What is free once both sides have given back what they only keep in hand."""
    await _meet(group, rank)
    await asyncio.sleep(1.2 if chip.real else 0)  # mappings of the peer's memory go by then
    chip.free()
    await _meet(group, rank)
    free = chip.free()
    await _meet(group, rank)
    return free
