"""A CUDA that is simulated: its operations happen when the test says so, one stream at a time.

Its tensors are ordinary ones over memory that looks like rubbish. What they hold lies beside that,
and only operations of the device reach it: whoever reads device memory on the host, or before the
stream has come there, gets rubbish and not the data. An operation knows addresses, not tensors, and
memory is scribbled over when its last tensor dies: whoever drops a buffer too early sends scribble.
``simulated_memory.py`` has what a stream may expect of fresh and of dropped memory.

``Simulated(auto=True)`` carries out one operation of each stream whenever somebody asks for an
event, so that everything ends without the test's doing; else ``run`` does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aiocomm.device import here
from aiocomm.device.base import Accelerator, Event, Identity, Stream
from aiocomm.errors import DeviceError

from .simulated_ipc import Sharing, recorded
from .simulated_memory import Memory, SimStream


class SimEvent:
    """Done when its stream has come past it."""

    def __init__(self, device: Simulated, stream: SimStream) -> None:
        self._device = device
        self.stream = stream
        self.done = False

    def query(self) -> bool:
        self._device.queries += 1
        if self._device.auto:
            self._device.turn()
        if self.stream.failed:
            raise DeviceError(f"device cuda:{self.stream.index} failed: {self.stream.failed}")
        return self.done

    def mark(self) -> bool:
        self.done = True
        return True


class Simulated(Sharing, Accelerator):
    """Some devices; see the module.

    Attributes:
        used: whether the process counts as one that uses CUDA.
        models: of each device; two different ones are a mixed machine.
        uuids: of each device.
        lent: memory and stream of each ``lend``.
        queries: how often somebody asked for an event.
    """

    def __init__(self, devices: int = 2, *, auto: bool = False) -> None:
        self.auto = auto
        self.used = True
        self.memories = [Memory(hidden=True) for _ in range(devices)]
        self.host = Memory(hidden=False)
        self.models = ["Simulated 100"] * devices
        self.uuids = [f"GPU-{number}" for number in range(devices)]
        self.streams: list[SimStream] = []
        self.lent: list[tuple[int, SimStream]] = []
        self.queries = 0
        self._empties: dict[int, torch.Tensor] = {}
        self.share()
        self._thread = threading.local()
        self._queued = threading.Condition()  # threads that make a pair use the device too
        self.default = [self._new_stream(index) for index in range(devices)]

    # --- as an accelerator ---

    def on_cpu(self, tensor: torch.Tensor) -> bool:
        return self._home(tensor) is None

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        index = self._home(tensor)
        return tensor.device if index is None else torch.device("cuda", index)

    def empty(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(0, dtype=torch.uint8).view(dtype).view(tuple(shape))
        self._empties[id(tensor)] = tensor  # it has no address to be known by
        return tensor

    def in_use(self) -> bool:
        return self.used

    def current(self) -> int:
        return getattr(self._thread, "index", 0)

    def count(self) -> int:
        return len(self.memories)

    def identity(self, index: int) -> Identity:
        return Identity(self.uuids[index], self.models[index])

    def stream(self, index: int, *, high_priority: bool = False) -> SimStream:
        return self._new_stream(index)

    def current_stream(self, index: int) -> SimStream:
        streams: dict[int, SimStream] = getattr(self._thread, "streams", {})
        return streams.get(index, self.default[index])

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        here = self._thread
        before = getattr(here, "streams", {}), self.current()
        here.streams, here.index = {**before[0], stream.index: stream}, stream.index
        try:
            yield
        finally:
            here.streams, here.index = before

    def record(self, stream: Stream) -> SimEvent:
        assert isinstance(stream, SimStream)
        event = SimEvent(self, stream)
        self.queue(stream, event.mark)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        event = recorded(event)
        assert isinstance(event, SimEvent)
        self.queue(stream, lambda: event.done)

    def finish(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        patient = threading.current_thread() is not threading.main_thread()
        with self._queued:
            while not event.done:
                if event.stream.failed:
                    event.query()
                moved = self.turn() or (patient and self._queued.wait(20))
                assert moved, "the host waits for an event that can never be done"

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        memory = self.memories[stream.index].give(nbytes)
        self.queue(stream, self.memories[stream.index].last_of_before(memory.data_ptr()))
        return memory

    def zeros(self, nbytes: int, stream: Stream) -> torch.Tensor:
        memory = self.allocate(nbytes, stream)
        to = self.content(memory)

        def clear() -> bool:
            ctypes.memset(to, 0, nbytes)
            return True

        self.queue(stream, clear)
        return memory

    def lend(self, memory: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        self.lent.append((memory.data_ptr(), stream))
        index = self._index_of(memory.data_ptr())
        assert index is not None
        self.memories[index].lend(memory.untyped_storage().data_ptr(), stream)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self.host.give(nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert target.nbytes == source.nbytes
        to, of, size = self.content(target), self.content(source), target.nbytes

        def move() -> bool:
            ctypes.memmove(to, of, size)
            return True

        self.queue(stream, move)

    def join(self, pieces: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        whole = self.allocate(sum(piece.nbytes for piece in pieces), stream)
        start = 0
        for piece in pieces:
            self.copy(whole[start : start + piece.nbytes], piece, stream)
            start += piece.nbytes
        return whole

    # --- for the test ---

    def tensor(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        """A tensor on the device that holds these values already."""
        tensor = self.memories[index].give(values.nbytes).view(values.dtype).view(values.shape)
        ctypes.memmove(self.content(tensor), values.contiguous().data_ptr(), values.nbytes)
        return tensor

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Queue a kernel in the current stream that gives the tensor these values."""
        values = values.contiguous()
        raw = ctypes.string_at(values.data_ptr(), values.nbytes)
        to, index = self.content(tensor), self._index_of(tensor.data_ptr())
        assert index is not None
        assert len(raw) == tensor.nbytes

        def kernel() -> bool:
            ctypes.memmove(to, raw, len(raw))
            return True

        self.queue(self.current_stream(index), kernel)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the tensor holds at this moment, whatever is queued."""
        assert not self.on_cpu(tensor), "it is not on the device"
        values = torch.empty_like(tensor)
        ctypes.memmove(values.data_ptr(), self.content(tensor), tensor.nbytes)
        return values

    def queue(self, stream: Stream, operation: Callable[[], bool]) -> None:
        """Add an operation to a stream."""
        assert isinstance(stream, SimStream)
        with self._queued:
            stream.operations.append(operation)
            self._queued.notify_all()

    def nudge(self) -> None:
        """Something that an operation waits for has come otherwise."""
        with self._queued:
            self._queued.notify_all()

    def content(self, tensor: torch.Tensor) -> int:
        """Where the bytes of the tensor really are."""
        return self.content_at(tensor.data_ptr())

    def content_at(self, address: int) -> int:
        """The same for an address."""
        for memory in (*self.memories, self.host):
            if address in memory:
                return memory.content(address)
        raise AssertionError("a device cannot copy to or from memory that is not pinned")

    def turn(self) -> bool:
        """One operation of each stream; whether there was any."""
        moved = False
        with self._queued:
            for stream in self.streams:
                moved |= stream.step()
            if moved:
                self._queued.notify_all()
        return moved

    def run(self, stream: SimStream | None = None) -> None:
        """Carry out what can be, in all streams or in one."""
        while stream.step() if stream else self.turn():
            self.nudge()

    def fail(self, stream: SimStream, text: str = "an illegal memory access") -> None:
        """From here on nothing in the stream is carried out, and its events raise."""
        stream.failed = text

    @property
    def used_bytes(self) -> int:
        """Memory that is given out, of all devices and pinned."""
        return sum(memory.used for memory in (*self.memories, self.host))

    def _home(self, tensor: torch.Tensor) -> int | None:
        return 0 if id(tensor) in self._empties else self._index_of(tensor.data_ptr())

    def _index_of(self, address: int) -> int | None:
        for index, memory in enumerate(self.memories):
            if address in memory:
                return index
        return None

    def _new_stream(self, index: int) -> SimStream:
        stream = SimStream(index, len(self.streams))
        self.streams.append(stream)
        return stream


@contextmanager
def simulated(devices: int = 2, *, auto: bool = False, **attributes: Any) -> Iterator[Simulated]:
    """Within this block a simulated CUDA is the accelerator of this process."""
    device = Simulated(devices, auto=auto)
    for name, value in attributes.items():
        setattr(device, name, value)
    with here.standing_in(device):
        yield device
