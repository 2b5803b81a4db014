"""The default backend, where it is missing, and the device on which a call runs."""

from __future__ import annotations

import sys
import threading
import types

import pytest

from aiocomm.errors import MissingPackageError
from aiocomm.rendezvous.ray_nccl_backend import default_backend, destroy, on_device


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingPackageError, match=r"pip install cupy.*backend"):
        default_backend()


def test_a_machine_without_a_device_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def get_device() -> int:
        raise CUDARuntimeError("cudaErrorNoDevice")

    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDevice=get_device)
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert on_device(threading.get_ident)() == threading.get_ident()


@pytest.mark.gpu
def test_a_thread_works_on_the_device_of_its_caller() -> None:
    import torch

    last = torch.cuda.device_count() - 1
    torch.cuda.init()
    seen: list[int] = []
    with torch.cuda.device(last):
        call = on_device(lambda: seen.append(torch.cuda.current_device()))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [last]


def test_what_cannot_be_destroyed_is_left_alone() -> None:
    destroy(object())
    destroy(None)
