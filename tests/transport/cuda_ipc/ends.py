"""Two ends of a cuda_ipc route for tests, in one process, on a device that is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiocomm.copier import Copier
from aiocomm.transport.cuda_ipc.end import CudaIpcEnd
from aiocomm.transport.cuda_ipc.receive import CudaIpcReceiver
from aiocomm.transport.cuda_ipc.send import CudaIpcSender

from ...simulated import Simulated, simulated


class Ends:
    """Both ends, each publishing to the other, and the bodies of the sender's envelopes."""

    def __init__(self, sim: Simulated, *, timeout: float = 10.0, stall: float = 10.0) -> None:
        self.sim = sim
        self.bodies: list[bytes] = []
        self.deaf: set[str] = set()  # ends of the keys that nobody hears
        self.said: list[tuple[str, bytes]] = []
        loop = asyncio.get_running_loop()
        self.copier = Copier(loop, 2)
        self.sender = CudaIpcSender(
            "g", loop=loop, publish=self._to_receiver, index=0, timeout=timeout
        )
        self.receiver = CudaIpcReceiver(
            "g",
            loop=loop,
            publish=self._to_sender,
            index=1,
            off_loop=self.copier.run,
            stall_timeout=stall,
            timeout=timeout,
        )

    def _to_receiver(self, key: str, value: bytes) -> None:
        self._publish(self.receiver, key, value)

    def _to_sender(self, key: str, value: bytes) -> None:
        self._publish(self.sender, key, value)

    def _publish(self, to: CudaIpcEnd, key: str, value: bytes) -> None:
        self.said.append((key, value))
        if key.partition("/")[2] not in self.deaf:
            to.deliver(key, value)

    async def open(self) -> None:
        await asyncio.gather(self.sender.open(), self.receiver.open())

    def send(self, *tensors: torch.Tensor) -> asyncio.Future[None]:
        sim = self.sim
        after = sim.record(sim.current_stream(sim.device_of(tensors[0]).index))
        return self.sender.send(tensors, after=after, envelope=self.bodies.append)

    def fetch(self, *sizes: int) -> tuple[Any, asyncio.Future[None]]:
        """Take the first message whose envelope is here."""
        return self.receiver.fetch(self.bodies.pop(0), sizes)

    async def aclose(self) -> None:
        await self.sender.aclose()
        await self.receiver.aclose()
        self.copier.close()


@asynccontextmanager
async def ends(*, auto: bool = True, opened: bool = True, **settings: Any) -> AsyncIterator[Ends]:
    with simulated(auto=auto) as sim:
        sim.uuids = ["GPU-0", "GPU-0"]
        both = Ends(sim, **settings)
        try:
            if opened:
                await both.open()
            yield both
        finally:
            await both.aclose()


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)
