"""Two runtimes in one process, each with a device of its own, all of it simulated.

``nccl``, ``cuda_ipc``, ``staged`` and ``memory`` are the ways that a message in memory of a device
may take. The first runtime has device 0, the second device 1 (for ``cuda_ipc`` these are one chip,
as two processes count it); everything that is queued happens by itself unless the test holds a
stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import Collective, CollectiveGroup, Options
from aiocomm.testing import MemoryStore

from .pairs import EAGER, MEMBERS
from .simulated import Simulated, simulated
from .simulated_nccl import nccl_of
from .transport.links import apart

WAYS = ("nccl", "cuda_ipc", "staged", "memory")
SMALL, LARGE = 10, EAGER  # elements of float32: in the envelope, in bulk

each_way = pytest.mark.parametrize("way", WAYS)
each_wire = pytest.mark.parametrize("way", WAYS[:3])
each_size = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["eager", "bulk"])


@dataclass
class World:
    """The device, and both members' ends of their group."""

    sim: Simulated
    collectives: tuple[Collective, Collective]
    a: CollectiveGroup
    b: CollectiveGroup
    there: int  # the device on which the second member receives

    def ramp(self, size: int, start: int = 0) -> torch.Tensor:
        """Values that tell where they belong, on the host."""
        return torch.arange(start, start + size, dtype=torch.float32)

    def here(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of the first member's device."""
        return self.sim.tensor(values, 0)

    def buffer(self, size: int) -> torch.Tensor:
        """One of the second member's, to receive into."""
        return self.sim.tensor(torch.zeros(size), self.there)

    @property
    def process_groups(self) -> Any:
        """Every process group that was made, in order."""
        return self.sim.process_group.made


@asynccontextmanager
async def device_pair(way: str, **settings: Any) -> AsyncIterator[World]:
    """The two ends of the one group of a:0 and b:0; nothing is connected yet."""
    with simulated(auto=True) as sim, apart("memory" if way == "memory" else "unix"):
        sim.process_group = nccl_of(sim)
        if way == "cuda_ipc":
            sim.uuids = ["GPU-0", "GPU-0"]  # two processes on one chip
        small = {"eager_limit": EAGER, "shm_bytes": 1 << 20, "close_timeout": 5.0}
        pinned = {"device_route": None if way == "memory" else way}
        options = [
            Options(**{**small, **pinned, "device": index, **settings}) for index in range(2)
        ]
        store = MemoryStore()
        async with (
            aiocomm.open("a:0", store=store, options=options[0]) as first,
            aiocomm.open("b:0", store=store, options=options[1]) as second,
        ):
            yield World(
                sim,
                (first, second),
                first.create_collective_group(MEMBERS),
                second.create_collective_group(MEMBERS),
                0 if way == "memory" else 1,
            )
