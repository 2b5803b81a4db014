"""The ceiling: one copy from memory to memory in one process."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from ..payloads import stream_of
from .end import End

if TYPE_CHECKING:
    import torch


class Peer(End):
    """Variants: none for C's ``memmove``, ``torch`` for ``Tensor.copy_`` on one thread."""

    async def send_all(self, tensors: list[torch.Tensor]) -> None:
        raise NotImplementedError

    async def recv_all(self, buffers: list[torch.Tensor]) -> None:
        raise NotImplementedError

    async def stream(self, *, size: int, count: int) -> float:
        kinds = stream_of(size, count)
        sources = [self.empty(size).fill_(each + 1) for each in range(kinds)]
        targets = [self.empty(size).fill_(0) for _ in range(kinds)]
        pairs = [(targets[each % kinds], sources[each % kinds]) for each in range(count)]
        start = time.perf_counter()
        if self.variant == "torch":
            for target, source in pairs:
                target.copy_(source)
        else:
            for target, source in pairs:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        return time.perf_counter() - start
