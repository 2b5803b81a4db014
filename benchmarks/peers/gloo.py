"""Bare Gloo: broadcasts on a process group of two, which block their thread in ``Work.wait``.

An object is pickled and takes two broadcasts, of its length and of its bytes, as everybody who
sends objects over a process group does it.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from .end import End
from .pickled import to_arrays, to_tensors


def bare_group(path: str, rank: int) -> Any:
    """A Gloo process group of two over loopback, with a file to meet at."""
    backend: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    return backend(FileStore(path, 2), rank, 2, options)


def bare(gloo: Any, tensors: list[torch.Tensor], root: int = 0) -> None:
    """Broadcast each from the root; blocks."""
    works = [gloo.broadcast(tensor, root) for tensor in tensors]
    for work in works:
        work.wait()


class Peer(End):
    """It has no variants."""

    async def open(self) -> None:
        self._gloo = bare_group(str(self.folder / "store"), self.rank)

    async def send(self, message: Any) -> None:
        body = torch.frombuffer(bytearray(pickle.dumps(to_arrays(message), 5)), dtype=torch.uint8)
        bare(self._gloo, [torch.tensor([body.numel()]), body], self.rank)

    async def recv(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        bare(self._gloo, [length], 1 - self.rank)
        body = torch.empty(int(length), dtype=torch.uint8)
        bare(self._gloo, [body], 1 - self.rank)
        return to_tensors(pickle.loads(memoryview(body.numpy())))

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        bare(self._gloo, tensors)

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        bare(self._gloo, buffers)
