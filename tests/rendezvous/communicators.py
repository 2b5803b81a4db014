"""NCCL without a GPU: backends that make ids and communicators, and say who met whom."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from .boards import WAIT

_numbers = itertools.count()


@dataclass
class Communicator:
    """What the ranks of a group have in common is the id."""

    ndev: int
    nccl_id: bytes
    rank: int
    destroyed: threading.Event = field(default_factory=threading.Event, compare=False)

    def destroy(self) -> None:
        self.destroyed.set()


class Loose:
    """Makes a communicator at once, whether or not the other ranks are there."""

    def __init__(self) -> None:
        self.made: list[Communicator] = []

    def get_unique_id(self) -> bytes:
        return b"%d-%d" % (os.getpid(), next(_numbers))

    def NcclCommunicator(self, *, ndev: int, commId: Any, rank: int) -> Communicator:
        self.made.append(Communicator(ndev, commId, rank))
        return self.made[-1]


class Strict(Loose):
    """As NCCL: a communicator is there when all ranks are; for ranks that are threads here."""

    def __init__(self) -> None:
        super().__init__()
        self.barriers: dict[bytes, threading.Barrier] = {}
        self._lock = threading.Lock()
        self.entered = threading.Semaphore(0)

    def NcclCommunicator(self, *, ndev: int, commId: Any, rank: int) -> Communicator:
        with self._lock:
            barrier = self.barriers.setdefault(commId, threading.Barrier(ndev, timeout=WAIT))
        self.entered.release()
        barrier.wait()
        return super().NcclCommunicator(ndev=ndev, commId=commId, rank=rank)


async def waiting_on_board(count: int) -> None:
    """Until so many keys are waited for on the board of the ranks."""
    import ray

    from aiocomm.rendezvous import ray_nccl

    def look() -> int:
        try:
            actor: Any = ray.get_actor(ray_nccl.BOARD, namespace=ray_nccl.NAMESPACE)
            return int(ray.get(actor.__ray_call__.remote(lambda self: len(self._waiting))))
        except (ValueError, ray.exceptions.RayActorError):
            return -1  # not yet there, or about to end

    async with asyncio.timeout(WAIT):
        while await asyncio.to_thread(look) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
