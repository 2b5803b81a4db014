"""The adapter for CUDA: that it is whole, and what a torch without CUDA can show of it.

What it does on a chip is tested in tests/gpu.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiocomm.device.cuda import CudaAccelerator, CudaEvent, CudaStream
from aiocomm.errors import DeviceError


class Stream:
    """A ``torch.cuda.Stream`` as far as a handle looks at it."""

    device_index, cuda_stream = 1, 77


class Failing:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")

    record = synchronize = lambda *_: Failing().query()


def test_it_has_every_operation() -> None:
    assert not CudaAccelerator.__abstractmethods__
    assert CudaAccelerator().process_group is getattr(torch.distributed, "ProcessGroupNCCL", None)


def test_two_handles_of_one_stream_have_one_key() -> None:
    first, second = CudaStream(Stream()), CudaStream(Stream())
    assert first.key == second.key == (1, 77)
    assert first.index == 1


def test_an_error_of_the_device_is_typed_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            guarded.append(index)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    fake: Any = SimpleNamespace(device=Guard, Event=Failing)
    monkeypatch.setattr("aiocomm.device.cuda._cuda", fake)
    stream = CudaStream(Stream())
    event = CudaEvent(Failing(), stream)
    text = "device cuda:1 failed: CUDA error: an illegal memory access: what was on it"
    for ask in (
        event.query,
        lambda: CudaAccelerator().finish(event),
        lambda: CudaAccelerator().record(stream),
    ):
        with pytest.raises(DeviceError, match=re.escape(text)) as caught:
            ask()
        assert "Compile with" not in str(caught.value)
    assert guarded == [1], "the event's own device is the current one while it is asked"
