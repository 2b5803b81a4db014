"""Whose memory a tensor is, by the accelerator of this process or by one that stands in."""

from __future__ import annotations

import subprocess
import sys

import torch

from aiocomm.device import here
from aiocomm.device.cuda import CudaAccelerator

from ..simulated import simulated


def test_it_is_cuda_and_asks_torch_itself() -> None:
    assert isinstance(here.accelerator, CudaAccelerator)
    tensor = torch.zeros(2)
    assert here.on_cpu(tensor)
    assert not here.on_cpu(torch.zeros(2, device="meta"))
    assert here.device_of(tensor) == torch.device("cpu")


def test_another_stands_in_within_its_block() -> None:
    before = here.accelerator
    with simulated() as sim:
        assert here.accelerator is sim
        tensor = sim.tensor(torch.zeros(2), 1)
        assert not here.on_cpu(tensor)
        assert here.device_of(tensor) == torch.device("cuda", 1)
        assert here.on_cpu(torch.zeros(2))
        assert here.in_use()
        event = here.mark(1)
        assert event.stream is sim.default[1]
        assert here.mark().stream is sim.default[0]
        with sim.using(sim.stream(1)) as _:
            assert here.mark().stream is sim.streams[-1]
    assert here.accelerator is before
    assert here.on_cpu(tensor)


def test_nothing_is_initialised_by_importing_it() -> None:
    probe = (
        "import torch, aiocomm\n"
        "from aiocomm.device import here\n"
        "assert not here.in_use() and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
