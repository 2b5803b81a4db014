"""Two async Ray actors play ping-pong: no call of Ray is made while the ball is in the air.

Needs ``pip install 'aiocomm[ray]'``.
"""

from __future__ import annotations

import time

import ray

from aiocomm.worker import Worker, launch

ROUNDS = 1000


@ray.remote(num_cpus=0)
class Player(Worker):
    async def serve(self, other: str) -> int:
        ball, begin = {"hits": 0}, time.perf_counter()
        for _ in range(ROUNDS):
            await self.comm.send(ball, other, 0)
            ball = await self.comm.recv(other, 0)
        print(f"{(time.perf_counter() - begin) / ROUNDS * 1e6:.0f} us a round trip")
        return int(ball["hits"])

    async def play(self, other: str) -> None:
        for _ in range(ROUNDS):
            ball = await self.comm.recv(other, 0)
            await self.comm.send({"hits": ball["hits"] + 1}, other, 0)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    with launch(Player, 1, group="left") as left, launch(Player, 1, group="right") as right:
        hits, _ = ray.get([left[0].serve.remote("right"), right[0].play.remote("left")])
    ray.shutdown()
    print(f"{hits} hits in {ROUNDS} rounds")
