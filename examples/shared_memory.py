"""Weights in memory that both workers have mapped: the trainer writes, the rollout reads, in turns.

Nothing is copied and nothing is sent but whose turn it is. The memory is handed over once; each
later step is a message of a few bytes. Who may write is the two workers' own agreement: here the
trainer writes only between "read" and "written".
"""

from __future__ import annotations

import aiocomm

STEPS = 3


async def worker(collective: aiocomm.Collective, rank: int) -> list[float]:
    group = collective.create_collective_group(["worker:0", "worker:1"])
    if rank == 0:
        weights = aiocomm.empty_shared((1024, 1024), aliased=True)
        await group.send(weights)
        for step in range(STEPS):
            weights.fill_(step)
            await group.send("written")
            assert await group.recv() == "read"
        return []
    weights = await group.recv()  # the trainer's own memory
    seen = []
    for _ in range(STEPS):
        assert await group.recv() == "written"
        seen.append(float(weights.mean()))
        await group.send("read")
    return seen


if __name__ == "__main__":
    print(aiocomm.run_local(worker, 2)[1])
