"""What the simulated device shares between processes: allocations by handle, and events.

The two processes of a test are two ends in one; what is told apart is whether memory is reached by
a mapping. Every piece of memory is an allocation of its own. A handle goes stale when its memory
is given back, an allocation that is open twice must be closed twice, and a copy out of a mapping
that was closed under it fails the test.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from aiocomm.device.base import Event, Stream
from aiocomm.errors import RouteError

HANDLE = 64
_HANDLE = struct.Struct("=QQQ")  # address, room, times that it was given out before


class SimMapping:
    """An allocation of the other process."""

    def __init__(self, device: Sharing, handle: bytes) -> None:
        self.address, self.nbytes, _ = _HANDLE.unpack_from(handle)
        self.handle = handle
        self.open = True
        self._device = device

    def close(self) -> None:
        assert self.open, "it is closed twice"
        self.open = False
        self._device.opened[self.handle] -= 1
        if not self._device.opened[self.handle]:
            del self._device.opened[self.handle]
        self._device.closings += 1


class SimSharedEvent:
    """An event that is recorded again and again."""

    def __init__(self, device: Any, index: int, number: int) -> None:
        self._device = device
        self._index = index
        self.handle = struct.pack("=Q", number).ljust(HANDLE, b"e")
        self.last: Event | None = None

    def record(self, stream: Stream) -> Event:
        assert stream.index == self._index, "an event is recorded on its own device only"
        self.last = self._device.record(stream)
        return self.last


class SimOpenedEvent:
    """The same, in the other process: to be waited for as it was recorded last."""

    def __init__(self, shared: SimSharedEvent, stream: Stream) -> None:
        self.shared = shared
        self.stream = stream

    def query(self) -> bool:
        return self.shared.last is None or self.shared.last.query()


def recorded(event: Event) -> Event:
    """What a wait that begins now waits for."""
    if isinstance(event, SimOpenedEvent):
        assert event.shared.last is not None, "the event was not recorded yet"
        return event.shared.last
    return event


class Sharing:
    """The part of ``Simulated`` that other processes see.

    Attributes:
        unreachable: addresses of allocations that cannot be exported, and ``"all"`` for any.
        foreign: why no handle can be opened here, if that is so.
        opened: how often each handle is open.
        openings: how often memory was mapped.
        closings: how often it was unmapped.
        exports: how often memory was exported.
    """

    def share(self) -> None:
        """Begin with nothing shared."""
        self.unreachable: set[int | str] = set()
        self.foreign: str | None = None
        self.opened: dict[bytes, int] = {}
        self.openings = self.closings = self.exports = 0
        self.shared_events: dict[bytes, SimSharedEvent] = {}

    def export(self, memory: torch.Tensor) -> tuple[bytes, int]:
        self.exports += 1
        base = memory.untyped_storage().data_ptr()
        if {base, "all"} & self.unreachable:
            raise RouteError("memory of cuda:0 cannot be shared between processes: expandable")
        handle = self._handle_at(base)
        return handle, memory.data_ptr() - base

    def open_memory(self, handle: bytes, index: int) -> SimMapping:
        base = _HANDLE.unpack_from(handle)[0]
        if self.foreign or handle != self._handle_at(base):
            raise RouteError(f"memory of the peer cannot be mapped here: {self.foreign or 'stale'}")
        self.opened[handle] = self.opened.get(handle, 0) + 1
        self.openings += 1
        return SimMapping(self, handle)

    def copy_in(self: Any, target: torch.Tensor, source: Any, offset: int, stream: Stream) -> None:
        to, size = self.content(target), target.nbytes
        assert offset + size <= source.nbytes, "it reads past the end of the allocation"
        of = self.content_at(source.address) + offset

        def move() -> bool:
            assert source.open, "it was unmapped under the copy"
            ctypes.memmove(to, of, size)
            return True

        self.queue(stream, move)

    def shared_event(self, index: int) -> SimSharedEvent:
        event = SimSharedEvent(self, index, len(self.shared_events))
        self.shared_events[event.handle] = event
        return event

    def open_event(self, handle: bytes, stream: Stream) -> SimOpenedEvent:
        if self.foreign:
            raise RouteError(f"an event of the peer cannot be opened: {self.foreign}")
        return SimOpenedEvent(self.shared_events[handle], stream)

    def _handle_at(self: Any, base: int) -> bytes:
        memory = next(each for each in self.memories if base in each)
        room, times = memory.given[base]
        return _HANDLE.pack(base, room, times).ljust(HANDLE, b"m")
