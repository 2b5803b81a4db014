"""Two runtimes in one process whose group takes the route that a test names.

``memory`` is what one process takes by itself. For the others the dial is made to take
the socket that it would take between two processes, and bulk is pinned to that route; so the tests
of what a group promises run on every route without a process of their own. What can only be seen
between processes is in tests/system.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import Collective, CollectiveGroup, Options
from aiocomm.testing import MemoryStore

from .transport.links import apart

ROUTES = ("memory", "link", "shm", "gloo")
MEMBERS = ["a:0", "b:0"]
EAGER = 1024  # bytes that ride in the envelope, so that little is bulk already

SMALL, LARGE = 10, 4 * EAGER  # elements of uint8: in the envelope, in bulk

each_size = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["eager", "bulk"])
each_route = pytest.mark.parametrize("route", ROUTES)
each_wire = pytest.mark.parametrize("route", ROUTES[1:])


def ramp(size: int, start: int = 0) -> torch.Tensor:
    """A uint8 tensor of up to 16 MiB, whose bytes tell where they belong."""
    first = start % 251
    return _ramp()[first : first + size].clone()


@functools.cache
def _ramp() -> torch.Tensor:
    return (torch.arange((16 << 20) + 251, dtype=torch.int32) % 251).to(torch.uint8)


def options_for(route: str, **settings: Any) -> Options:
    pinned = None if route == "memory" else route
    small = {"eager_limit": EAGER, "shm_bytes": 1 << 20, "close_timeout": 5.0}
    return Options(**{**small, "route": pinned, **settings})


@asynccontextmanager
async def runtimes(route: str, **settings: Any) -> AsyncIterator[tuple[Collective, Collective]]:
    """The runtimes of a:0 and b:0, on one board."""
    store, options = MemoryStore(), options_for(route, **settings)
    with apart("memory" if route == "memory" else "unix"):
        async with (
            aiocomm.open("a:0", store=store, options=options) as first,
            aiocomm.open("b:0", store=store, options=options) as second,
        ):
            yield first, second


@asynccontextmanager
async def pair(
    route: str, **settings: Any
) -> AsyncIterator[tuple[CollectiveGroup, CollectiveGroup]]:
    """The two ends of the one group of a:0 and b:0; nothing is connected yet."""
    async with runtimes(route, **settings) as (first, second):
        yield first.create_collective_group(MEMBERS), second.create_collective_group(MEMBERS)


async def ready(*groups: CollectiveGroup) -> None:
    await asyncio.gather(*(group.ready() for group in groups))


async def until(condition: Callable[[], object], pause: float = 0.001) -> None:
    """Let the loop turn until the condition holds; for what nothing announces."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(pause)
