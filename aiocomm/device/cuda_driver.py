"""The calls of the CUDA driver that torch has no way to: memory of other processes, own streams.

Goes by ``ctypes`` to ``libcuda``, which every process that uses CUDA has loaded; nothing is loaded
before the first call. Knows addresses and handles, neither tensors nor streams' Python objects.

Rejected: what torch does for its ``multiprocessing`` (``UntypedStorage._share_cuda_``). It wraps
the storage of the user's tensor once more each time it is sent, makes an event and a slot in a file
for each of them, keeps what was dropped until a counter in that file says so, opens an event for
each message that it never closes, and makes the reader's host wait when it lets go.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import RouteError

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE = 64
"""Bytes of a handle, of memory or of an event."""
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1  # the default stream is not waited for, as by none of torch's


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE),)


_address, _size, _pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_pointer), ctypes.c_int),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_pointer),),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_address), ctypes.POINTER(_size), _address),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_address), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _pointer),
    "cuStreamCreateWithPriority": (ctypes.POINTER(_pointer), ctypes.c_uint, ctypes.c_int),
}


class DriverError(Exception):
    """A call of the driver failed; the text names both."""


class Driver:
    """The driver's calls, with their errors as exceptions. Any thread may use it.

    Args:
        library: ``libcuda``, or what stands for it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        for name, types in _SIGNATURES.items():
            call = getattr(library, name)
            call.argtypes, call.restype = types, ctypes.c_int

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            said = text.value.decode() if text.value else f"error {code}"
            raise DriverError(f"{name} says {said}")

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Make the context that torch uses on a device the current one of this thread.

        A thread in which the runtime has not been used yet has none.

        Raises:
            DriverError: there is none.
        """
        context = self._contexts.get(index)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            # Never released: it is torch's, which keeps it until the process ends.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def range_of(self, address: int) -> tuple[int, int]:
        """Where the allocation begins that an address lies in, and its bytes.

        Raises:
            DriverError: it lies in none.
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """The handle of an allocation: another one for each that ever was at this address.

        Raises:
            DriverError: it is none that another process could open.
        """
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process. Returns where; each opening wants its closing.

        Raises:
            DriverError: it is gone, or this process may not.
        """
        base = ctypes.c_uint64()
        native = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), native, _LAZY_PEER_ACCESS)
        return base.value

    def close(self, base: int) -> None:
        """Undo one ``open``.

        Raises:
            DriverError: nothing is open there.
        """
        self._call("cuIpcCloseMemHandle", base)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy within the device.

        Args:
            target: address.
            source: address.
            nbytes: how many.
            stream: the driver's own handle of it.

        Raises:
            DriverError: it cannot be queued.
        """
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def stream(self, priority: int) -> int:
        """A new stream, by its handle.

        Args:
            priority: the lower, the sooner; 0 is the default.

        Raises:
            DriverError: there is none.
        """
        stream = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, priority)
        assert stream.value is not None
        return stream.value


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        RouteError: there is none, or it is not NVIDIA's.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise RouteError(f"the CUDA driver cannot be called: {error}") from error
