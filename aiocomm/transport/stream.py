"""Bulk over the control link itself: the route of last resort, where no other can be set up.

The receiver grants each message when it has memory for it; then the bytes follow as CHUNK frames
between the other frames of the link, so heartbeats and envelopes of the same link are never stuck
behind them for longer than one chunk. Copies every byte twice more than a data socket would.
Knows the link only as something that takes frames.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..errors import AiocommError, ProtocolError, RouteError
from .base import FrameKind
from .blocks import BlockRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .base import Frame, Link

CHUNK = 256 * 1024
"""Bytes per frame: copying one takes some 50 us of the loop."""


@dataclass(slots=True)
class _Job:
    """One message on its way; ``blocks`` is empty where the bytes are to be dropped."""

    nbytes: int
    done: asyncio.Future[None]
    blocks: Sequence[torch.Tensor] = field(default_factory=tuple)
    moved: int = 0  # bytes of the message
    block: int = 0  # the block at work, and where in it
    offset: int = 0


class StreamRoute(BlockRoute):
    """One direction of bulk over the link (the ``Route`` protocol).

    Args:
        link: carries the frames.
        loop: the loop of the runtime.
        sending: which end this is.
    """

    name = "link"
    trails: Final = False

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop, *, sending: bool) -> None:
        self._link = link
        self._loop = loop
        self._sending = sending
        self._jobs: deque[_Job] = deque()
        self._grants = 0
        self._granted = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._severed: RouteError | None = None

    async def open(self) -> None:
        """Nothing to set up: the link is there.

        Cancellation: has no effect.
        """

    def send_blocks(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Send 1-D uint8 CPU blocks; done when all bytes are with the link.

        Cancellation: the bytes go out all the same.
        """
        job = self._enter(blocks, sum(block.numel() for block in blocks))
        if self._pump is None and self._jobs:
            self._pump = self._loop.create_task(self._run())
        return job.done

    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Fill 1-D uint8 CPU blocks with the next message.

        Cancellation: the bytes come in all the same.
        """
        job = self._enter(blocks, sum(block.numel() for block in blocks))
        self._grant(job)
        return job.done

    def discard_blocks(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drop the bytes of the next message.

        Cancellation: the bytes come in and are dropped all the same.
        """
        job = self._enter((), sum(sizes))
        self._grant(job)
        return job.done

    def grant_received(self, frame: Frame) -> None:
        """The peer has memory for one more message.

        Raises:
            ProtocolError: it has said so of every message already.
        """
        if self._severed is not None:
            return
        if self._grants >= len(self._jobs):
            raise ProtocolError("the peer grants a message that was not announced")
        self._grants += 1
        self._granted.set()

    def chunk_received(self, frame: Frame) -> None:
        """The next bytes of the message at work, in the body.

        Raises:
            ProtocolError: more bytes than were announced.
        """
        if self._severed is not None:
            return
        body = frame.body
        if not self._jobs or self._jobs[0].moved + len(body) > self._jobs[0].nbytes:
            raise ProtocolError("the peer streams bytes that it has not announced")
        job = self._jobs[0]
        job.moved += len(body)
        taken = 0
        while job.blocks and taken < len(body):
            block = job.blocks[job.block]
            count = min(len(body) - taken, block.numel() - job.offset)
            source = body[taken : taken + count] if count < len(body) else body
            ctypes.memmove(block.data_ptr() + job.offset, source, count)
            taken += count
            self._step(job, count)
        if job.moved == job.nbytes:
            self._finish(job)

    def sever(self) -> None:
        """Fail what is pending; idempotent."""
        if self._severed is not None:
            return
        self._severed = RouteError("the link route was severed")
        if self._pump is not None:
            self._pump.cancel()
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done.done():
                job.done.set_exception(self._severed)

    async def aclose(self) -> None:
        """Sever, and wait until the pump has ended.

        Cancellation: safe, the route is severed already.
        """
        self.sever()
        if self._pump is not None:
            await asyncio.wait([self._pump])

    def _enter(self, blocks: Sequence[torch.Tensor], nbytes: int) -> _Job:
        job = _Job(nbytes, self._loop.create_future(), [b for b in blocks if b.numel()])
        if self._severed is not None:
            job.done.set_exception(self._severed)
        elif nbytes == 0:
            job.done.set_result(None)
        else:
            self._jobs.append(job)
        return job

    def _grant(self, job: _Job) -> None:
        if job.done.done():
            return
        try:
            self._link.send(FrameKind.GRANT, 0)
        except AiocommError as error:
            self._fail(error)

    @staticmethod
    def _step(job: _Job, count: int) -> None:
        job.offset += count
        if job.offset == job.blocks[job.block].numel():
            job.block, job.offset = job.block + 1, 0

    def _finish(self, job: _Job) -> None:
        self._jobs.popleft()
        if not job.done.done():
            job.done.set_result(None)

    async def _run(self) -> None:
        try:
            while self._jobs:
                while not self._grants:
                    self._granted.clear()
                    await self._granted.wait()
                job = self._jobs[0]
                while job.moved < job.nbytes:
                    if self._link.writable:
                        await asyncio.sleep(0)  # a link that takes it all must not hold the loop
                    else:
                        await self._link.drain()
                    block = job.blocks[job.block]
                    count = min(CHUNK, block.numel() - job.offset)
                    chunk = ctypes.string_at(block.data_ptr() + job.offset, count)
                    self._link.send(FrameKind.CHUNK, 0, b"", chunk)
                    job.moved += count
                    self._step(job, count)
                self._grants -= 1
                self._finish(job)
        except AiocommError as error:
            self._fail(error)
        finally:
            self._pump = None

    def _fail(self, cause: AiocommError) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done.done():
                error = RouteError("the link went down under its bulk route")
                error.__cause__ = cause
                job.done.set_exception(error)
