"""The adapter for CUDA: that it is whole, and what a torch without CUDA can show of it.

What it does on a chip is tested in tests/gpu.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from aiocomm.device.cuda import CudaAccelerator, CudaEvent, CudaStream
from aiocomm.device.cuda_driver import DriverError
from aiocomm.errors import DeviceError, RouteError


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


# --- what other processes see: the driver is a fake here, the real one is asked in tests/gpu ---


class Calls:
    """A ``Driver`` that remembers."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []
        self.refuse = ""

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        self.done.append(("on", index))
        yield

    def _did(self, name: str, *args: object) -> None:
        if name == self.refuse:
            raise DriverError(f"{name} says CUDA_ERROR_INVALID_VALUE")
        self.done.append((name, *args))

    def range_of(self, address: int) -> tuple[int, int]:
        self._did("range_of", address)
        return 1000, 500

    def export(self, base: int) -> bytes:
        self._did("export", base)
        return b"handle"

    def open(self, handle: bytes) -> int:
        self._did("open", handle)
        return 7000

    def close(self, base: int) -> None:
        self._did("close", base)

    def copy(self, *args: int) -> None:
        self._did("copy", *args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr("aiocomm.device.cuda.driver", lambda: found)
    return found


class Memory:
    """A tensor on a device, as far as the adapter looks at it."""

    nbytes = 40
    device = torch.device("cuda", 1)

    def data_ptr(self) -> int:
        return 1200


MEMORY: Any = Memory()


def test_memory_is_exported_by_its_allocation(calls: Calls) -> None:
    assert CudaAccelerator().export(MEMORY) == (b"handle", 200)
    assert calls.done == [("on", 1), ("range_of", 1200), ("export", 1000)]


@pytest.mark.parametrize("refuse", ["range_of", "export"])
def test_memory_that_cannot_be_exported_says_what_to_look_at(calls: Calls, refuse: str) -> None:
    calls.refuse = refuse
    with pytest.raises(RouteError, match=rf"of cuda:1 cannot be shared.*{refuse} says CUDA_ERROR"):
        CudaAccelerator().export(MEMORY)


def test_memory_of_the_peer_is_mapped_copied_from_and_unmapped(calls: Calls) -> None:
    mapping = CudaAccelerator().open_memory(b"theirs", 1)
    assert mapping.nbytes == 500
    CudaAccelerator().copy_in(MEMORY, mapping, 8, CudaStream(Stream()))
    mapping.close()
    assert [each for each in calls.done if each[0] != "on"] == [
        ("open", b"theirs"),
        ("range_of", 7000),
        ("copy", 1200, 7008, 40, 77),
        ("close", 7000),
    ]
    calls.refuse = "close"
    mapping.close()  # of a device that failed
    calls.refuse = "copy"
    with pytest.raises(DeviceError, match="device cuda:1 failed: copy says CUDA_ERROR"):
        CudaAccelerator().copy_in(MEMORY, mapping, 8, CudaStream(Stream()))
    calls.refuse = "open"
    with pytest.raises(RouteError, match="cannot be mapped here: open says CUDA_ERROR"):
        CudaAccelerator().open_memory(b"theirs", 1)


class Shared:
    """A ``torch.cuda.Event``, between processes."""

    opened: ClassVar[list[object]] = []
    fail = False

    def __init__(self, *, interprocess: bool = False) -> None:
        if self.fail:
            raise RuntimeError("invalid argument\nand more")
        assert interprocess
        self.recorded: list[object] = []

    def ipc_handle(self) -> bytes:
        return b"event"

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Shared:
        if cls.fail:
            raise RuntimeError("invalid argument\nand more")
        cls.opened.append((device, handle))
        return cls(interprocess=True)


def test_events_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = SimpleNamespace(device=lambda _: nullcontext(), Event=Shared)
    monkeypatch.setattr("aiocomm.device.cuda._cuda", fake)
    native = Stream()
    stream = CudaStream(native)
    event = CudaAccelerator().shared_event(1)
    assert event.handle == b"event"
    recorded = event.record(stream)
    assert recorded.stream is stream
    assert recorded.native.recorded == [native]
    opened = CudaAccelerator().open_event(b"theirs", stream)
    assert opened.stream is stream
    assert Shared.opened == [(torch.device("cuda", 1), b"theirs")]
    monkeypatch.setattr(Shared, "record", Failing.record)
    with pytest.raises(DeviceError, match="illegal memory access"):
        event.record(stream)
    monkeypatch.setattr(Shared, "fail", True)
    with pytest.raises(RouteError, match=r"can be shared between processes: invalid argument$"):
        CudaAccelerator().shared_event(1)
    with pytest.raises(RouteError, match=r"of the peer cannot be opened: invalid argument$"):
        CudaAccelerator().open_event(b"theirs", stream)
