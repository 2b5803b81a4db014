"""Which tensors lie in shared memory, while they live."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from aiocomm.errors import RouteError
from aiocomm.transport.shm.segment import Segment
from aiocomm.transport.shm.shared import Registry


def tensor_in(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def test_tensors_and_slices_are_found_with_their_place() -> None:
    registry = Registry()
    assert registry.find(4096, 1) is None
    tensors = [tensor_in(registry.make(8192, aliased=aliased)) for aliased in (False, True)]
    for tensor, aliased in zip(tensors, (False, True), strict=True):
        found = registry.find(tensor[100:].data_ptr(), 8092)
        assert found is not None
        assert found[1] == 100
        assert found[0].aliased is aliased
    assert registry.find(tensors[0].data_ptr() + 1, 8192) is None  # reaches past the end
    outside = torch.zeros(8)
    assert registry.find(outside.data_ptr(), 8) is None
    assert registry.find(1, 1) is None


def test_it_goes_with_its_last_tensor_and_tells_the_watchers() -> None:
    registry, told = Registry(), []
    whole = tensor_in(registry.make(4096, aliased=False))
    found = registry.find(whole.data_ptr(), 1)
    assert found is not None
    found[0].watchers += [lambda: told.append(1), lambda: told.append(2)]
    address = whole.data_ptr()
    part = whole[5:]
    del whole
    gc.collect()
    assert registry.find(address, 1) is not None
    assert told == []
    dropping = threading.Thread(target=lambda tensors: tensors.clear(), args=([part],))
    del part
    dropping.start()
    dropping.join()
    del dropping
    gc.collect()
    assert told == [1, 2]
    assert registry.find(address, 1) is None


def test_without_memory_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(nbytes: int) -> Segment:
        raise RouteError("none left")

    registry = Registry()
    monkeypatch.setattr(Segment, "create", create)
    with pytest.raises(RouteError, match="none left"):
        registry.make(10, aliased=False)
    assert registry.find(0, 1) is None
