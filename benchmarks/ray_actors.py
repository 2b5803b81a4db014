"""The two actors of the benchmark ``ray``; imported only where Ray is installed."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch

import aiocomm.worker

from .payloads import MESSAGE
from .ray import BUFFER, CALL, FAR, NEAR

remote: Any = ray.remote  # its stubs leave classes of actors untyped


def payload(name: str) -> Any:
    """What goes there and back: ``dict``, or ``tensor`` or ``array`` and a number of bytes."""
    kind, _, size = name.partition(":")
    if kind == "dict":
        return MESSAGE
    tensor = torch.arange(int(size) // 4, dtype=torch.int32)
    return tensor.numpy() if kind == "array" else tensor


@remote(num_cpus=0)
class Far(aiocomm.worker.Worker):
    """The other end: answers calls of Ray, and messages of aiocomm."""

    async def echo(self, message: Any) -> Any:
        return message

    async def answer(self, way: str, name: str, count: int) -> None:
        """Send so many messages back."""
        near = self.comm.group(NEAR, 0)
        buffer = payload(name)
        for _ in range(count):
            if way == BUFFER:
                await near.send_tensor(await near.recv_tensor(buffer))
            else:
                await near.send(await near.recv())


@remote(num_cpus=0)
class Near(aiocomm.worker.Worker):
    """This end, where the clock is."""

    async def compare(
        self, far: Any, cells: list[tuple[str, str, int]], rounds: int
    ) -> dict[tuple[str, str], list[float]]:
        """Seconds of a round trip, by way and payload, one for each round.

        Args:
            far: the other actor.
            cells: way, payload, and round trips in a round; they take turns.
            rounds: how many turns, after one to warm up.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):
            for way, name, count in cells:
                seconds = await self._round(far, way, name, count)
                if number:
                    found.setdefault((way, name), []).append(seconds / count)
        return found

    async def _round(self, far: Any, way: str, name: str, count: int) -> float:
        message = payload(name)
        if way == CALL:
            start = time.perf_counter()
            for _ in range(count):
                came = await far.echo.remote(message)
            seconds = time.perf_counter() - start
        else:
            answered = far.answer.remote(way, name, count + 1)
            came = await self._trip(way, message)  # by then the other side is at it
            start = time.perf_counter()
            for _ in range(count):
                came = await self._trip(way, message)
            seconds = time.perf_counter() - start
            await answered
        if len(came) != len(message) or (came is message and way != BUFFER):
            raise ValueError(f"{name} did not come back by {way}")
        return seconds

    async def _trip(self, way: str, message: Any) -> Any:
        group = self.comm.group(FAR, 0)
        if way == BUFFER:
            coming = group.recv_tensor(message)
            await group.send_tensor(message)
        else:
            coming = group.recv()
            await group.send(message)
        return await coming
