"""The default backend, where it is missing, and the device on which a call runs."""

from __future__ import annotations

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiocomm.device import here
from aiocomm.errors import MissingPackageError
from aiocomm.rendezvous.ray_nccl_backend import default_backend, destroy, on_device

from ..simulated import Simulated


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


def test_a_thread_works_on_the_device_of_its_caller() -> None:  # F48
    device = Simulated(3)
    with here.standing_in(device):
        with device.using(device.stream(2)):
            call = on_device(device.current)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(device.current).result() == 0
            assert pool.submit(call).result() == 2


def test_what_cannot_be_destroyed_is_left_alone() -> None:
    destroy(object())
    destroy(None)
