"""The two actors of the benchmark ``channel``; imported only where Ray is installed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util.queue import Queue

from aiocomm.channel import Channel

from .channel import BOUNDED, CONSUMERS, ITEMS, PRODUCERS, QUEUE
from .ray_actors import payload

remote: Any = ray.remote  # its stubs leave classes of actors untyped


class RayQueue:
    """Ray's queue with the names of a channel."""

    def __init__(self) -> None:
        self._queue: Any = Queue(actor_options={"num_cpus": 0})

    async def put(self, item: Any) -> None:
        await self._queue.put_async(item)

    async def get(self) -> Any:
        return await self._queue.get_async()


async def _make(way: str, name: str) -> Any:
    if way == QUEUE:
        return RayQueue()
    return await Channel.create(name, maxsize=100 if way == BOUNDED else 0)


async def _put(channel: Channel, numbers: range) -> None:
    for number in numbers:
        await channel.put(number)


async def _get(channel: Channel) -> list[int]:
    return [number async for number in channel]


@remote(num_cpus=0)
class Far:
    """The other end."""

    async def use(self, queues: dict[str, tuple[Any, Any]]) -> None:
        """These are the queues of each way, there and back."""
        self._queues = queues

    async def answer(self, way: str, count: int) -> None:
        """Put back so many items."""
        there, back = self._queues[way]
        for _ in range(count):
            await back.put(await there.get())

    async def get(self, channel: Channel) -> list[int]:
        """All that comes, by half of the consumers."""
        async with channel:
            found = await asyncio.gather(*(_get(channel) for _ in range(CONSUMERS // 2)))
        return [number for numbers in found for number in numbers]


@remote(num_cpus=0)
class Near:
    """This end, where the clock is."""

    async def compare(
        self, far: Any, cells: list[tuple[str, str, int]], rounds: int
    ) -> dict[tuple[str, str], list[float]]:
        """Seconds from put to get, by way and payload, one for each round.

        Args:
            far: the other actor.
            cells: way, payload, and round trips in a round; they take turns.
            rounds: how many turns, after one to warm up.
        """
        ways = dict.fromkeys(way for way, _, _ in cells)
        queues = {
            way: (await _make(way, f"there {way}"), await _make(way, f"back {way}")) for way in ways
        }
        await far.use.remote(queues)
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):
            for way, name, count in cells:
                answering = far.answer.remote(way, count + 1)
                seconds = await self._round(*queues[way], payload(name), count)
                await answering
                if number:
                    found.setdefault((way, name), []).append(seconds / count / 2)
        return found

    async def _round(self, there: Any, back: Any, item: Any, count: int) -> float:
        await there.put(item)
        await back.get()  # both are connected and at it
        start = time.perf_counter()
        for _ in range(count):
            await there.put(item)
            await back.get()
        return time.perf_counter() - start

    async def spread(self, far: Any) -> tuple[float, list[int]]:
        """Seconds that many producers and consumers take, and what came; half get in ``far``."""
        channel = await Channel.create("spread", maxsize=100)
        there = far.get.remote(channel)
        here = [asyncio.create_task(_get(channel)) for _ in range(CONSUMERS // 2)]
        each = ITEMS // PRODUCERS
        start = time.perf_counter()
        await asyncio.gather(
            *(_put(channel, range(first, first + each)) for first in range(0, ITEMS, each))
        )
        await channel.close()
        found = [await there, *(await asyncio.gather(*here))]
        return time.perf_counter() - start, [number for numbers in found for number in numbers]
