"""What makes NCCL communicators, and the device it makes them on.

cupy is imported only where nobody gives a backend of their own. It may not know Ray, ids or ranks.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..device import here
from ..errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Backend(Protocol):
    """What makes communicators; the module ``cupy.cuda.nccl`` is one."""

    def get_unique_id(self) -> Any:
        """A new id, which can be pickled."""

    def NcclCommunicator(self, *, ndev: int, commId: Any, rank: int) -> Any:
        """The communicator of one rank; blocks until all ranks are there."""


def default_backend() -> Backend:
    """``cupy.cuda.nccl``, imported now.

    Raises:
        MissingPackageError: cupy is not installed.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingPackageError(
            "NCCL communicators are made by cupy, which is not installed: pip install "
            "cupy-cuda12x (or the one for your CUDA), or give a backend"
        ) from error
    backend: Backend = nccl
    return backend


def on_device(call: Callable[[], T]) -> Callable[[], T]:
    """The call, on the CUDA device that is current now; another thread would begin with 0 (F48)."""
    accelerator = here.accelerator
    stream = accelerator.current_stream(accelerator.current()) if accelerator.in_use() else None
    set_device = _cupy_device()

    def run() -> T:
        set_device()
        with contextlib.nullcontext() if stream is None else accelerator.using(stream):
            return call()

    return run


def _cupy_device() -> Callable[[], object]:
    """What makes cupy's current device current in another thread."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return lambda: None
    runtime = cupy.cuda.runtime
    try:
        number = runtime.getDevice()
    except runtime.CUDARuntimeError:  # there is no device at all
        return lambda: None
    return lambda: runtime.setDevice(number)


def destroy(communicator: Any) -> None:
    """End a communicator that nobody gets, if the backend can."""
    end = getattr(communicator, "destroy", None)
    if end is not None:
        end()
