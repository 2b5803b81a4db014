"""Leases end with the last tensor, wherever that dies, and are bounded."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch

from aiocomm.transport.shm.leases import Leases

pytestmark = pytest.mark.asyncio


def leases(limit: int = 100) -> tuple[Leases, list[int]]:
    ended: list[int] = []
    made = Leases(asyncio.get_running_loop(), lambda *numbers: ended.extend(numbers))
    made.limit = limit
    return made, ended


def tensor_of(made: Leases, number: int, nbytes: int = 10) -> torch.Tensor | None:
    view = memoryview(bytearray(nbytes))
    if not made.begin(view, number):
        return None
    return torch.frombuffer(view, dtype=torch.uint8)


async def test_a_lease_ends_with_the_last_tensor_over_it() -> None:
    made, ended = leases()
    whole = tensor_of(made, 7)
    assert whole is not None
    part = whole[3:]
    del whole
    gc.collect()
    await asyncio.sleep(0)
    assert (ended, made.nbytes) == ([], 10)
    del part
    gc.collect()
    await asyncio.sleep(0)
    assert (ended, made.nbytes) == ([7], 0)


async def test_no_more_than_the_limit_is_kept() -> None:
    made, ended = leases(25)
    kept = [tensor_of(made, 0), tensor_of(made, 1)]
    assert tensor_of(made, 2) is None
    kept.pop(0)
    gc.collect()
    await asyncio.sleep(0)
    assert ended == [0]
    assert tensor_of(made, 3) is not None


async def test_tensors_may_die_in_any_thread_and_are_told_of_together() -> None:
    made, ended = leases(10_000)
    kept = [tensor_of(made, number) for number in range(100)]
    dropping = threading.Thread(target=kept.clear)
    dropping.start()
    dropping.join()
    assert ended == []
    await asyncio.sleep(0)
    assert sorted(ended) == list(range(100))
    assert made.nbytes == 0


async def test_a_tensor_that_outlives_the_loop_is_quiet() -> None:
    loop = asyncio.new_event_loop()
    made = Leases(loop, lambda *numbers: None)
    made.limit = 100
    tensor = tensor_of(made, 0)
    loop.close()
    del tensor
    gc.collect()
