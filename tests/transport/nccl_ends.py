"""Two ends of an NCCL route for tests, in one process, on a device that is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiocomm.options import Options
from aiocomm.transport.nccl import NcclRoute

from ..simulated import Simulated, simulated
from ..simulated_nccl import nccl_of


class Ends:
    """Both ends, each publishing to the other, and what the sender put into envelopes."""

    def __init__(self, sim: Simulated, *, timeout: float = 10.0, **settings: Any) -> None:
        self.sim = sim
        self.envelopes: list[bytes] = []
        self.cut_off = False
        self.kept: list[tuple[str, bytes]] | None = None  # a list keeps what is said to be done
        loop, options = asyncio.get_running_loop(), Options(**settings)
        self.sender = NcclRoute(
            "g",
            sending=True,
            loop=loop,
            publish=lambda key, value: self.publish(self.receiver, key, value),
            index=0,
            options=options,
            timeout=timeout,
        )
        self.receiver = NcclRoute(
            "g",
            sending=False,
            loop=loop,
            publish=lambda key, value: self.publish(self.sender, key, value),
            index=1,
            options=options,
            timeout=timeout,
        )

    def publish(self, to: NcclRoute, key: str, value: bytes) -> None:
        if self.cut_off:
            raise ConnectionError("the link is down")
        if self.kept is not None and key == "g/done":
            self.kept.append((key, value))
            return
        to.deliver(key, value)

    async def open(self) -> None:
        await asyncio.gather(self.sender.open(), self.receiver.open())

    def send(self, *tensors: torch.Tensor) -> asyncio.Future[None]:
        sim = self.sim
        after = sim.record(sim.current_stream(sim.device_of(tensors[0]).index))
        return self.sender.send(tensors, after=after, envelope=self.envelopes.append)

    def fetch(self, *sizes: int) -> tuple[Any, asyncio.Future[None]]:
        return self.receiver.fetch(b"", sizes)

    async def aclose(self) -> None:
        await self.sender.aclose()
        await self.receiver.aclose()

    @property
    def groups(self) -> list[Any]:
        made: list[Any] = self.sim.process_group.made
        return made


@asynccontextmanager
async def ends(*, auto: bool = True, opened: bool = True, **settings: Any) -> AsyncIterator[Ends]:
    with simulated(auto=auto) as sim:
        sim.process_group = nccl_of(sim)
        both = Ends(sim, **settings)
        try:
            if opened:
                await both.open()
            yield both
        finally:
            await both.aclose()


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)
