"""On Ray: weights go from a trainer to its rollouts, trajectories come back through a channel."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch

from aiocomm.channel import AsyncChannelWork, Channel
from aiocomm.worker import Worker, launch

STEPS, ROLLOUTS, BATCH, SAMPLES = 3, 2, 64, 16


@ray.remote(num_cpus=0)
class Trainer(Worker):
    """Sends its weights at each step, and waits for no rollout in particular."""

    async def train(self, trajectories: Channel) -> int:
        model, seen = torch.nn.Linear(64, 1), 0
        for version in range(STEPS):
            weights = model.state_dict()
            await asyncio.gather(
                *(self.comm.send((version, weights), "rollout", rank) for rank in range(ROLLOUTS))
            )
            batch: list[dict[str, Any]] = await trajectories.get_batch(BATCH)
            rewards = torch.cat([trajectory["rewards"] for trajectory in batch])
            with torch.no_grad():
                model.weight.add_(rewards.mean())
            seen += len(rewards)
        return seen


@ray.remote(num_cpus=0)
class Rollout(Worker):
    """Takes the newest weights at each step; when the channel is full, its puts wait."""

    async def roll_out(self, trajectories: Channel) -> None:
        model = torch.nn.Linear(64, 1)
        for _ in range(STEPS):
            version, weights = await self.comm.recv("trainer", 0)
            model.load_state_dict(weights)
            for _ in range(BATCH // SAMPLES):
                with torch.no_grad():
                    rewards = model(torch.randn(SAMPLES, 64)).flatten()
                await trajectories.put({"version": version, "rewards": rewards}, weight=SAMPLES)


async def main() -> int:
    trainers = launch(Trainer, 1, group="trainer")
    rollouts = launch(Rollout, ROLLOUTS, group="rollout")
    async with trainers, rollouts, await Channel.create("trajectories", 100) as trajectories:
        rolling = [AsyncChannelWork(each.roll_out.remote(trajectories)) for each in rollouts]
        training = AsyncChannelWork(trainers[0].train.remote(trajectories))
        seen, *_ = await asyncio.gather(training, *rolling)  # the first failure ends it all
        await trajectories.abort()  # what is left is of old weights
        return int(seen)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    print(f"{STEPS} steps, {asyncio.run(main())} samples")
    ray.shutdown()
