"""A Ray actor, called from this process: an object there and back, tensors into its own buffers."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import ray
import torch

from ..payloads import stream_of
from .end import End, pin
from .pickled import to_arrays, to_tensors

if TYPE_CHECKING:
    import numpy as np

STORE = 2 << 30  # bytes of shared memory for objects on their way


@ray.remote(num_cpus=0)
class Far:
    """The other end."""

    def echo(self, message: Any) -> Any:
        return to_arrays(to_tensors(message))

    def pin(self, cpus: list[int]) -> None:
        pin(set(cpus))

    def prepare(self, size: int, kinds: int) -> None:
        self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(kinds)]

    def take(self, kind: int, array: np.ndarray[Any, Any]) -> None:
        self._buffers[kind].copy_(torch.from_numpy(array))


class Peer(End):
    """It has no variants, and both ends in hand."""

    async def open(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=STORE,
            _temp_dir=str(self.folder / "ray"),
        )
        self._far = Far.remote()
        ray.get(self._far.pin.remote(list(os.sched_getaffinity(0))))

    async def close(self) -> None:
        ray.shutdown()

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        count = len(self._kinds)
        calls = [
            self._far.take.remote(self._kinds[number % count], tensor.numpy())
            for number, tensor in enumerate(tensors)
        ]
        ray.get(calls)

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        raise NotImplementedError

    async def meet(self) -> None:
        """Both ends are one."""

    async def rounds(self, message: Any, count: int) -> Any:
        came = None
        for _ in range(count):
            came = to_tensors(ray.get(self._far.echo.remote(to_arrays(message))))
        return came

    async def exchange(self, *, payload: str, count: int, cpus: int = 0) -> float:
        before = sorted(os.sched_getaffinity(0))
        ray.get(self._far.pin.remote([before[1 % cpus]] if cpus else before))
        try:
            return await super().exchange(payload=payload, count=count, cpus=cpus)
        finally:
            ray.get(self._far.pin.remote(before))

    async def stream(self, *, size: int, count: int) -> float:
        self._kinds = list(range(stream_of(size, count)))
        distinct = [self.empty(size).fill_(each + 1) for each in self._kinds]
        ray.get(self._far.prepare.remote(size, len(self._kinds)))
        await self.send_all(distinct)
        start = time.perf_counter()
        await self.send_all([distinct[each % len(distinct)] for each in range(count)])
        return time.perf_counter() - start
