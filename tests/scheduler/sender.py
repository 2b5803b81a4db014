"""A sending lane whose link, route, copies and peer are the test's."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from aiocomm.errors import AiocommError
from aiocomm.payload import Packed, pack, pack_tensor
from aiocomm.scheduler import SendLane, SendWork
from aiocomm.scheduler.envelope import Envelope, credit_head
from aiocomm.transport.base import Frame, FrameKind

from .lanes import CONTEXT, FakeLink, FakeRoute, StillRuntime, turns


class Sender:
    """The lane, and both sides of it. No credit was granted yet."""

    def __init__(self, *, in_process: bool = False, **settings: Any) -> None:
        self.runtime = StillRuntime(**settings)
        self.broken: list[AiocommError] = []
        self.route = FakeRoute()
        self.opening: asyncio.Future[FakeRoute] = asyncio.get_running_loop().create_future()
        self.opened = 0
        self.lane = SendLane(
            self.runtime,
            open_route=self._open,  # type: ignore[arg-type]
            open_device=self._open_device,
            broken=self.broken.append,
            context=CONTEXT,
        )
        self.link = FakeLink(in_process=in_process)
        self.lane.link_up(self.link)  # type: ignore[arg-type]

    async def _open(self) -> FakeRoute:
        self.opened += 1
        return await self.opening

    async def _open_device(self, index: int) -> Any:
        raise AssertionError("nothing here is on a device")

    async def with_route(self, size: int) -> None:
        """Let a first bulk message open the route, and go."""
        work = self.send(torch.zeros(size, dtype=torch.uint8))
        self.opening.set_result(self.route)
        await turns()
        self.runtime.jobs[0].run()
        await turns()
        self.route.moves[0].future.set_result(None)
        await work
        self.runtime.jobs.clear()
        self.route.moves.clear()
        self.link.frames.clear()

    def submit(self, packed: Packed) -> SendWork:
        work = SendWork(loop=asyncio.get_running_loop())
        work._lane = self.lane
        self.lane.submit(work, packed)
        return work

    def send(self, obj: object) -> SendWork:
        return self.submit(pack(obj))

    def send_tensor(self, tensor: torch.Tensor) -> SendWork:
        return self.submit(pack_tensor(tensor))

    def grant(self, messages: int = 1000, nbytes: int = 1 << 24, *, first: bool = True) -> None:
        self.lane.credit_received(credit_head(messages, nbytes, first=first))

    @property
    def envelopes(self) -> list[Frame]:
        return self.link.of(FrameKind.ENVELOPE)

    @property
    def kinds(self) -> list[str]:
        """Of the envelopes that left: bulk or not, in order."""
        return ["bulk" if Envelope.read(frame.head).bulk else "inline" for frame in self.envelopes]
