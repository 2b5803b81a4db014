"""The calls of the driver: what they are given, and what becomes of their errors.

The library is a fake; the real one is tested in tests/gpu.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from aiocomm.device import cuda_driver
from aiocomm.device.cuda_driver import HANDLE, Driver, DriverError, driver
from aiocomm.errors import RouteError

BASE, SIZE = 0x7F0000000000, 1 << 21


class Call:
    """A function of the library."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, library: Library, name: str) -> None:
        self._library = library
        self._name = name

    def __call__(self, *args: Any) -> int:
        # As ctypes would: what does not fit the declared types is an error here too.
        for value, kind in zip(args, self.argtypes, strict=True):
            kind.from_param(value)
        self._library.calls.append(self._name)
        assert self.restype is ctypes.c_int
        code = self._library.codes.get(self._name, 0)
        if not code:
            getattr(self, self._name, lambda *_: None)(*args)
        return code

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        base._obj.value, size._obj.value = BASE, SIZE

    def cuIpcGetMemHandle(self, handle: Any, base: int) -> None:
        ctypes.memset(ctypes.addressof(handle._obj), base & 0xFF or 7, HANDLE)

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: int) -> None:
        assert flags == 1
        base._obj.value = BASE + bytes(handle)[0]

    def cuCtxPushCurrent_v2(self, context: Any) -> None:
        self._library.current.append(threading.get_ident())

    def cuCtxPopCurrent_v2(self, context: Any) -> None:
        assert self._library.current.pop() == threading.get_ident()

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> None:
        assert (flags, priority) == (1, -1)
        stream._obj.value = 0x5000

    def cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = self._library.name


class Library:
    """A libcuda."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}
        self.current: list[int] = []
        self.name: bytes | None = b"CUDA_ERROR_INVALID_VALUE"

    def __getattr__(self, name: str) -> Call:
        call = Call(self, name)
        setattr(self, name, call)
        return call


@pytest.fixture
def library() -> Library:
    return Library()


def test_each_call_says_what_it_should(library: Library) -> None:
    calls = Driver(library)
    with calls.on(1):
        assert calls.range_of(BASE + 5) == (BASE, SIZE)
        handle = calls.export(BASE)
        assert handle == b"\x07" * HANDLE
        base = calls.open(handle)
        assert base == BASE + 7
        calls.copy(1, 2, 3, 4)
        calls.close(base)
        assert calls.stream(-1) == 0x5000
    with calls.on(1):
        pass
    assert library.calls == [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemGetAddressRange_v2",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuIpcCloseMemHandle",
        "cuStreamCreateWithPriority",
        "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
    ], "the context is looked up once"


def test_an_error_names_the_call_and_the_code(library: Library) -> None:
    calls = Driver(library)
    library.codes["cuIpcGetMemHandle"] = 1
    with (
        pytest.raises(DriverError, match="cuIpcGetMemHandle says CUDA_ERROR_INVALID_VALUE"),
        calls.on(0),
    ):
        calls.export(BASE)
    assert library.current == [], "the context is put back"
    library.name = None
    with pytest.raises(DriverError, match="cuIpcGetMemHandle says error 1"):
        calls.export(BASE)


def test_a_thread_that_never_used_the_device_has_its_context(library: Library) -> None:
    # F48: a handle used in a thread whose current device is another one, or none.
    calls = Driver(library)
    seen: list[list[int]] = []

    def work() -> None:
        with calls.on(1):
            seen.append(list(library.current))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[thread.ident]]


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    driver.cache_clear()
    with pytest.raises(RouteError, match=r"cannot be called: libcuda.so.1: cannot open"):
        driver()


def test_the_driver_is_loaded_once(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _: library)
    driver.cache_clear()
    assert driver() is driver()
    driver.cache_clear()
