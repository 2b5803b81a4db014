"""What makes NCCL communicators, and the device it makes them on.

cupy is imported only where nobody gives a backend of their own. It may not know Ray, ids or ranks.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

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
    setters: list[Callable[[], object]] = []
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        device = cuda.current_device()
        setters.append(lambda: cuda.set_device(device))
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        runtime = cupy.cuda.runtime
        with contextlib.suppress(runtime.CUDARuntimeError):  # no device at all
            number = runtime.getDevice()
            setters.append(lambda: runtime.setDevice(number))

    def run() -> T:
        for set_device in setters:
            set_device()
        return call()

    return run


def destroy(communicator: Any) -> None:
    """End a communicator that nobody gets, if the backend can."""
    end = getattr(communicator, "destroy", None)
    if end is not None:
        end()
