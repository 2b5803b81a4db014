"""Functions chained to works: what cancelling does before, while and after they run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aiocomm.handles import AsyncWork
from aiocomm.handles.func import _tasks

from .. import loops
from .works import boom, done_soon, new_work


@pytest.mark.asyncio
async def test_cancelled_before_its_turn_a_function_never_runs() -> None:
    called: list[object] = []
    work = new_work()
    branch, other = work.then(called.append), work.then(lambda value: value)
    below = branch.then(called.append)
    assert branch.cancel("not needed")
    assert not branch.cancel()
    work._finish(1)
    assert await other == 1
    with pytest.raises(asyncio.CancelledError, match="not needed"):
        await below
    assert called == []
    assert work.result() == 1


@pytest.mark.asyncio
async def test_cancelled_in_the_turn_in_which_its_predecessor_completes() -> None:
    called: list[object] = []
    work = new_work()
    branch = work.then(called.append)
    work._finish(1)
    branch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await branch
    await asyncio.sleep(0)
    assert called == []


@pytest.mark.asyncio
async def test_a_cancelled_predecessor_cancels_the_chain() -> None:
    called: list[object] = []
    work = new_work()
    branches = [work.then(called.append), work.then(called.append).then(called.append)]
    work.cancel("gone")
    for branch in branches:
        with pytest.raises(asyncio.CancelledError, match="gone"):
            await branch
        assert branch.cancelled()
    assert called == []


@pytest.mark.parametrize("from_thread", [False, True])
@pytest.mark.asyncio
async def test_cancelling_while_a_coroutine_runs_cancels_it_and_waits_for_its_end(
    from_thread: bool,
) -> None:
    started = asyncio.Event()
    ended: list[str] = []

    async def func(_: object) -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    branch = done_soon().then(func)
    await started.wait()
    assert await asyncio.to_thread(branch.cancel, "stop") if from_thread else branch.cancel("stop")
    with pytest.raises(asyncio.CancelledError):
        await branch
    assert ended == ["cleaned up"]
    assert branch.cancelled()


@pytest.mark.asyncio
async def test_a_time_out_around_the_chain_reaches_the_coroutine() -> None:
    ended = asyncio.Event()

    async def func(_: object) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    work = new_work()
    work._finish(None)
    branch = work.then(func)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await branch
    assert ended.is_set()


@pytest.mark.asyncio
async def test_cancelling_while_a_returned_work_is_followed_cancels_that_one() -> None:
    inner = new_work()
    branch = done_soon().then(lambda _: inner)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert branch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await branch
    assert inner.cancelled()

    inner = new_work()
    branch = done_soon().then(lambda _: inner)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    inner._finish(1)
    assert branch.cancel()  # too late for the inner one
    with pytest.raises(asyncio.CancelledError):
        await branch
    assert inner.result() == 1


@pytest.mark.asyncio
async def test_a_function_that_cancels_its_own_work(complaints: list[loops.Context]) -> None:
    async def coroutine() -> None:
        raise AssertionError("never runs")

    def cancel_and(end: Any) -> AsyncWork[Any]:
        branch: AsyncWork[Any] = done_soon().then(lambda _: branch.cancel() and end())
        return branch

    for end in (int, coroutine, new_work):
        with pytest.raises(asyncio.CancelledError):
            await cancel_and(end)
    assert complaints == []
    with pytest.raises(asyncio.CancelledError):
        await cancel_and(boom)
    assert [str(context["exception"]) for context in complaints] == ["boom"]
    complaints.clear()


@pytest.mark.asyncio
async def test_cancel_against_the_start_of_the_function_from_a_thread_2_000_times(
    complaints: list[loops.Context],
) -> None:
    called: list[int] = []

    async def func(value: int) -> int:
        called.append(value)
        return value

    works = [new_work() for _ in range(2_000)]
    branches = [work.then(func) for work in works]
    start = threading.Barrier(2)

    def cancel() -> None:
        start.wait()
        for branch in branches:
            branch.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    start.wait()
    for number, work in enumerate(works):
        work._finish(number)
        if number % 20 == 0:
            await asyncio.sleep(0)
    outcomes = await asyncio.gather(*branches, return_exceptions=True)
    await asyncio.to_thread(thread.join)
    finished = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert set(finished) <= set(called)
    assert all(isinstance(outcome, (int, asyncio.CancelledError)) for outcome in outcomes)
    assert not _tasks
    assert complaints == []
