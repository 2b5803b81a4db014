"""A channel's server and clients in one process, joined by real groups; no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiocomm
from aiocomm import Collective, Options
from aiocomm.channel.client import ChannelClient
from aiocomm.channel.server import ChannelServer
from aiocomm.testing import MemoryStore

from ..transport.links import apart

NAME = "jobs"


@dataclass
class Ends:
    """The server, its clients, and the runtimes they live in."""

    server: ChannelServer
    host: Collective
    clients: list[ChannelClient] = field(default_factory=list)
    runtimes: list[Collective] = field(default_factory=list)

    @property
    def client(self) -> ChannelClient:
        return self.clients[0]

    def join(self, number: int = 0) -> ChannelClient:
        """One more client, in the runtime of that number."""
        client = ChannelClient(NAME, asyncio.get_running_loop())
        runtime = self.runtimes[number]
        members, name = [self.host.address, runtime.address], f"{NAME} {len(self.clients)}"
        self.server.join(self.host.create_collective_group(members, name))
        queue = self.server.queue
        group = runtime.create_collective_group(members, name)
        client.joined(group, queue.maxsize, queue.max_bytes)
        self.clients.append(client)
        return client


@asynccontextmanager
async def channel(
    maxsize: int = 0, max_bytes: int = 0, *, clients: int = 1, way: str = "unix"
) -> AsyncIterator[Ends]:
    """A channel with so many clients, each in a runtime of its own."""
    store, options = MemoryStore(), Options(shm_bytes=8 << 20, close_timeout=5.0)
    with apart(way):
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(
                aiocomm.open("server:0", store=store, options=options)
            )
            ends = Ends(ChannelServer(NAME, maxsize, max_bytes), host)
            for number in range(clients):
                opening = aiocomm.open(f"client:{number}", store=store, options=options)
                ends.runtimes.append(await stack.enter_async_context(opening))
                ends.join(number)
            try:
                yield ends
            finally:
                for client in ends.clients:
                    await client.leave()
                await ends.server.aclose()
