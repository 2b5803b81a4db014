"""Works of torch.distributed as handles: real Gloo in real processes, and the order of ends."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aiocomm.errors import UsageError
from aiocomm.handles import AsyncCollWork

from .. import loops
from ..processes import Stage, run_workers
from ..transport.test_completion import NativeWork, gloo, in_thread


async def collectives(stage: Stage, path: str) -> list[Any]:
    group = await asyncio.to_thread(gloo, stage, path)
    one = torch.full((4,), float(stage.rank + 1))
    two, three = (torch.full((2,), float(stage.rank)) for _ in range(2))
    first = AsyncCollWork(group.allreduce([one]), one)
    both = AsyncCollWork([group.broadcast(two, 0), group.broadcast(three, 1)], (two, three))
    total = first.then(lambda tensor: tensor.sum().item())
    pair = both.then(lambda tensors: [tensor[0].item() for tensor in tensors])
    waited = await asyncio.to_thread(AsyncCollWork(group.barrier(), "barrier").wait)
    return [await total, await pair, waited]


async def default_group(stage: Stage, path: str) -> list[float]:
    """A user's own all_reduce."""
    await asyncio.to_thread(
        dist.init_process_group,
        "gloo",
        init_method=f"file://{path}",
        rank=stage.rank,
        world_size=stage.count,
    )
    tensor = torch.ones(3)
    work = AsyncCollWork(dist.all_reduce(tensor, async_op=True), tensor)
    doubled = (await work.then(torch.mul, 2)).tolist()
    await asyncio.to_thread(dist.destroy_process_group)
    return doubled


def test_gloo_works_are_awaited_and_chained(loop_name: str, tmp_path: Any) -> None:
    results = run_workers(collectives, 2, str(tmp_path / "store"), loop=loop_name)
    assert results == [[12.0, [0.0, 1.0], "barrier"]] * 2


def test_works_of_the_default_group(loop_name: str, tmp_path: Any) -> None:
    results = run_workers(default_group, 2, str(tmp_path / "store"), loop=loop_name)
    assert results == [[4.0] * 3] * 2


@pytest.mark.asyncio
async def test_it_completes_when_the_last_of_its_works_has() -> None:
    works = [NativeWork() for _ in range(3)]
    whole = AsyncCollWork(works, "all")  # type: ignore[arg-type]
    assert repr(whole) == "<AsyncCollWork pending: 3 of 3 left>"
    for work in works[1:]:
        in_thread(work.complete)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not whole.done()
    assert repr(whole) == "<AsyncCollWork pending: 1 of 3 left>"
    in_thread(works[0].complete)
    assert await whole == "all"
    assert repr(whole) == "<AsyncCollWork done>"
    assert await AsyncCollWork([], 1) == 1


@pytest.mark.asyncio
async def test_the_first_error_wins_once_all_have_ended(complaints: list[loops.Context]) -> None:
    works = [NativeWork() for _ in range(3)]
    whole = AsyncCollWork(works)  # type: ignore[arg-type]
    branch = whole.then(str)
    in_thread(works[2].complete, ValueError("first"))
    in_thread(works[0].complete, KeyError("second"))
    for _ in range(4):
        await asyncio.sleep(0)
    assert not whole.done()
    in_thread(works[1].complete)
    with pytest.raises(ValueError, match="first") as caught:
        await branch
    assert caught.value.__notes__ == ["another of the operations failed too: 'second'"]
    del whole, branch, caught
    gc.collect()
    assert complaints == []


@pytest.mark.asyncio
async def test_cancelled_it_ignores_the_end_of_its_works(complaints: list[loops.Context]) -> None:
    works = [NativeWork() for _ in range(2)]
    whole = AsyncCollWork(works)  # type: ignore[arg-type]
    whole.cancel()
    in_thread(works[0].complete)
    in_thread(works[1].complete, ValueError("late"))
    with pytest.raises(asyncio.CancelledError):
        await whole
    for _ in range(4):
        await asyncio.sleep(0)
    assert whole._works == []
    del whole
    gc.collect()
    assert complaints == []


@pytest.mark.asyncio
async def test_a_work_nobody_holds_still_completes_and_reports_its_error_once(
    complaints: list[loops.Context],
) -> None:
    work = NativeWork()
    arrived = asyncio.Event()
    AsyncCollWork(work).then(lambda _: arrived.set())  # type: ignore[call-overload]
    gc.collect()
    in_thread(work.complete)
    await arrived.wait()
    work = NativeWork()
    AsyncCollWork(work).then(str).then(str)  # type: ignore[call-overload]
    gc.collect()
    in_thread(work.complete, ValueError("unseen"))
    for _ in range(6):
        await asyncio.sleep(0)
    gc.collect()
    assert [str(context["exception"]) for context in complaints] == ["unseen"]
    complaints.clear()


@pytest.mark.asyncio
async def test_what_is_no_work_is_refused() -> None:
    with pytest.raises(UsageError, match="not a member"):
        AsyncCollWork([NativeWork(), None])  # type: ignore[list-item]


def test_it_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncCollWork([])
