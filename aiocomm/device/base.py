"""What aiocomm needs of an accelerator: memory, streams, events, copies; nothing of CUDA itself.

Everything that touches device memory goes through here, so that it runs on a simulated device in
tests, where an operation ends when the test says so. Nothing here ever blocks the calling thread,
except ``finish``. Knows neither messages nor event loops.

Memory is seen as in the rest of the package: 1-D uint8 tensors. Rejected: plain functions of
``torch.cuda`` behind an ``if`` (nothing of the path could be tested without a chip), and the
generic ``torch.accelerator`` (neither pinned memory nor identities, and not in torch 2.5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from contextlib import AbstractContextManager

    import torch


class Stream(Protocol):
    """A line of operations that the device carries out in order.

    Attributes:
        index: the device that it belongs to.
        key: equal for two handles of one stream.
    """

    @property
    def index(self) -> int: ...

    @property
    def key(self) -> Hashable: ...


class Event(Protocol):
    """A place in a stream.

    Attributes:
        stream: the stream it was recorded in.
    """

    @property
    def stream(self) -> Stream: ...

    def query(self) -> bool:
        """Whether the stream has come past it. Any thread may ask, whatever its current device.

        Raises:
            DeviceError: the device failed.
        """


class SharedEvent(Protocol):
    """An event that other processes on the same chip may wait for; recorded again and again.

    Attributes:
        handle: with which another process opens it.
    """

    handle: bytes

    def record(self, stream: Stream) -> Event:
        """Move it behind all that is queued in the stream now, one of its own device.

        Who began to wait before waits for the place of that time. The result may be queried until
        the next call, and says "done" too late after it, never too early.

        Raises:
            DeviceError: the device failed.
        """


class Mapping(Protocol):
    """An allocation of another process, as this one sees it.

    Attributes:
        nbytes: how large it is.
    """

    nbytes: int

    def close(self) -> None:
        """Unmap it. Blocks for a moment; from any thread. Nothing that is queued may read it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which chip it is: the same two texts in every process that uses it."""

    uuid: str
    model: str


class Accelerator(ABC):
    """One kind of device, all of its chips.

    Indices are those of this process, as in ``cuda:1``. A stream or event of one accelerator is
    given to no other.
    """

    kind: str = "cuda"
    process_group: Any = None
    """torch's ``ProcessGroupNCCL`` or what stands for it; None where this torch has none."""

    # --- whose memory is it ---

    @abstractmethod
    def on_cpu(self, tensor: torch.Tensor) -> bool:
        """Whether this process may read the memory of the tensor."""

    @abstractmethod
    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where the memory of the tensor is."""

    @abstractmethod
    def empty(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of no element on the current device."""

    # --- chips ---

    @abstractmethod
    def in_use(self) -> bool:
        """Whether this process has ever used it; never the first use itself."""

    @abstractmethod
    def current(self) -> int:
        """The current device of this thread."""

    @abstractmethod
    def count(self) -> int:
        """How many devices there are."""

    @abstractmethod
    def identity(self, index: int) -> Identity:
        """Which chip a device is."""

    # --- streams and events ---

    @abstractmethod
    def stream(self, index: int, *, high_priority: bool = False) -> Stream:
        """A stream of one's own."""

    @abstractmethod
    def current_stream(self, index: int) -> Stream:
        """The stream in which this thread queues work for the device."""

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Make it the current stream of this thread, and its device the current one."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event after all that is queued in the stream now.

        Raises:
            DeviceError: the device failed.
        """

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued in the stream from here on begins after the event."""

    @abstractmethod
    def finish(self, event: Event) -> None:
        """Block until the event is done. For what takes some ms at most.

        Raises:
            DeviceError: the device failed.
        """

    # --- memory ---

    @abstractmethod
    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """Memory that may be used in this stream at once; not initialised.

        Given to anybody who uses it in another stream, it needs ``lend``.

        Raises:
            RuntimeError: there is not that much (torch's own error).
        """

    @abstractmethod
    def zeros(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """The same, set to zero in this stream."""

    @abstractmethod
    def lend(self, memory: torch.Tensor, stream: Stream) -> None:
        """The stream uses this memory too: it is not given out again before that has ended."""

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device reaches by itself; not initialised.

        Raises:
            RuntimeError: there is not that much (torch's own error).
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy: between devices, or between a device and pinned memory.

        Both must be held until an event that is recorded after it is done.
        """

    @abstractmethod
    def join(self, pieces: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Queue a copy of the pieces, one after the other, into memory as of ``allocate``."""

    # --- memory and events of another process on the same chip ---

    @abstractmethod
    def export(self, memory: torch.Tensor) -> tuple[bytes, int]:
        """With which another process opens the allocation of this memory, and where in it this is.

        Raises:
            RouteError: no other process can open it; the text has the reason.
        """

    @abstractmethod
    def open_memory(self, handle: bytes, index: int) -> Mapping:
        """Map an allocation that another process has exported. Blocks for a moment; any thread.

        Args:
            handle: from ``export``.
            index: the device, as this process counts.

        Raises:
            RouteError: it cannot be mapped, or is there no more; the text has the reason.
        """

    @abstractmethod
    def copy_in(self, target: torch.Tensor, source: Mapping, offset: int, stream: Stream) -> None:
        """Queue a copy from what another process has exported; both are held as for ``copy``.

        Raises:
            DeviceError: the device failed.
        """

    @abstractmethod
    def shared_event(self, index: int) -> SharedEvent:
        """A new event that other processes may wait for, of a device.

        Raises:
            RouteError: there can be none; the text has the reason.
        """

    @abstractmethod
    def open_event(self, handle: bytes, stream: Stream) -> Event:
        """The event of another process, for streams of this one to ``wait`` for.

        Args:
            handle: of the shared event.
            stream: of the same device; where an error of the event is reported.

        Raises:
            RouteError: it cannot be opened; the text has the reason.
        """
