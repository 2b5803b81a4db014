"""Two ends of a Gloo route for tests: in one process, or one of them in a worker.

Between processes the stage plays the link: what a route publishes is shown to everybody under the
route's label. The checks for threads and sockets left behind are those of conftest and the workers.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from aiocomm.transport.gloo import GlooRoute

from ..processes import Stage

MIB = 1024 * 1024
HOST = "127.0.0.1"


def make(label: str, sending: bool, publish=lambda key, value: None, **kwargs) -> GlooRoute:
    loop = asyncio.get_running_loop()
    return GlooRoute(label, sending=sending, local_host=HOST, loop=loop, publish=publish, **kwargs)


def make_both(label: str = "a>b", **kwargs) -> tuple[GlooRoute, GlooRoute]:
    sender = make(label, True, lambda key, value: receiver.deliver(key, value), **kwargs)
    receiver = make(label, False, sender.deliver, **kwargs)
    return sender, receiver


@asynccontextmanager
async def opened(label: str = "a>b") -> AsyncIterator[tuple[GlooRoute, GlooRoute]]:
    sender, receiver = make_both(label)
    try:
        await asyncio.gather(sender.open(), receiver.open())
        yield sender, receiver
    finally:
        await sender.aclose()
        await receiver.aclose()


@asynccontextmanager
async def staged(stage: Stage, label: str, sending: bool, **kwargs) -> AsyncIterator[GlooRoute]:
    """One end in a worker; the other end is in another."""
    numbers = itertools.count()

    def publish(key: str, value: bytes) -> None:
        stage.set(f"{label}/{sending}/{next(numbers)}", (key, value))

    async def link() -> None:
        for number in itertools.count():
            route.deliver(*await stage.wait(f"{label}/{not sending}/{number}"))

    route = make(label, sending, publish, **kwargs)
    incoming = asyncio.create_task(link())
    try:
        await route.open()
        yield route
    finally:
        incoming.cancel()
        await asyncio.wait([incoming])
        await route.aclose()


def noise(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


def like(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(block) for block in blocks]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


async def until(condition) -> None:
    """Wait for what happens in a thread of Gloo; nothing signals it."""
    async with asyncio.timeout(60):
        while not condition():
            gc.collect()
            await asyncio.sleep(0)
