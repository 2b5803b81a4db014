"""RLinf: two of its workers on a local Ray, with its ``send`` and ``recv``, which block."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import ray
from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

from .end import End

if TYPE_CHECKING:
    import torch

NAME = "bench"


class Side(End):
    """One end, in a worker's process."""

    worker: Worker

    async def send(self, message: Any) -> None:
        self.worker.send(message, NAME, 1 - self.rank)

    async def recv(self) -> Any:
        return self.worker.recv(NAME, 1 - self.rank)

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.worker.send_tensor(tensor, NAME, 1 - self.rank)

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            self.worker.recv_tensor(buffer, NAME, 1 - self.rank)


class Two(Worker):  # type: ignore[misc]
    """The worker: does what the process that the benchmarks speak to is asked for."""

    def bench(self, do: str, arguments: dict[str, Any]) -> float:
        side = Side(self._rank, ".", "")
        side.worker = self
        call = side.exchange if do == "exchange" else side.stream
        return asyncio.run(call(**arguments))


class Peer(End):
    """It has no variants, and both ends in hand."""

    async def open(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_TMPDIR"] = str(self.folder)
        cluster = Cluster(num_nodes=1)
        placement = NodePlacementStrategy([0, 0])
        self._workers = Two.create_group().launch(
            cluster=cluster, name=NAME, placement_strategy=placement
        )

    async def close(self) -> None:
        ray.shutdown()

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        raise NotImplementedError

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        raise NotImplementedError

    async def exchange(self, *, payload: str, count: int, cpus: int = 0) -> float:
        arguments = {"payload": payload, "count": count, "cpus": cpus}
        return float(self._workers.bench("exchange", arguments).wait()[0])

    async def stream(self, *, size: int, count: int) -> float:
        return float(self._workers.bench("stream", {"size": size, "count": count}).wait()[1])
