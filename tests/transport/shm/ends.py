"""Both ends of a shared-memory route in one process, with a link that the test can hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiocomm.errors import AiocommError
from aiocomm.transport.base import Frame, FrameKind
from aiocomm.transport.shm.receive import ShmReceiver
from aiocomm.transport.shm.send import ShmSender
from aiocomm.transport.shm.wire import Piece, pack_numbers

MIB = 1 << 20
LABEL = "g/shm/0"


def ramp(size: int, start: int = 0) -> torch.Tensor:
    return ((torch.arange(size) + start) % 251).to(torch.uint8)


def blank(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


class Side:
    """The link as one end sees it: keeps the frames until they are carried."""

    same_host = True

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.sent: list[Frame] = []
        self.down: AiocommError | None = None

    def send(self, kind: FrameKind, sequence: int, head: bytes = b"", body: Any = b"") -> None:
        if self.down is not None:
            raise self.down
        self.frames.append(Frame(kind, sequence, bytes(head), body))
        self.sent.append(self.frames[-1])


class Ends:
    """Sender, receiver, and what goes between them when ``carry`` is called."""

    def __init__(self, shm_bytes: int = 64 * MIB) -> None:
        self.loop = asyncio.get_running_loop()
        self._copier = ThreadPoolExecutor(1)
        self.ours, self.theirs = Side(), Side()
        self.envelopes = 0
        self.keys: list[tuple[bool, str, bytes]] = []  # to the sender?
        ours: Any = self.ours
        theirs: Any = self.theirs
        self.sender = ShmSender(
            LABEL,
            ours,
            self.loop,
            publish=lambda key, value: self.keys.append((False, key, value)),
            off_loop=self.off_loop,
            shm_bytes=shm_bytes,
        )
        self.receiver = ShmReceiver(
            LABEL,
            theirs,
            self.loop,
            publish=lambda key, value: self.keys.append((True, key, value)),
            off_loop=self.off_loop,
        )

    def off_loop(self, call: Callable[..., None], *args: object) -> asyncio.Future[None]:
        return self.loop.run_in_executor(self._copier, call, *args)

    def carry_keys(self) -> None:
        keys, self.keys = self.keys, []
        for to_sender, key, value in keys:
            (self.sender if to_sender else self.receiver).deliver(key, value)

    def carry(self, *, back: bool = True) -> None:
        """Deliver every frame; ``back``: those of the receiver too."""
        while self.ours.frames or (back and self.theirs.frames):
            while self.ours.frames:
                self.receiver.chunk_received(self.ours.frames.pop(0))
            while back and self.theirs.frames:
                self.sender.grant_received(self.theirs.frames.pop(0))

    def send(self, staged: Sequence[torch.Tensor], *, lend: bool) -> asyncio.Future[None]:
        """Send; what goes into the envelope is a frame like the others here."""

        def envelope(body: bytes) -> None:
            self.envelopes += 1
            if body:
                self.ours.send(FrameKind.CHUNK, 0, body)

        return self.sender.send(staged, envelope=envelope, lend=lend)

    async def run(self, *futures: asyncio.Future[Any]) -> None:
        """Carry until these are done."""
        while not all(future.done() for future in futures):
            self.carry()
            await asyncio.sleep(0)
        self.carry()

    async def open(self) -> None:
        opening = asyncio.gather(self.sender.open(), self.receiver.open())
        while not opening.done():
            await asyncio.sleep(0)
            self.carry_keys()
        await opening

    async def aclose(self) -> None:
        pending = [job.done for end in (self.sender, self.receiver) for job in end._open]
        await self.sender.aclose()
        await self.receiver.aclose()
        for future in pending:
            future.exception()  # seen
        await self.loop.run_in_executor(None, self._copier.shutdown)


@asynccontextmanager
async def ends(shm_bytes: int = 64 * MIB) -> AsyncIterator[Ends]:
    both = Ends(shm_bytes)
    try:
        await both.open()
        yield both
    finally:
        await both.aclose()


def pieces(both: Ends) -> list[Piece]:
    return [Piece.unpack(frame.head) for frame in both.ours.sent]


def grant(*numbers: int) -> Frame:
    return Frame(FrameKind.GRANT, 0, pack_numbers(list(numbers)), b"")
