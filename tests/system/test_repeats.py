"""A training loop between two processes: the same structures again and again, others between them.

What a structure is and when it is left out has its own tests beside ``scheduler/schemas.py``.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from ..payloads import Plain, same
from ..processes import Stage, Workers
from .members import group_with, member

LOOPS = ["uvloop"]  # it starts processes; what differs by loop shows in the tests of the parts

STEPS = 60


def message(step: int, kind: int, size: int) -> Any:
    """One of a few structures, or one that never comes again; the step tells its values."""
    fill = [torch.full((size, 1 + name % 3), float(step + name)) for name in range(12)]
    named = {f"layer.{name}": tensor for name, tensor in enumerate(fill)}
    return [
        {"step": step, "weights": named},
        named,
        fill,
        Plain(fill[0], step),
        {"step": step, "note": "no tensors"},
        fill[1],
        [*fill, torch.zeros(step)],
    ][kind]


def schedule(size: int) -> list[tuple[Any, bool]]:
    """Messages, and whether each is cancelled at once: alike in both processes."""
    rng = random.Random(size)
    return [(message(step, rng.randrange(7), size), rng.random() < 0.2) for step in range(STEPS)]


async def train(stage: Stage, size: int, **options: Any) -> Any:
    """Rank 0 sends and cancels; rank 1 compares what comes. Both say which steps came."""
    async with member(stage, window_messages=8, **options) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank == 0:
            works = []
            for obj, cancelled in schedule(size):
                works.append(group.send(obj))
                if cancelled:
                    works[-1].cancel()
                if len(works) % 20 == 0:
                    await asyncio.sleep(0.01)
            await asyncio.wait(works)
            # One that had left when it was cancelled arrives all the same: only its sequence tells;
            # one without an entry left within its call.
            entries = [getattr(work, "_entry", None) for work in works]
            await group.send(tuple(entry is None or entry.sequence >= 0 for entry in entries))
            return None
        got: list[Any] = []
        while not (got and type(got[-1]) is tuple):
            got.append(await group.recv())
        came = got.pop()
        wanted = [obj for (obj, _), arrived in zip(schedule(size), came, strict=True) if arrived]
        return len(got), len(wanted), all(map(same, got, wanted)), sum(came)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, {}),
        (600, {"route": "link", "eager_limit": 2048}),
        (600, {"route": "gloo", "eager_limit": 0}),
        (600, {"route": "shm", "eager_limit": 0, "shm_bytes": 1 << 20}),
    ],
    ids=["eager", "link", "gloo", "shm"],
)
def test_every_step_arrives_as_it_was(loop_name: str, size: int, options: dict[str, Any]) -> None:
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(train, size, **options)
        got, wanted, equal, came = workers.join()[1]
    assert got == wanted == came
    assert equal
    assert came > STEPS // 2
