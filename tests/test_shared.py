"""Tensors and modules in shared memory are like any other, and travel without a copy."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from aiocomm import empty_shared, share_
from aiocomm.errors import RouteError, UsageError
from aiocomm.transport.shm.segment import Segment
from aiocomm.transport.shm.shared import REGISTRY

from .pairs import each_route, pair

MIB = 1 << 20


def is_shared(tensor: torch.Tensor) -> bool:
    return REGISTRY.find(tensor.data_ptr(), tensor.nbytes) is not None


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        (5, torch.uint8, (5,)),
        ((3, 4), torch.bfloat16, (3, 4)),
        ([2, 3, 4], None, (2, 3, 4)),
        ((), torch.complex64, ()),
        (torch.Size([7]), torch.bool, (7,)),
    ],
)
def test_it_is_a_tensor_of_zeros(shape, dtype, expected) -> None:
    tensor = empty_shared(shape, dtype)
    assert tensor.shape == expected
    assert tensor.dtype == (dtype or torch.get_default_dtype())
    assert not tensor.any()
    assert tensor.is_contiguous()
    assert is_shared(tensor)
    tensor.fill_(1)
    assert tensor.sum().to(torch.complex64) == tensor.numel()
    assert tensor.requires_grad_(tensor.is_floating_point()) is tensor


def test_an_empty_one_takes_no_memory() -> None:
    assert empty_shared((0, 3)).shape == (0, 3)


@pytest.mark.parametrize("shape", [-1, (2, -3), 2.5, (2.5, 2), "ab", None])
def test_what_is_no_shape_is_refused(shape) -> None:
    with pytest.raises(UsageError, match="cannot have the shape"):
        empty_shared(shape)


@pytest.mark.parametrize("dtype", [4, "float", torch.qint8, torch.quint4x2])
def test_what_is_no_dtype_that_can_be_sent_is_refused(dtype) -> None:
    with pytest.raises(UsageError, match="the shape as one tuple"):
        empty_shared((4, 4), dtype)


@pytest.mark.parametrize("module", [torch.ones(3), {"w": torch.ones(3)}, None])
def test_what_is_no_module_is_refused(module) -> None:
    with pytest.raises(UsageError, match="share_ takes a module, not"):
        share_(module)


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(UsageError, match="run the module first"):
        share_(torch.nn.LazyLinear(3))


def test_nothing_is_left_of_it() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    tensors = [empty_shared(100) for _ in range(10)]
    del tensors
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_without_shared_memory_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(nbytes: int) -> Segment:
        raise RouteError("no shared memory here")

    monkeypatch.setattr(Segment, "create", create)
    with pytest.raises(RouteError, match="no shared memory here"):
        empty_shared(3)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(RouteError):
        share_(module)
    assert not is_shared(module.weight)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(8)
        whole = torch.arange(6.0)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[2:4])
        self.register_buffer("none", torch.empty(0))


def test_a_module_moves_in_place_and_stays_as_it_was() -> None:
    module: Any = Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = list(module.parameters())
    assert share_(module) is module
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    for name, value in module.state_dict().items():
        assert value.equal(before[name]), name
        assert is_shared(value) or not value.numel()
    assert module.second.weight is module.first.weight
    module.whole[2] = 77
    assert module.part[0] == 77
    module.second(module.norm(module.first(torch.randn(4, 8)))).sum().backward()
    with torch.no_grad():
        for parameter in parameters:  # as an optimizer made before does
            parameter.sub_(0.1 * parameter.grad)
    assert not module.first.weight.equal(before["first.weight"])
    assert is_shared(module.first.weight)
    found = [REGISTRY.find(p.data_ptr(), p.nbytes) for p in module.parameters()]
    assert len({id(each[0]) for each in found if each is not None}) == 1


def test_a_module_elsewhere_is_refused_and_left_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match="on meta"):
        share_(module)
    assert not is_shared(module[0].weight)


def test_a_module_without_parameters_is_fine() -> None:
    module = torch.nn.ReLU()
    assert share_(module) is module


@each_route
@pytest.mark.asyncio
async def test_they_are_sent_like_any_other_on_every_route(route: str) -> None:
    async with pair(route, shm_bytes=16 * MIB) as (a, b):
        weights = {"w": empty_shared((512, 1024)).fill_(3), "b": torch.ones(5), "step": 4}
        send = a.send(weights)
        got = await b.recv()
        await send
        weights["w"].fill_(4)  # the sender's again
        if route != "memory":
            assert (got["w"] == 3).all()
        assert (got["b"] == 1).all()
        assert got["step"] == 4
        buffer = torch.empty(512, 1024)
        await asyncio.gather(a.send_tensor(weights["w"]), b.recv_tensor(buffer))
        assert (buffer == 4).all()


@pytest.mark.asyncio
async def test_aliased_tensors_are_one_memory_at_both_ends() -> None:
    async with pair("shm", shm_bytes=16 * MIB) as (a, b):
        weights = empty_shared((512, 1024), aliased=True)
        for _ in range(2):
            send = a.send([weights, torch.ones(3)])
            got = await b.recv()
            await send
            weights[0, 0] = 5
            assert got[0][0, 0] == 5
            got[0][0, 0] = 0
            assert weights[0, 0] == 0
        del weights, got
