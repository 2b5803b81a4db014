"""mpi4py on the MPICH of PyPI: blocking calls, objects pickled by it, buffers posted at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from .end import End
from .pickled import to_arrays, to_tensors

if TYPE_CHECKING:
    import torch


class Peer(End):
    """It has no variants."""

    async def open(self) -> None:
        self._world = MPI.COMM_WORLD
        self._other = 1 - self.rank

    async def send(self, message: Any) -> None:
        self._world.send(to_arrays(message), self._other)

    async def recv(self) -> Any:
        return to_tensors(self._world.recv(source=self._other))

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        self._wait([self._world.Isend(each.numpy(), self._other) for each in tensors])

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        self._wait([self._world.Irecv(each.numpy(), self._other) for each in buffers])

    def _wait(self, requests: list[MPI.Request]) -> None:
        MPI.Request.Waitall(requests)
