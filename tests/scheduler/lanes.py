"""What the tests of lanes share: a link that takes frames down, a route whose transfers end when
the test says so, and a runtime whose copying thread does too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aiocomm.errors import AiocommError, Context, PeerLostError
from aiocomm.options import Options
from aiocomm.payload import Packed
from aiocomm.runtime import Runtime
from aiocomm.scheduler.envelope import envelope_head
from aiocomm.transport.base import Frame, FrameKind
from aiocomm.transport.blocks import BlockRoute

CONTEXT = Context(group="g", peer="b:0")
EAGER = 1024  # bytes
BULK = 4 * EAGER


class FakeLink:
    """Takes frames down; raises what ``down`` holds."""

    def __init__(self, *, in_process: bool = False) -> None:
        self.in_process = in_process
        self.frames: list[Frame] = []
        self.down: AiocommError | None = None

    def send(self, kind: FrameKind, sequence: int, head: bytes = b"", body: Any = b"") -> None:
        if self.down is not None:
            raise self.down
        self.frames.append(Frame(kind, sequence, bytes(head), body))

    def lose(self) -> None:
        self.down = PeerLostError("gone")

    def of(self, kind: FrameKind) -> list[Frame]:
        return [frame for frame in self.frames if frame.kind is kind]


@dataclass(eq=False)
class Move:
    """One call of a route."""

    blocks: Sequence[torch.Tensor]
    sizes: list[int]
    future: asyncio.Future[None]

    def fill(self, packed: Packed) -> None:
        """Put the bytes of a message whose buffers are one block each there, and end."""
        for block, buffer in zip(self.blocks, packed.buffers, strict=True):
            block.copy_(buffer)
        self.future.set_result(None)


class FakeRoute(BlockRoute):
    """A bulk route that moves nothing by itself."""

    name = "fake"

    def __init__(self) -> None:
        self.moves: list[Move] = []

    def _move(self, blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> asyncio.Future[None]:
        self.moves.append(Move(blocks, list(sizes), asyncio.get_running_loop().create_future()))
        return self.moves[-1].future

    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        return self._move(blocks, [block.numel() for block in blocks])

    send_blocks = receive

    def discard_blocks(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        return self._move((), sizes)


@dataclass(eq=False)
class Job:
    """One call of ``off_loop``."""

    call: Callable[[], Any]
    future: asyncio.Future[Any]

    def run(self) -> None:
        self.future.set_result(self.call())


class StillRuntime(Runtime):
    """A runtime that copies nothing off the loop before the test says so."""

    def __init__(self, **settings: Any) -> None:
        options = Options(**{"eager_limit": EAGER, **settings})
        super().__init__(asyncio.get_running_loop(), options, "a:0")
        self.jobs: list[Job] = []

    def off_loop(self, call: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
        self.jobs.append(Job(lambda: call(*args), self.loop.create_future()))
        return self.jobs[-1].future


def ramp(size: int, start: int = 0) -> torch.Tensor:
    return ((torch.arange(size) + start) % 251).to(torch.uint8)


def blank(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def envelope(packed: Packed, sequence: int, body: Any, *, bulk: bool = False) -> Frame:
    charge = len(packed.meta) + (0 if bulk else packed.nbytes)
    head = envelope_head(packed.kind, packed.meta, charge, bulk=bulk)
    return Frame(FrameKind.ENVELOPE, sequence, head, body)


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
