"""Functions chained to works: where their failures go, and that each is reported once."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from collections.abc import Generator
from typing import Any

import pytest

from aiocomm.handles import AsyncWork
from aiocomm.handles.func import _tasks

from .. import loops
from .works import boom, done_soon, fails_soon


@pytest.mark.asyncio
async def test_a_failure_skips_the_rest_and_reaches_every_branch(
    complaints: list[loops.Context],
) -> None:
    called: list[object] = []
    work = done_soon().then(boom)
    branches = [work.then(called.append).then(called.append) for _ in range(3)]
    await asyncio.wait(branches)
    depths = set()
    for branch in branches:
        for _ in range(2):
            with pytest.raises(ValueError, match="boom") as caught:
                await branch
            assert caught.traceback[-1].name == "boom"
            depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1
    assert called == []
    del work, branches, branch, caught
    gc.collect()
    assert complaints == []


async def _fails(_: object) -> None:
    await asyncio.sleep(0)
    boom()


@pytest.mark.parametrize(
    "start",
    [
        lambda: done_soon().then(boom),
        lambda: done_soon().then(_fails),
        lambda: fails_soon(ValueError("boom")),
        lambda: done_soon().then(lambda _: fails_soon(ValueError("boom"))),
        lambda: done_soon().then(lambda _: done_soon().then(_fails).then(str)),
    ],
)
@pytest.mark.parametrize("branches", [0, 1, 3])
@pytest.mark.parametrize("retrieve", [False, True])
@pytest.mark.asyncio
async def test_a_failure_is_reported_once_if_nobody_retrieves_it(
    start: Any, branches: int, retrieve: bool, complaints: list[loops.Context]
) -> None:
    """F41: whatever the number of works it went through, and though nobody holds any of them."""
    work = start()
    ends = [work] + [work.then(str).then(str) for _ in range(branches)]
    await asyncio.wait(ends)
    if retrieve:
        with pytest.raises(ValueError, match="boom"):
            await ends[-1]
    del work, ends
    gc.collect()
    reported = [str(context["exception"]) for context in complaints]
    complaints.clear()
    assert reported == ([] if retrieve else ["boom"])


@pytest.mark.parametrize("how", ["result", "exception", "wait", "gather", "thread", "await"])
@pytest.mark.asyncio
async def test_every_way_of_retrieving_counts(how: str, complaints: list[loops.Context]) -> None:
    work = fails_soon(ValueError("boom")) if how != "await" else done_soon().then(boom)
    branch = work.then(str)
    del work
    if how == "gather":
        await asyncio.gather(branch, return_exceptions=True)
    elif how == "await":
        with pytest.raises(ValueError, match="boom"):
            await branch
    else:
        await asyncio.wait([branch])
        if how == "exception":
            branch.exception()
        elif how == "thread":
            with pytest.raises(ValueError, match="boom"):
                await asyncio.to_thread(branch.wait)
        else:
            with pytest.raises(ValueError, match="boom"):
                branch.result() if how == "result" else branch.wait()
    del branch
    gc.collect()
    assert complaints == []


@pytest.mark.asyncio
async def test_a_failure_without_branches_is_reported_without_the_collector(
    complaints: list[loops.Context],
) -> None:
    gc.disable()
    try:
        branch = done_soon().then(boom)
        await asyncio.wait([branch])
        del branch
        assert [str(context["exception"]) for context in complaints] == ["boom"]
    finally:
        gc.enable()
    complaints.clear()


@pytest.mark.asyncio
async def test_nothing_is_lost_when_nobody_holds_anything() -> None:
    """F41: a chain in the middle of a coroutine survives the collector."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    class Held:
        """A future that only its own waiter refers to."""

        def __await__(self) -> Generator[Any, None, None]:
            future = loop.create_future()
            futures.append(weakref.ref(future))
            started.set()
            yield from future

    futures: list[weakref.ref[asyncio.Future[None]]] = []
    started = asyncio.Event()

    async def wait(_: object) -> None:
        await Held()

    done_soon().then(wait).then(lambda _: arrived.set())
    await started.wait()
    gc.collect()
    future = futures[0]()
    assert future is not None
    future.set_result(None)
    del future
    await arrived.wait()
    await asyncio.sleep(0)
    assert not _tasks


@pytest.mark.asyncio
async def test_stop_iteration_and_cancelled_error_out_of_a_function() -> None:
    def stop(_: object) -> None:
        raise StopIteration

    def cancel(_: object) -> None:
        raise asyncio.CancelledError("own will")

    with pytest.raises(RuntimeError, match="StopIteration"):
        await done_soon().then(stop)
    branch = done_soon().then(cancel)
    with pytest.raises(asyncio.CancelledError, match="own will"):
        await branch
    assert branch.cancelled()


def test_keyboard_interrupt_ends_the_loop_and_fails_the_work(loop_name: str) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    loop = loops.FACTORIES[loop_name]()
    work = AsyncWork[None](loop=loop)
    loop.call_soon(work._finish, None)
    branches: list[AsyncWork[Any]] = []
    loop.call_soon(lambda: branches.append(work.then(interrupt)))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert isinstance(branches[0].exception(), KeyboardInterrupt)
    loop.close()


@pytest.mark.asyncio
async def test_a_branch_does_not_show_the_frames_of_who_awaited_before_it() -> None:
    work = done_soon().then(boom)
    task = asyncio.create_task(work.async_wait())
    await asyncio.sleep(0)
    branch = work.then(str)
    await asyncio.wait([task, branch])
    with pytest.raises(ValueError, match="boom") as caught:
        await branch
    assert "async_wait" not in [entry.name for entry in caught.traceback]
    assert isinstance(task.exception(), ValueError)
