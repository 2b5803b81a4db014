"""CUDA by ``torch.cuda``: the only file that knows of it.

Importing it, and making the adapter, initialises nothing. Errors of CUDA become ``DeviceError``
where they are asked for; those of allocation stay torch's own. Not run on a chip yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import DeviceError
from .base import Accelerator, Event, Identity, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

_UINT8 = torch.uint8
_cuda: Any = torch.cuda  # half of it is not typed


class CudaStream:
    """A ``torch.cuda.Stream``."""

    __slots__ = ("index", "key", "native")

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


class CudaAccelerator(Accelerator):
    """All CUDA devices that this process sees."""

    process_group = getattr(dist, "ProcessGroupNCCL", None)

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
        return CudaStream(_cuda.Stream(index, priority=-1 if high_priority else 0))

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


def _native(stream: Stream) -> Any:
    assert isinstance(stream, CudaStream)
    return stream.native


def _failed(index: int, error: RuntimeError) -> DeviceError:
    text = str(error).strip().partition("\n")[0]
    return DeviceError(
        f"device cuda:{index} failed: {text}: what was on it cannot be trusted; start this process "
        "again, and find the cause with CUDA_LAUNCH_BLOCKING=1"
    )
