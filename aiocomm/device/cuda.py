"""CUDA by ``torch.cuda``: the only file that knows of it.

Importing it, and making the adapter, initialises nothing. Errors of CUDA become ``DeviceError``
where they are asked for; those of allocation stay torch's own. Not run on a chip yet.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import DeviceError, RouteError
from .base import Accelerator, Event, Identity, Mapping, Stream
from .cuda_driver import DriverError, driver
from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

_UINT8 = torch.uint8
_cuda: Any = torch.cuda  # half of it is not typed


class CudaStream:
    """A ``torch.cuda.Stream``."""

    __slots__ = ("__weakref__", "index", "key", "native")

    def __init__(self, native: Any) -> None:
        self.native = native
        self.index: int = native.device_index
        self.key = (self.index, native.cuda_stream)


class CudaEvent:
    """A ``torch.cuda.Event`` that was recorded."""

    __slots__ = ("native", "stream")

    def __init__(self, native: Any, stream: CudaStream) -> None:
        self.native = native
        self.stream = stream

    def query(self) -> bool:
        """See ``Event``."""
        try:
            with _cuda.device(self.stream.index):
                return bool(self.native.query())
        except RuntimeError as error:
            raise _failed(self.stream.index, error) from error


class CudaSharedEvent:
    """A ``torch.cuda.Event`` that other processes can open."""

    __slots__ = ("_native", "handle")

    def __init__(self, native: Any) -> None:
        self._native = native
        self.handle: bytes = native.ipc_handle()

    def record(self, stream: Stream) -> CudaEvent:
        """See ``SharedEvent``."""
        assert isinstance(stream, CudaStream)
        try:
            self._native.record(stream.native)
        except RuntimeError as error:
            raise _failed(stream.index, error) from error
        return CudaEvent(self._native, stream)


class CudaMapping:
    """An allocation of another process, mapped by the driver."""

    __slots__ = ("_index", "address", "nbytes")

    def __init__(self, index: int, address: int, nbytes: int) -> None:
        self._index = index
        self.address = address
        self.nbytes = nbytes

    def close(self) -> None:
        """See ``Mapping``."""
        # Of a device that failed nothing is mapped.
        with contextlib.suppress(DriverError), driver().on(self._index):
            driver().close(self.address)


class CudaAccelerator(Accelerator):
    """All CUDA devices that this process sees."""

    process_group = getattr(dist, "ProcessGroupNCCL", None)

    def __init__(self) -> None:
        self._streams: Streams[Any] = Streams(_new_stream)

    def on_cpu(self, tensor: torch.Tensor) -> bool:
        """See ``Accelerator``."""
        return tensor.is_cpu

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """See ``Accelerator``."""
        return tensor.device

    def empty(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """See ``Accelerator``."""
        return torch.empty(0, dtype=_UINT8, device=self.kind).view(dtype).view(shape)

    in_use = staticmethod(_cuda.is_initialized)  # asked for at every function of ``then``

    def current(self) -> int:
        """See ``Accelerator``."""
        return torch.cuda.current_device()

    def count(self) -> int:
        """See ``Accelerator``."""
        return torch.cuda.device_count()

    def identity(self, index: int) -> Identity:
        """See ``Accelerator``."""
        properties = torch.cuda.get_device_properties(index)
        return Identity(str(properties.uuid), properties.name)

    def stream(self, index: int, *, high_priority: bool = False) -> CudaStream:
        """See ``Accelerator``."""
        priority = -1 if high_priority else 0
        stream = CudaStream(self._streams.take(index, priority))
        self._streams.lend(stream, stream.native, index, priority)
        return stream

    def current_stream(self, index: int) -> CudaStream:
        """See ``Accelerator``."""
        return CudaStream(_cuda.current_stream(index))

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """See ``Accelerator``."""
        return torch.cuda.stream(_native(stream))

    def record(self, stream: Stream) -> CudaEvent:
        """See ``Accelerator``."""
        assert isinstance(stream, CudaStream)
        native = _cuda.Event()
        try:
            native.record(stream.native)
        except RuntimeError as error:
            raise _failed(stream.index, error) from error
        return CudaEvent(native, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """See ``Accelerator``."""
        assert isinstance(event, CudaEvent)
        _native(stream).wait_event(event.native)

    def finish(self, event: Event) -> None:
        """See ``Accelerator``."""
        assert isinstance(event, CudaEvent)
        try:
            event.native.synchronize()
        except RuntimeError as error:
            raise _failed(event.stream.index, error) from error

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """See ``Accelerator``."""
        with torch.cuda.stream(_native(stream)):
            return torch.empty(nbytes, dtype=_UINT8, device=stream.index)

    def zeros(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """See ``Accelerator``."""
        with torch.cuda.stream(_native(stream)):
            return torch.zeros(nbytes, dtype=_UINT8, device=stream.index)

    def lend(self, memory: torch.Tensor, stream: Stream) -> None:
        """See ``Accelerator``."""
        memory.record_stream(_native(stream))

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See ``Accelerator``."""
        return torch.empty(nbytes, dtype=_UINT8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """See ``Accelerator``."""
        with torch.cuda.stream(_native(stream)):
            target.copy_(source, non_blocking=True)

    def join(self, pieces: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """See ``Accelerator``."""
        with torch.cuda.stream(_native(stream)):
            return torch.cat(list(pieces))  # one kernel for many

    def export(self, memory: torch.Tensor) -> tuple[bytes, int]:
        """See ``Accelerator``."""
        address, calls = memory.data_ptr(), driver()
        try:
            with calls.on(memory.device.index):
                base, _ = calls.range_of(address)
                return calls.export(base), address - base
        except DriverError as error:
            raise RouteError(
                f"memory of {memory.device} cannot be shared between processes: {error}: it comes "
                "from expandable segments or from an allocator other than torch's own, as set by "
                "PYTORCH_CUDA_ALLOC_CONF"
            ) from error

    def open_memory(self, handle: bytes, index: int) -> CudaMapping:
        """See ``Accelerator``."""
        calls = driver()
        try:
            with calls.on(index):
                base = calls.open(handle)
                return CudaMapping(index, base, calls.range_of(base)[1])
        except DriverError as error:
            raise RouteError(f"memory of the peer cannot be mapped here: {error}") from error

    def copy_in(self, target: torch.Tensor, source: Mapping, offset: int, stream: Stream) -> None:
        """See ``Accelerator``."""
        assert isinstance(source, CudaMapping)
        address, native = source.address + offset, _native(stream).cuda_stream
        try:
            with driver().on(stream.index):
                driver().copy(target.data_ptr(), address, target.nbytes, native)
        except DriverError as error:
            raise _failed(stream.index, error) from error

    def shared_event(self, index: int) -> CudaSharedEvent:
        """See ``Accelerator``."""
        try:
            with _cuda.device(index):
                return CudaSharedEvent(_cuda.Event(interprocess=True))
        except RuntimeError as error:
            raise RouteError(f"no event can be shared between processes: {_text(error)}") from error

    def open_event(self, handle: bytes, stream: Stream) -> CudaEvent:
        """See ``Accelerator``."""
        assert isinstance(stream, CudaStream)
        try:
            native = _cuda.Event.from_ipc_handle(torch.device(self.kind, stream.index), handle)
        except RuntimeError as error:
            raise RouteError(f"an event of the peer cannot be opened: {_text(error)}") from error
        return CudaEvent(native, stream)


def _new_stream(index: int, priority: int) -> Any:
    # Not one of torch's, which deals 32 of a device round, to everybody: two transfers in one
    # stream, each waiting for its peer, may wait for each other through the peers for ever.
    try:
        with driver().on(index):
            handle = driver().stream(priority)
    except (RouteError, DriverError):  # not NVIDIA's, or it makes no more
        return _cuda.Stream(index, priority=priority)
    return _cuda.ExternalStream(handle, device=index)


def _native(stream: Stream) -> Any:
    assert isinstance(stream, CudaStream)
    return stream.native


def _text(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _failed(index: int, error: Exception) -> DeviceError:
    return DeviceError(
        f"device cuda:{index} failed: {_text(error)}: what was on it cannot be trusted; start this "
        "process again, and find the cause with CUDA_LAUNCH_BLOCKING=1"
    )
