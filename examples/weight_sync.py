"""Weights go one way while trajectories come back: neither direction waits for the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

import aiocomm

STEPS = 10


@dataclass(frozen=True)
class Trajectory:
    """What the rollout brings back; its tensors travel beside the rest, uncopied."""

    weights_version: int
    observations: torch.Tensor
    rewards: torch.Tensor


async def train(group: aiocomm.CollectiveGroup) -> int:
    model = torch.nn.Linear(512, 512)
    seen: list[int] = []

    async def send_weights() -> None:
        for step in range(STEPS):
            await group.send((step, model.state_dict()))  # from where it lies, so it is awaited
            with torch.no_grad():
                model.weight.mul_(0.99)  # then the memory is ours again

    async def take_trajectories() -> None:
        while len(seen) < STEPS:
            trajectory: Trajectory = await group.recv()
            seen.append(trajectory.weights_version)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_weights())
        tasks.create_task(take_trajectories())
    assert seen == sorted(seen)
    return len(seen)


async def roll_out(group: aiocomm.CollectiveGroup) -> int:
    model = torch.nn.Linear(512, 512)
    version = -1
    for _ in range(STEPS):
        version, weights = await group.recv()
        model.load_state_dict(weights)
        with torch.no_grad():
            observations = torch.randn(32, 512)
            rewards = model(observations).mean(dim=1)
        group.send(Trajectory(version, observations, rewards))  # a work need not be kept
    return version


async def work(collective: aiocomm.Collective, rank: int) -> int:
    group = collective.create_collective_group(["worker:0", "worker:1"])
    return await (train(group) if rank == 0 else roll_out(group))


if __name__ == "__main__":
    trajectories, version = aiocomm.run_local(work, 2)
    print(f"{trajectories} trajectories back, the last weights were version {version}")
