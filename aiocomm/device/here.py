"""The accelerator that this process has, and whose memory a tensor is.

One place decides it, so that a simulated device can stand in for CUDA. The two questions that are
asked for every message are attributes, read at each call: without a stand-in they are torch's own
attribute getters and cost what those cost.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .cuda import CudaAccelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from .base import Accelerator, Event, Stream

_on_cpu: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cpu")
_device_of: Callable[[torch.Tensor], torch.device] = operator.attrgetter("device")

accelerator: Accelerator = CudaAccelerator()
"""What this process has, used or not; importing or making it touches no device."""
on_cpu = _on_cpu
device_of = _device_of
in_use: Callable[[], bool] = accelerator.in_use


def mark(index: int | None = None) -> Event:
    """An event behind all that this thread has queued in its current stream.

    Args:
        index: of which device; default: the current one.

    Raises:
        DeviceError: the device failed.
    """
    return accelerator.record(stream_here(index))


def stream_here(index: int | None = None) -> Stream:
    """The stream in which this thread queues work now.

    Args:
        index: for which device; default: the current one.
    """
    device = accelerator
    return device.current_stream(device.current() if index is None else index)


@contextmanager
def standing_in(other: Accelerator) -> Iterator[None]:
    """Within this block another accelerator is the one of this process. For tests."""
    global accelerator, on_cpu, device_of, in_use
    before = accelerator, on_cpu, device_of, in_use
    accelerator, in_use = other, other.in_use
    on_cpu, device_of = other.on_cpu, other.device_of
    try:
        yield
    finally:
        accelerator, on_cpu, device_of, in_use = before
