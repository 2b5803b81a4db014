"""Memory of the simulated device, and its streams: who may touch what, and when.

As with torch's allocator, memory is given out for one stream, where it may be used at once: what
was queued there by whoever had it before is still to come, and writes to it. Any other stream has
to wait for that one first. Memory that is dropped is anybody's at once, but for the streams that it
was lent to: it stays as it is until they have come past all that was queued in them by then.
Stricter than torch's: what is still queued in the first stream when memory is dropped finds it
scribbled over.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from aiocomm.payload_bytes import tensor_at

RUBBISH, FRESH, SCRIBBLE = 0xA5, 0xCD, 0xDD
SIZE = 256 << 20
GRAIN = 64


class _Owner:
    """Dies with the last tensor over a piece of memory."""


class Memory:
    """Memory that is given out in pieces; with ``hidden``, what it holds lies beside it."""

    def __init__(self, *, hidden: bool, size: int = SIZE) -> None:
        self._map = mmap.mmap(-1, size * (2 if hidden else 1))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = size
        self._beside = size if hidden else 0
        self._end = 0
        self._lock = threading.Lock()  # of the end; memory is dropped anywhere, so that takes none
        self._free: dict[int, list[int]] = {}
        self.given: dict[int, tuple[int, int]] = {}  # room at an address, and which life of it
        self._users: dict[int, set[SimStream]] = {}  # to which it was lent

    def __contains__(self, address: int) -> bool:
        return self.base <= address < self.base + self.size

    @property
    def used(self) -> int:
        """Bytes that are given out."""
        return sum(room for room, _ in list(self.given.values()))

    def give(self, nbytes: int) -> torch.Tensor:
        room = max(GRAIN, -(-nbytes // GRAIN) * GRAIN)
        try:
            address = self._free.setdefault(room, []).pop()
        except IndexError:
            address = self._more(room)
        self.given[address] = room, self.given.get(address, (0, 0))[1] + 1
        if self._beside:
            ctypes.memset(address, RUBBISH, room)
        ctypes.memset(self.content(address), FRESH, room)
        owner = _Owner()
        weakref.finalize(owner, self._take_back, address, room)
        return tensor_at(address, nbytes, owner)

    def _more(self, room: int) -> int:
        with self._lock:  # copying threads ask too
            start = self._end
            if start + room > self.size:
                raise RuntimeError(f"simulated memory is out: {room} bytes are not there")
            self._end += room
        return self.base + start

    def lend(self, address: int, stream: SimStream) -> None:
        """The stream uses this memory too."""
        self._users.setdefault(address, set()).add(stream)

    def last_of_before(self, address: int) -> Callable[[], bool]:
        """An operation: the last one of who had this memory before, and writes to it."""
        life = self.given[address]

        def write() -> bool:
            if self.given[address] == life:  # else it is somebody else's by now
                ctypes.memset(self.content(address), FRESH, life[0])
            return True

        return write

    def _take_back(self, address: int, room: int) -> None:
        busy = [stream for stream in self._users.pop(address, ()) if stream.operations]
        left = len(busy)

        def passed() -> bool:
            nonlocal left
            left -= 1
            if not left:
                self._reuse(address, room)
            return True

        for stream in busy:
            stream.operations.append(passed)
        if not busy:
            self._reuse(address, room)

    def _reuse(self, address: int, room: int) -> None:
        ctypes.memset(self.content(address), SCRIBBLE, room)
        self.given[address] = 0, self.given[address][1] + 1
        self._free[room].append(address)

    def content(self, address: int) -> int:
        """Where what a tensor at this address holds really lies."""
        return address + self._beside


class SimStream:
    """Operations that wait for their turn; each says whether it could be carried out."""

    def __init__(self, index: int, number: int) -> None:
        self.index = index
        self.key = ("simulated", number)
        self.operations: deque[Callable[[], bool]] = deque()
        self.failed: str | None = None
        self.held = False

    def step(self) -> bool:
        """Carry out the first operation, if it can be."""
        if self.held or self.failed or not self.operations or not self.operations[0]():
            return False
        self.operations.popleft()
        return True
