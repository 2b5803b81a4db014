"""pyzmq with asyncio: a PAIR of sockets over a Unix socket, one frame for each buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zmq
import zmq.asyncio

from .end import End
from .pickled import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Sequence


class Peer(End):
    """It has no variants."""

    async def open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        path = f"ipc://{self.folder / 'zmq'}"
        (self._socket.connect if self.rank else self._socket.bind)(path)

    async def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    async def send(self, message: Any) -> None:
        await self._socket.send_multipart(dumps(message), copy=False)

    async def recv(self) -> Any:
        frames: Sequence[Any] = await self._socket.recv_multipart(copy=False)
        return loads([frame.buffer for frame in frames])

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            await self._socket.send(memoryview(tensor.numpy()), copy=False)

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            frame = await self._socket.recv(copy=False)
            buffer.copy_(torch.from_numpy(np.frombuffer(frame.buffer, dtype=np.uint8)))
