"""An async actor for the tests of channels: it puts and gets what it is told to."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import ray._private.state

from aiocomm.channel import Channel

from ..actors import WAIT


def pid_of(actor: Any) -> int:
    """The process of an actor, which need not have a method that says so."""
    found = ray._private.state.actors(actor._actor_id.hex())
    return int(found["Pid"])


class Peer:
    """Uses handles that were sent to it; lets go of each when the call ends."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def pid(self) -> int:
        return os.getpid()

    async def put(self, channel: Channel, items: list[Any], weight: float = 0) -> None:
        async with channel:
            for item in items:
                await channel.put(item, weight)

    async def get(self, channel: Channel, count: int) -> list[Any]:
        async with channel:
            return [await channel.get() for _ in range(count)]

    async def iterate(self, channel: Channel) -> list[Any]:
        async with channel:
            return [item async for item in channel]

    async def produce(self, channel: Channel, numbers: list[range]) -> None:
        """A producer for each range."""

        async def put(items: range) -> None:
            for item in items:
                await channel.put(item)

        async with channel, asyncio.TaskGroup() as tasks:
            for items in numbers:
                tasks.create_task(put(items))

    async def consume(self, channel: Channel, count: int) -> list[int]:
        """So many consumers until the channel is closed; what all of them got."""
        came: list[int] = []

        async def get() -> None:
            async for item in channel:
                came.append(item)  # noqa: PERF401  (what was got is kept whatever comes)

        async with channel, asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(get())
        return came

    async def hold(self, channel: Channel, count: int) -> int:
        """Begin so many gets, and await none; how many were served once the first one was."""
        works = [channel.get() for _ in range(count)]
        self.kept += [channel, works]
        await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        return sum(work.done() for work in works)

    async def begin_to_put(self, channel: Channel, items: list[Any]) -> None:
        """Put without an end in sight: the channel is bounded."""
        works = [channel.put(item) for item in items]
        self.kept += [channel, works]
        await channel.qsize()

    async def connect(self, name: str, namespace: str | None = None) -> Any:
        async with await Channel.connect(name, namespace=namespace, timeout=WAIT) as channel:
            return await channel.get()

    async def create(self, name: str) -> str:
        """Try to create it, and keep it if that was it."""
        try:
            self.kept.append(await Channel.create(name))
        except Exception as error:
            return type(error).__name__
        return "created"

    async def drop(self) -> None:
        """Abort the channels that it created, and let go of the others."""
        for each in self.kept:
            if isinstance(each, Channel):
                if each._creator:
                    await each.abort()
                await each.aclose()
        self.kept.clear()
