"""One end of a pair as every peer has it, and the loops that are timed, the same for all.

A peer says how it sends, receives and fills a buffer; where it knows a better way to do a whole
stream at once (posting all of it, as MPI does), it says that too. Time is taken by rank 0 for round
trips and by rank 1, the receiver, for streams.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from ..payloads import check, make, stream_of


class End(abc.ABC):
    """One end of a pair.

    Args:
        rank: 0 or 1.
        folder: a short path for sockets and files, the same at both ends.
        variant: which way to use the library.
    """

    def __init__(self, rank: int, folder: str, variant: str) -> None:
        self.rank = rank
        self.folder = Path(folder)
        self.variant = variant

    async def open(self) -> None:  # noqa: B027  (some have nothing to connect)
        """Connect to the other end."""

    async def close(self) -> None:  # noqa: B027
        """Let go of everything."""

    async def send(self, message: Any) -> None:
        """Send a dict, with tensors in it or without."""
        raise NotImplementedError

    async def recv(self) -> Any:
        """Receive one, with the tensors as torch tensors."""
        raise NotImplementedError

    @abc.abstractmethod
    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        """Send tensors of one size."""

    @abc.abstractmethod
    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        """Receive them into these; done when the last one is filled."""

    def empty(self, size: int) -> torch.Tensor:
        """Memory of that many bytes for a tensor of a stream."""
        return torch.empty(size, dtype=torch.uint8)

    def clear(self, buffer: torch.Tensor) -> None:
        """Make a buffer of a stream zeros, to see it filled again."""
        buffer.zero_()

    async def meet(self) -> None:
        """Return when both ends are here; rank 1 not after rank 0."""
        if self.rank == 0:
            await self.send({})
            await self.recv()
        else:
            await self.recv()
            await self.send({})

    async def rounds(self, message: Any, count: int) -> Any:
        """So many round trips of a message; what came last."""
        came = None
        for _ in range(count):
            if self.rank == 0:
                await self.send(message)
                came = await self.recv()
            else:
                await self.send(await self.recv())
        return came

    def leave(self, name: str, text: object) -> None:
        """Leave a note for the other end."""
        new = self.folder / f"{name}.new"
        new.write_text(str(text))
        new.rename(self.folder / name)

    async def find(self, name: str) -> str:
        """The other end's note."""
        while not (self.folder / name).exists():  # noqa: ASYNC110  (nothing tells of files)
            await asyncio.sleep(0.01)
        return (self.folder / name).read_text()

    # --- what is asked for from outside ---

    async def exchange(self, *, payload: str, count: int, cpus: int = 0) -> float:
        """Seconds per round trip of an object, on so many CPUs (0: wherever)."""
        before = os.sched_getaffinity(0)
        if cpus:
            pin({sorted(before)[self.rank % cpus]})
        try:
            message = make(payload)
            await self.meet()
            start = time.perf_counter()
            came = await self.rounds(message, count)
            seconds = time.perf_counter() - start
            if self.rank == 0 and came is not None:
                check(payload, came)
            return seconds / count
        finally:
            pin(before)

    async def stream(self, *, size: int, count: int) -> float:
        """Seconds for a stream of so many tensors of that size from rank 0 to rank 1."""
        kinds = stream_of(size, count)
        distinct = [self.empty(size).fill_(0 if self.rank else each + 1) for each in range(kinds)]
        tensors = [distinct[each % kinds] for each in range(count)]
        call = self.recv_all if self.rank else self.send_all
        await self.meet()
        # Not timed: pages, routes and mappings are there from now on, and the kernel has found out
        # that the two processes want a core each.
        await call(tensors)
        if self.rank:
            _check_stream(distinct)
            for each in distinct:
                self.clear(each)
        await self.meet()
        start = time.perf_counter()
        await call(tensors)
        seconds = time.perf_counter() - start
        if self.rank:
            _check_stream(distinct)
        await self.meet()
        return seconds


def _check_stream(buffers: list[torch.Tensor]) -> None:
    for number, buffer in enumerate(buffers):
        if buffer[0] != number + 1 or buffer[-1] != number + 1:
            raise ValueError("what came is not what was sent")


def pin(cpus: set[int]) -> None:
    """Put every thread of this process on these CPUs."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(task.name), cpus)
