"""Two processes play ping-pong: an object goes there, an object comes back."""

from __future__ import annotations

import time

import aiocomm

ROUNDS = 1000


async def play(collective: aiocomm.Collective, rank: int) -> int:
    table = collective.create_collective_group(["worker:0", "worker:1"])
    if rank == 1:
        for _ in range(ROUNDS):
            ball = await table.recv()
            await table.send({"hits": ball["hits"] + 1})
        return 0

    await table.ready()
    ball, begin = {"hits": 0}, time.perf_counter()
    for _ in range(ROUNDS):
        await table.send(ball)
        ball = await table.recv()
    print(f"{(time.perf_counter() - begin) / ROUNDS * 1e6:.0f} us a round trip")
    return int(ball["hits"])


if __name__ == "__main__":
    hits, _ = aiocomm.run_local(play, 2)
    print(f"{hits} hits in {ROUNDS} rounds")
