"""aiocomm itself: its default routes, Gloo for what is large, or memory that both can see."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import torch

import aiocomm

from .end import End

MEMBERS = ("bench:0", "bench:1")


class Peer(End):
    """Variants: none, ``shared`` or ``aliased`` for tensors of ``empty_shared``, a route to pin."""

    async def open(self) -> None:
        self._exits = AsyncExitStack()
        route = None if self.variant in ("", "shared", "aliased") else self.variant
        options = aiocomm.Options(route=route)
        board = await self._board()
        self._collective = await self._exits.enter_async_context(
            aiocomm.open(MEMBERS[self.rank], store=board, options=options)
        )
        self._group = self._collective.create_collective_group(MEMBERS)
        await self._group.ready()

    async def _board(self) -> aiocomm.TCPBoard:
        """Rank 0 serves one at a free port, and leaves the port in the folder."""
        if self.rank == 0:
            board = aiocomm.TCPBoard(port=0, serve=True)
            await self._exits.enter_async_context(board)
            self.leave("port", board.port)
            return board
        return aiocomm.TCPBoard(port=int(await self.find("port")), serve=False)

    async def close(self) -> None:
        await self._exits.aclose()

    def empty(self, size: int) -> torch.Tensor:
        if self.variant in ("shared", "aliased") and self.rank == 0:
            aliased = self.variant == "aliased"
            made: torch.Tensor = aiocomm.empty_shared((size,), torch.uint8, aliased=aliased)
            return made
        return super().empty(size)

    def clear(self, buffer: torch.Tensor) -> None:
        if self.variant == "aliased":
            buffer.set_(torch.zeros_like(buffer))  # the memory is the sender's too
        else:
            super().clear(buffer)

    async def send(self, message: Any) -> None:
        await self._group.send(message)

    async def recv(self) -> Any:
        return await self._group.recv()

    async def rounds(self, message: Any, count: int) -> Any:
        group, came = self._group, None
        if self.rank:
            return await super().rounds(message, count)
        for _ in range(count):
            reply = group.recv()
            await group.send(message)
            came = await reply
        return came

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        send = self._group.send if self.variant == "aliased" else self._group.send_tensor
        await asyncio.gather(*[send(each) for each in tensors])

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        if self.variant != "aliased":
            await asyncio.gather(*[self._group.recv_tensor(each) for each in buffers])
            return
        works = [self._group.recv() for _ in buffers]
        for buffer, work in zip(buffers, works, strict=True):
            buffer.set_(await work)  # no copy: the buffer is the sender's memory from here on
