"""On Ray without `async`: actors whose calls block, and a channel between them."""

from __future__ import annotations

import ray
import torch

from aiocomm.channel.blocking import Channel
from aiocomm.worker import BlockingWorker, launch

STEPS, BATCH, SAMPLES = 3, 64, 16


@ray.remote(num_cpus=0)
class Trainer(BlockingWorker):
    """Sends its weights at each step, and takes a batch."""

    def train(self, trajectories: Channel) -> int:
        weights, seen = torch.ones(64), 0
        with trajectories:
            for _ in range(STEPS):
                self.comm.send(weights, "rollout", 0)  # blocks until the memory is its own again
                batch = trajectories.get_batch(BATCH, timeout=60)
                rewards = torch.cat([trajectory["rewards"] for trajectory in batch])
                weights += rewards.mean()
                seen += len(rewards)
            self.comm.send(None, "rollout", 0)
        return seen


@ray.remote(num_cpus=0)
class Rollout(BlockingWorker):
    """Takes the newest weights at each step; when the channel is full, its puts wait."""

    def roll_out(self, trajectories: Channel) -> None:
        with trajectories:
            while (weights := self.comm.recv("trainer", 0, timeout=60)) is not None:
                for _ in range(BATCH // SAMPLES):
                    rewards = torch.randn(SAMPLES, 64) @ weights
                    trajectories.put({"rewards": rewards}, weight=SAMPLES)


def main() -> int:
    with (
        launch(Trainer, 1, group="trainer") as trainers,
        launch(Rollout, 1, group="rollout") as rollouts,
        Channel.create("trajectories", maxsize=100) as trajectories,
    ):
        rolling = rollouts[0].roll_out.remote(trajectories)
        seen = ray.get(trainers[0].train.remote(trajectories))
        ray.get(rolling)
        return int(seen)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    print(f"{STEPS} steps, {main()} samples")
    ray.shutdown()
