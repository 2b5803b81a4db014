"""Streams of one's own: never one for two, and never one destroyed. The driver is a fake."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiocomm.device.cuda import CudaAccelerator
from aiocomm.device.cuda_driver import DriverError


class Native:
    """A ``torch.cuda.Stream``."""

    def __init__(self, handle: int, index: int) -> None:
        self.cuda_stream, self.device_index = handle, index


class Calls:
    """A ``Driver`` that makes streams."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.index = -1
        self.refuse = False

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        self.index = index
        yield

    def stream(self, priority: int) -> int:
        if self.refuse:
            raise DriverError("cuStreamCreateWithPriority says CUDA_ERROR_OUT_OF_MEMORY")
        self.made.append((self.index, priority))
        return 1000 + len(self.made)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    fake: Any = SimpleNamespace(
        ExternalStream=lambda handle, device: Native(handle, device),
        Stream=lambda index, priority: Native(32 + priority, index),
    )
    monkeypatch.setattr("aiocomm.device.cuda.driver", lambda: found)
    monkeypatch.setattr("aiocomm.device.cuda._cuda", fake)
    return found


def test_however_many_are_held_no_two_are_one(calls: Calls) -> None:
    device = CudaAccelerator()
    streams = [device.stream(number % 2) for number in range(100)]
    assert len({stream.key for stream in streams}) == 100
    assert [stream.index for stream in streams[:2]] == [0, 1]


def test_one_that_nobody_holds_is_handed_out_again(calls: Calls) -> None:
    device = CudaAccelerator()
    first = device.stream(1, high_priority=True)
    key = first.key
    assert device.stream(1).key != key, "its priority is another"
    assert device.stream(0, high_priority=True).key != key, "its device is another"
    del first
    gc.collect()
    again = [device.stream(1, high_priority=True).key for _ in range(3)]
    assert key in again
    assert sorted(set(calls.made)) == [(0, -1), (1, -1), (1, 0)]


def test_where_the_driver_makes_none_it_is_one_of_torchs(calls: Calls) -> None:
    calls.refuse = True
    assert CudaAccelerator().stream(1, high_priority=True).key == (1, 31)
