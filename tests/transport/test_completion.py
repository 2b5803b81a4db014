"""A native work as a future: over real Gloo, between real processes."""

from __future__ import annotations

import asyncio
import datetime
import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aiocomm.errors import UsageError
from aiocomm.transport.completion import Completions, watch

from .. import loops
from ..processes import Stage, Workers, run_workers


class NativeWork:
    """A dist.Work as far as it matters, completed by the test from whatever thread it likes."""

    def __init__(self) -> None:
        self.native: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.native

    def complete(self, error: Exception | None = None) -> None:
        if error is None:
            self.native.set_result([])
        else:
            self.native.set_exception(error)


def in_thread(call: Any, *args: Any) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def gloo(stage: Stage, path: str) -> dist.ProcessGroupGloo:
    store = dist.FileStore(path, stage.count)
    return dist.ProcessGroupGloo(store, stage.rank, stage.count, datetime.timedelta(seconds=30))


async def broadcast_many(stage: Stage, path: str) -> list[float]:
    group = await asyncio.to_thread(gloo, stage, path)
    loop = asyncio.get_running_loop()
    threads = threading.active_count()
    tensors = [torch.full((8,), float(n if stage.rank == 0 else -1)) for n in range(200)]
    futures = [watch(group.broadcast(tensor, 0), loop) for tensor in tensors]
    assert threading.active_count() == threads
    await asyncio.wait(futures)
    assert [future.result() for future in futures] == [None] * len(tensors)
    return [float(tensor.sum()) for tensor in tensors]


async def poll_done_only(stage: Stage, path: str) -> float:
    """F13: nobody waits, nobody awaits."""
    group = await asyncio.to_thread(gloo, stage, path)
    tensor = torch.full((4,), float(stage.rank))
    future = watch(group.broadcast(tensor, 1), asyncio.get_running_loop())
    while not future.done():  # noqa: ASYNC110 - polling alone is what is tested
        await asyncio.sleep(0)
    return float(tensor[0])


async def no_future(stage: Stage, path: str) -> str:
    group = await asyncio.to_thread(gloo, stage, path)
    tensor = torch.zeros(4)
    peer = 1 - stage.rank
    work = group.send([tensor], peer, 1) if stage.rank == 0 else group.recv([tensor], peer, 1)
    with pytest.raises(UsageError, match="has no future") as caught:
        watch(work, asyncio.get_running_loop())
    await asyncio.to_thread(work.wait)
    return type(caught.value.__cause__).__name__


async def lose_the_peer(stage: Stage, path: str) -> str | None:
    group = await asyncio.to_thread(gloo, stage, path)
    future = watch(group.broadcast(torch.zeros(4), 0), asyncio.get_running_loop())
    await future
    if stage.rank == 0:
        stage.set("here")
        await asyncio.get_running_loop().create_future()  # until it is killed
    future = watch(group.broadcast(torch.zeros(1 << 20), 0), asyncio.get_running_loop())
    stage.set("waiting")
    with pytest.raises(RuntimeError) as caught:
        await future
    return str(caught.value)


def leave_in_flight(stage: Stage, loop: str, path: str) -> None:
    """F38: the loop is gone before the work is done."""
    group = gloo(stage, path)

    async def main() -> asyncio.Future[None]:
        return watch(group.broadcast(tensor, 0), asyncio.get_running_loop())

    tensor = torch.full((4,), float(stage.rank))
    if stage.rank == 1:
        with asyncio.Runner(debug=True, loop_factory=loops.FACTORIES[loop]) as runner:
            future = runner.run(main())
        assert not future.done()
        stage.set("closed")
    else:
        stage.wait_blocking("closed")
        group.broadcast(tensor, 0).wait()
    group.barrier().wait()
    assert float(tensor[0]) == 0.0


def test_broadcasts_complete_without_a_thread_each(loop_name: str, tmp_path: Any) -> None:
    sums = run_workers(broadcast_many, 2, str(tmp_path / "store"), loop=loop_name)
    assert sums == [[8.0 * n for n in range(200)]] * 2


def test_progress_without_anybody_waiting(loop_name: str, tmp_path: Any) -> None:
    assert run_workers(poll_done_only, 2, str(tmp_path / "store"), loop=loop_name) == [1.0, 1.0]


def test_a_work_without_a_future_is_refused(loop_name: str, tmp_path: Any) -> None:
    causes = run_workers(no_future, 2, str(tmp_path / "store"), loop=loop_name)
    assert causes == ["RuntimeError", "RuntimeError"]


def test_the_error_of_the_work_comes_as_it_is(loop_name: str, tmp_path: Any) -> None:
    with Workers(2, loop=loop_name) as workers:
        first = workers.start(lose_the_peer, str(tmp_path / "store"))
        second = workers.start(lose_the_peer, str(tmp_path / "store"))
        workers.wait("here")
        workers.wait("waiting")
        first.kill()
        assert "gloo" in second.result().lower()


@pytest.mark.asyncio
async def test_completion_of_a_cancelled_future_is_silent_10_000_times(
    complaints: list[loops.Context],
) -> None:
    """F37: cancel the future; complete the work from a thread."""
    loop = asyncio.get_running_loop()
    works = [NativeWork() for _ in range(10_000)]
    futures = [watch(work, loop) for work in works]  # type: ignore[arg-type]
    start = threading.Barrier(2)

    def complete() -> None:
        start.wait()
        for number, work in enumerate(works):
            work.complete(ValueError("late") if number % 2 else None)

    thread = threading.Thread(target=complete)
    thread.start()
    start.wait()
    for number, future in enumerate(futures):
        future.cancel()
        if number % 100 == 0:
            await asyncio.sleep(0)
    await asyncio.to_thread(thread.join)
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    del futures, outcomes
    gc.collect()
    assert complaints == []


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "after"])
async def test_completion_from_a_thread_before_or_after_watch(when: str) -> None:
    loop = asyncio.get_running_loop()
    work = NativeWork()
    if when == "before":
        in_thread(work.complete)
    future = watch(work, loop)  # type: ignore[arg-type]
    assert not future.done()
    if when == "after":
        in_thread(work.complete)
    await future
    work = NativeWork()
    in_thread(work.complete, ValueError("as it is"))
    with pytest.raises(ValueError, match="as it is"):
        await watch(work, loop)  # type: ignore[arg-type]


def test_completion_after_the_loop_is_closed_is_silent(
    loop_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    work = NativeWork()

    async def main() -> asyncio.Future[None]:
        return watch(work, asyncio.get_running_loop())  # type: ignore[arg-type]

    with asyncio.Runner(debug=True, loop_factory=loops.FACTORIES[loop_name]) as runner:
        future = runner.run(main())
    in_thread(work.complete)
    assert not future.done()
    assert capfd.readouterr() == ("", "")


def test_a_work_in_flight_outlives_its_loop(loop_name: str, tmp_path: Any) -> None:
    with Workers(2, loop=loop_name) as workers:
        started = [
            workers.start(leave_in_flight, loop_name, str(tmp_path / "store")) for _ in range(2)
        ]
        workers.join()
        assert [worker.stderr for worker in started] == ["", ""]


@pytest.mark.asyncio
async def test_many_ends_are_told_once_each_with_their_errors() -> None:
    told: dict[int, BaseException | None] = {}
    every = asyncio.Event()

    def ended(number: int, error: BaseException | None) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert number not in told
        told[number] = error
        if len(told) == len(works):
            every.set()

    works = [NativeWork() for _ in range(1000)]
    completions = Completions[int](asyncio.get_running_loop(), ended)
    for number, work in enumerate(works):
        completions.add(work, number)  # type: ignore[arg-type]
        if number % 7 == 0:
            completions.announce()
    completions.announce()

    def complete(first: int) -> None:  # two at a time, as Gloo's threads do
        for number in range(first, len(works), 2):
            works[number].complete(ValueError(str(number)) if number % 5 == 0 else None)

    await asyncio.gather(*(asyncio.to_thread(complete, first) for first in (0, 1)))
    async with asyncio.timeout(10):
        await every.wait()
    assert [n for n, error in told.items() if error is None] == [n for n in told if n % 5]
    assert str(told[5]) == "5"


@pytest.mark.asyncio
async def test_one_announced_end_tells_all_before_it_also_those_it_overtook() -> None:
    told: list[int] = []
    works = [NativeWork() for _ in range(4)]
    completions = Completions[int](asyncio.get_running_loop(), lambda each, _: told.append(each))
    completions.announce()  # of nothing
    for number, work in enumerate(works):
        completions.add(work, number)  # type: ignore[arg-type]
    completions.announce()
    for number, expected in ((1, []), (3, [1, 3]), (2, [1, 3, 2]), (0, [1, 3, 2, 0])):
        in_thread(works[number].complete)
        await asyncio.sleep(0)
        assert told == expected


@pytest.mark.asyncio
async def test_all_announced_are_told_each_at_its_end() -> None:
    told: list[int] = []
    works = [NativeWork() for _ in range(3)]
    completions = Completions[int](asyncio.get_running_loop(), lambda each, _: told.append(each))
    for number, work in enumerate(works):
        completions.add(work, number)  # type: ignore[arg-type]
    completions.announce()
    completions.announce_all()
    for number in range(3):
        in_thread(works[number].complete)
        await asyncio.sleep(0)
        assert told == list(range(number + 1))


@pytest.mark.asyncio
async def test_an_end_that_comes_while_others_are_told_is_told_too() -> None:
    told = []
    early, late = NativeWork(), NativeWork()

    def ended(name: str, error: BaseException | None) -> None:
        told.append(name)
        if name == "early":
            in_thread(late.complete)
            assert told == ["early"]

    completions = Completions[str](asyncio.get_running_loop(), ended)
    for name, work in (("early", early), ("late", late)):
        completions.add(work, name)  # type: ignore[arg-type]
        completions.announce()
    early.complete()
    assert told == []
    for _ in range(2):
        await asyncio.sleep(0)
    assert told == ["early", "late"]


def test_ends_after_the_loop_is_closed_are_silent(
    loop_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    works = [NativeWork(), NativeWork()]
    told: list[int] = []

    async def main() -> Completions[int]:
        loop = asyncio.get_running_loop()
        completions = Completions[int](loop, lambda number, _: told.append(number))
        for number, work in enumerate(works):
            completions.add(work, number)  # type: ignore[arg-type]
            completions.announce()
        return completions

    with asyncio.Runner(debug=True, loop_factory=loops.FACTORIES[loop_name]) as runner:
        completions = runner.run(main())
    for work in works:
        in_thread(work.complete)
    del completions
    assert told == []
    assert capfd.readouterr() == ("", "")
