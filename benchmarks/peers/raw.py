"""The floor: bytes on a Unix socket under uvloop, straight into memory that waits for them.

No frames, no pickling, no futures for each message: an echo is answered from the callback that
brought it. It moves as many bytes as the payload pickles to, and knows beforehand how many come.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from typing import TYPE_CHECKING, Any

from .end import End
from .pickled import to_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


EARLY = 1 << 16


class Wire(asyncio.BufferedProtocol):
    """Fills the buffers it was given, and stops reading while it has none.

    uvloop starts to read after ``connection_made``, whatever that says: the few bytes that may come
    before the first buffer are kept.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self._views: deque[memoryview] = deque()
        self._spare = memoryview(bytearray(EARLY))
        self._early = 0
        self._filled: Callable[[], None] = lambda: None
        self.connected = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connected.set_result(None)

    def fill(self, views: list[memoryview], filled: Callable[[], None]) -> None:
        """Read into these, then call that."""
        self._views.extend(views)
        self._filled = filled
        while self._early and self._views:
            count = min(self._early, len(self._views[0]))
            self._views[0][:count] = self._spare[:count]
            self._early -= count
            self._spare[: self._early] = bytes(self._spare[count : count + self._early])
            self._advance(count)
        if not self.transport.is_reading():
            self.transport.resume_reading()

    async def filled(self, views: list[memoryview]) -> None:
        """The same, awaited."""
        done = asyncio.get_running_loop().create_future()
        self.fill(views, lambda: done.set_result(None))
        await done

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._views[0] if self._views else self._spare[self._early :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._views:
            self._advance(nbytes)
        else:
            self._early += nbytes
            self.transport.pause_reading()

    def _advance(self, nbytes: int) -> None:
        rest = self._views[0][nbytes:]
        if rest:
            self._views[0] = rest
            return
        self._views.popleft()
        if not self._views:
            self._filled()
            if not self._views:
                self.transport.pause_reading()


class Peer(End):
    """It has no variants."""

    async def open(self) -> None:
        loop, path = asyncio.get_running_loop(), str(self.folder / "wire")
        self._wire = Wire()
        if self.rank == 0:
            self._server = await loop.create_unix_server(lambda: self._wire, path)
            self.leave("listening", "")
            await self._wire.connected
            return
        await self.find("listening")
        await loop.create_unix_connection(lambda: self._wire, path)

    async def close(self) -> None:
        if self._wire.transport is not None:
            self._wire.transport.close()
        if self.rank == 0:
            self._server.close()

    async def send(self, message: Any) -> None:
        self._wire.transport.write(b"x")

    async def recv(self) -> Any:
        await self._wire.filled([memoryview(bytearray(1))])

    async def rounds(self, message: Any, count: int) -> Any:
        done = asyncio.get_running_loop().create_future()
        body = pickle.dumps(to_arrays(message), 5)
        write, view = self._wire.transport.write, memoryview(bytearray(len(body)))
        left = count

        def came() -> None:
            nonlocal left
            left -= 1
            if left or self.rank:
                write(body)
            if left:
                self._wire.fill([view], came)
            else:
                done.set_result(None)

        self._wire.fill([view], came)
        if self.rank == 0:
            write(body)
        await done

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._wire.transport.write(memoryview(tensor.numpy()))

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        await self._wire.filled([memoryview(each.numpy()) for each in buffers])
