"""A thousand messages of mixed size and kind, in both directions at once, and each is checked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from aiocomm import CollectiveGroup

from ..pairs import pair, ramp
from ..processes import Stage, Workers
from .members import group_with, member

LOOPS = ["uvloop"]  # it starts processes, and the order is made without a loop


def message(number: int, seed: int) -> Any:
    """One of many kinds and sizes, the same at both ends."""
    chance = random.Random(f"{seed}/{number}")
    size = chance.choice([0, 1, 100, 5_000, 70_000, 300_000])
    kind = chance.randrange(5)
    if kind == 0:
        return ramp(size, number)
    if kind == 1:
        return {"number": number, "x": [ramp(size, number), ramp(7)], "y": ("text", None)}
    if kind == 2:
        return (number, "x" * size)
    if kind == 3:
        return [ramp(size // 8, part) for part in range(8)]
    return number


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def by_tensor(number: int) -> bool:
    """Whether a tensor goes by send_tensor this time."""
    return number % 3 == 0


async def both_ways(group: CollectiveGroup, count: int) -> None:
    async def send() -> None:
        works: list[Any] = []
        for number in range(count):
            content = message(number, group.rank)
            tensor = isinstance(content, torch.Tensor) and by_tensor(number)
            works.append(group.send_tensor(content) if tensor else group.send(content))
            if len(works) == 50:
                await asyncio.gather(*works)
                works.clear()
        await asyncio.gather(*works)

    async def receive() -> None:
        for number in range(count):
            wanted = message(number, 1 - group.rank)
            if isinstance(wanted, torch.Tensor) and by_tensor(number):
                got = await group.recv_tensor(torch.full_like(wanted, 255))
            else:
                got = await group.recv()
            assert same(got, wanted), (number, got, wanted)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        tasks.create_task(receive())


async def a_thousand(stage: Stage, **options: Any) -> dict[str, int]:
    async with member(stage, **options) as collective:
        group = group_with(collective, 1 - stage.rank)
        await both_ways(group, 1000)
        statistics = group.statistics()
        assert sum(count.messages for count in statistics.received.values()) == 1000
        assert statistics.unreceived == 0
        return {name: count.nbytes for name, count in statistics.sent.items()}


@pytest.mark.parametrize("route", ["shm", "gloo", "link"])
def test_a_thousand_messages_in_both_directions_at_once(loop_name: str, route: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(a_thousand, route=route)
        for sent in workers.join():
            assert set(sent) == {"link", route}


@pytest.mark.asyncio
async def test_mixed_messages_within_one_process() -> None:
    async with pair("memory") as groups:
        await asyncio.gather(*(both_ways(group, 300) for group in groups))
