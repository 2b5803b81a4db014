"""ucxx, the asyncio interface to UCX: objects as a pickle and its buffers, tensors as buffers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import libucxx

libucxx.load_library()  # before ucxx, where pip brought it

import numpy as np  # noqa: E402
import ucxx  # noqa: E402

from .end import End  # noqa: E402
from .pickled import dumps, loads  # noqa: E402

if TYPE_CHECKING:
    import torch


class Peer(End):
    """It has no variants."""

    async def open(self) -> None:
        if self.rank:
            port = int(await self.find("port"))
            self._endpoint = await ucxx.create_endpoint("127.0.0.1", port)
            return
        came = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

        async def accept(endpoint: Any) -> None:
            came.set_result(endpoint)
            await self._over.wait()

        self._listener = ucxx.create_listener(accept)
        self.leave("port", self._listener.port)
        self._endpoint = await came

    async def close(self) -> None:
        await self._endpoint.close()
        if self.rank == 0:
            self._over.set()
            self._listener.close()

    async def send(self, message: Any) -> None:
        frames = dumps(message)
        await self._endpoint.send_multi([np.frombuffer(each, dtype=np.uint8) for each in frames])

    async def recv(self) -> Any:
        return loads([memoryview(each) for each in await self._endpoint.recv_multi()])

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            await self._endpoint.send(tensor.numpy())

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            await self._endpoint.recv(buffer.numpy())
