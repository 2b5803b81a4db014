"""Dask's ``distributed.comm`` over TCP, with its own serialization of tensors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch
from distributed.comm import connect, listen
from distributed.protocol import to_serialize

from .end import End
from .pickled import to_tensors  # noqa: F401  (silences what numpy says of read-only memory)

if TYPE_CHECKING:
    from distributed.comm import Comm


class Peer(End):
    """It has no variants."""

    async def open(self) -> None:
        if self.rank:
            self._comm = await connect(await self.find("address"))
            return
        came: asyncio.Future[Comm] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

        async def accept(comm: Comm) -> None:
            came.set_result(comm)
            await self._over.wait()  # the comm is closed when this returns

        self._listener = await listen("tcp://127.0.0.1:0", accept)
        self.leave("address", self._listener.contact_address)
        self._comm = await came

    async def close(self) -> None:
        await self._comm.close()
        if self.rank == 0:
            self._over.set()
            self._listener.stop()

    async def send(self, message: Any) -> None:
        wrapped = {
            key: to_serialize(value) if isinstance(value, torch.Tensor) else value
            for key, value in message.items()
        }
        await self._comm.write(wrapped)

    async def recv(self) -> Any:
        message = await self._comm.read()
        if isinstance(message.get("tokens"), tuple):  # msgpack has one kind of sequence
            message["tokens"] = list(message["tokens"])
        return message

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            await self._comm.write({"tensor": to_serialize(tensor)})

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            buffer.copy_((await self._comm.read())["tensor"])
