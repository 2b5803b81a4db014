"""A graph of three workers: ``then`` chains what follows from a message, a TaskGroup joins.

::

    worker:0 (source) --> worker:1 (normalises) --> worker:2 (sums up) --> worker:0
             '--------------------------------------^
"""

from __future__ import annotations

import asyncio

import torch

import aiocomm

BATCHES = 5


def normalise(batch: torch.Tensor, eps: float) -> torch.Tensor:
    return batch / (batch.sum() + eps)


async def source(to_first: aiocomm.CollectiveGroup, to_last: aiocomm.CollectiveGroup) -> float:
    for number in range(BATCHES):
        to_first.send(torch.arange(1.0, 5.0) * (number + 1))
        to_last.send(number)  # a label that takes the short way
    results: list[float] = [await to_last.recv() for _ in range(BATCHES)]
    return sum(results)


async def transform(inbound: aiocomm.CollectiveGroup, outbound: aiocomm.CollectiveGroup) -> None:
    # No task and no loop body: each chain ends with the work of its own send.
    chains = [inbound.recv().then(normalise, eps=0.0).then(outbound.send) for _ in range(BATCHES)]
    await asyncio.gather(*chains)


async def join(labels: aiocomm.CollectiveGroup, batches: aiocomm.CollectiveGroup) -> None:
    for _ in range(BATCHES):
        async with asyncio.TaskGroup() as tasks:  # both at once, whichever comes first
            label = tasks.create_task(labels.recv().async_wait())
            total = tasks.create_task(batches.recv().then(torch.sum).then(float).async_wait())
        await labels.send(label.result() + total.result())


async def work(collective: aiocomm.Collective, rank: int) -> float:
    def group(other: int) -> aiocomm.CollectiveGroup:
        return collective.create_collective_group([f"worker:{rank}", f"worker:{other}"])

    if rank == 0:
        return await source(group(1), group(2))
    await (transform(group(0), group(2)) if rank == 1 else join(group(0), group(1)))
    return 0.0


if __name__ == "__main__":
    total, _, _ = aiocomm.run_local(work, 3)
    print(f"{BATCHES} batches through three workers: {total:.1f}")
