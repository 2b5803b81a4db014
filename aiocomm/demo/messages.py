"""What a rollout sends back: trajectories, as dicts and dataclasses of tensors by turns.

Content and size follow from the seed and the number of the message alone, so anybody can make the
same one again. Sizes run from about a kilobyte, which rides inside an envelope, to some megabytes,
which take a bulk route. Knows nothing of how they travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHAPES = ((1, 64), (4, 256), (16, 512), (2, 128), (32, 1024), (64, 2048))
"""Samples and tokens per sample of the messages, by turns."""

VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Samples of one policy version; the tensors have one row for each.

    ``tokens`` int64 [samples, length], ``logprobs`` float32 and ``values`` bfloat16 of the same
    shape, ``mask`` bool of the same shape, ``rewards`` float32 [samples].
    """

    step: int
    number: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor


def make_trajectory(seed: int, step: int, number: int) -> Trajectory | dict[str, object]:
    """The trajectory message of that number: a dataclass where it is odd, else a dict.

    Args:
        seed: of the run.
        step: the policy version it was made with.
        number: of the message in the run, from 0.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    shape = SHAPES[number % len(SHAPES)]
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    logprobs = -torch.rand(shape, generator=generator)
    values = torch.rand(shape, generator=generator).to(torch.bfloat16)
    mask = torch.rand(shape, generator=generator) < 0.9
    rewards = torch.rand(shape[0], generator=generator)
    if number % 2:
        return Trajectory(step, number, tokens, logprobs, values, mask, rewards)
    return {
        "step": step,
        "number": number,
        "prompt": {"tokens": tokens, "mask": mask},
        "policy": [logprobs, values],
        "rewards": rewards,
    }
