"""AsyncWork: a future of the loop that threads may use too."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest

from aiocomm.errors import ClosedError, UsageError, WouldBlockError, WrongLoopError
from aiocomm.handles import AsyncFuncWork, AsyncWork

from .. import loops
from .works import new_work


class Cancellable(AsyncWork[Any]):
    """Counts the calls of its hook."""

    cancelled_on: threading.Thread | None = None
    calls = 0

    def _on_cancel(self) -> None:
        self.cancelled_on = threading.current_thread()
        self.calls += 1


def soon(work: AsyncWork[Any], value: Any = None) -> None:
    asyncio.get_running_loop().call_soon(work._finish, value)


# --- awaiting ---


@pytest.mark.asyncio
async def test_await_gives_the_result_before_and_after_completion() -> None:
    work = new_work()
    soon(work, 3)
    assert await work == 3
    assert await work == 3
    assert await work.async_wait() == 3
    assert work.done()
    assert work.result() == 3
    assert work.exception() is None


@pytest.mark.asyncio
async def test_await_raises_the_error_with_its_own_traceback_each_time() -> None:
    work = new_work()
    try:
        dict[str, int]()["absent"]
    except KeyError as error:
        work._fail(error)
    lengths = []
    for _ in range(3):
        with pytest.raises(KeyError) as caught:
            await work
        lengths.append(len(caught.traceback))
        assert "absent" in str(caught.traceback[-1].statement)
    assert len(set(lengths)) == 1
    assert isinstance(work.exception(), KeyError)


@pytest.mark.asyncio
async def test_the_tools_of_asyncio_take_works() -> None:
    works = [new_work() for _ in range(3)]
    for number, work in enumerate(works):
        soon(work, number)
    assert await asyncio.gather(*works) == [0, 1, 2]
    done, pending = await asyncio.wait(works)
    assert done == set(works)
    assert not pending
    work = new_work()
    soon(work, 1)
    assert await asyncio.wait_for(work, 10) == 1
    assert [await each for each in asyncio.as_completed(works)].count(2) == 1
    work = new_work()
    soon(work, 5)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work.async_wait())
    assert task.result() == 5


@pytest.mark.asyncio
async def test_a_shielded_work_goes_on_and_an_unshielded_one_is_cancelled() -> None:
    work = new_work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.shield(work)
    assert not work.done()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await work
    assert work.cancelled()
    work = Cancellable(loop=asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work, 0)
    assert work.calls == 1


@pytest.mark.asyncio
async def test_await_in_another_loop_says_so_at_once() -> None:
    work = new_work()

    def other() -> None:
        async def use() -> None:
            with pytest.raises(WrongLoopError, match="another event loop"):
                await work
            with pytest.raises(WrongLoopError):
                await work.async_wait()
            with pytest.raises(WrongLoopError):
                await asyncio.wait([work])
            with pytest.raises(WouldBlockError, match="event loop of this thread"):
                work.wait()

        asyncio.run(use(), debug=True)

    await asyncio.to_thread(other)
    work._finish(None)


def test_a_loop_runs_until_a_work_is_done(loop_name: str) -> None:
    with asyncio.Runner(debug=True, loop_factory=loops.FACTORIES[loop_name]) as runner:
        loop = runner.get_loop()
        work = AsyncWork[int](loop=loop)
        loop.call_soon(work._finish, 4)
        assert loop.run_until_complete(work) == 4


# --- completion ---


@pytest.mark.asyncio
async def test_only_the_first_end_counts() -> None:
    work = new_work()
    work._finish(1)
    work._finish(2)
    work._fail(ValueError())
    assert not work.cancel()
    assert work.result() == 1
    work = new_work()
    assert work.cancel("enough")
    work._finish(1)
    work._fail(ValueError())
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await work


@pytest.mark.asyncio
async def test_cancelled_error_cancels_and_stop_iteration_is_wrapped() -> None:
    work = new_work()
    work._fail(asyncio.CancelledError("why"))
    assert work.cancelled()
    work = new_work()
    work._fail(StopIteration(3))
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await work
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.asyncio
async def test_a_failure_nobody_retrieves_is_reported_once_unless_quiet(
    complaints: list[loops.Context],
) -> None:
    work = new_work()
    work._fail(ValueError("unseen"), quiet=True)
    del work
    gc.collect()
    assert complaints == []
    work = new_work()
    work._fail(ValueError("unseen"))
    del work
    gc.collect()
    assert [str(context["exception"]) for context in complaints] == ["unseen"]
    complaints.clear()


@pytest.mark.asyncio
async def test_retrieved_failures_are_not_reported(complaints: list[loops.Context]) -> None:
    work = new_work()
    work._fail(ValueError())
    work.exception()
    work = new_work()
    work._fail(ValueError())
    with pytest.raises(ValueError):
        work.result()
    del work
    gc.collect()
    assert complaints == []


# --- cancelling ---


@pytest.mark.asyncio
async def test_cancel_calls_the_hook_once_and_is_false_when_done() -> None:
    work = Cancellable(loop=asyncio.get_running_loop())
    assert work.cancel()
    assert not work.cancel()
    assert work.calls == 1
    work = Cancellable(loop=asyncio.get_running_loop())
    work._finish(None)
    assert not work.cancel()
    assert work.calls == 0


@pytest.mark.asyncio
async def test_cancel_from_a_thread_happens_on_the_loop() -> None:
    work = Cancellable(loop=asyncio.get_running_loop())
    assert await asyncio.to_thread(work.cancel, "from afar")
    with pytest.raises(asyncio.CancelledError, match="from afar"):
        await work
    assert work.cancelled_on is threading.current_thread()
    assert not await asyncio.to_thread(work.cancel)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("who", "count"), [("a thread cancels works", 10_000), ("the loop cancels tasks", 2_000)]
)
async def test_cancel_against_completion_from_a_thread(
    who: str, count: int, complaints: list[loops.Context]
) -> None:
    """F37: whoever comes second is silent, and every work ends as exactly one of the two."""
    loop = asyncio.get_running_loop()
    works = [new_work() for _ in range(count)]
    start = threading.Barrier(2)

    def complete() -> None:
        start.wait()
        for number, work in enumerate(works):
            loop.call_soon_threadsafe(work._finish, number)

    def cancel() -> None:
        start.wait()
        for work in works:
            work.cancel()

    completing = threading.Thread(target=complete)
    completing.start()
    if who == "a thread cancels works":
        awaited: list[Any] = works
        await asyncio.to_thread(cancel)
    else:
        awaited = [asyncio.create_task(work.async_wait()) for work in works]
        await asyncio.sleep(0)
        start.wait()
        for number, task in enumerate(awaited):
            task.cancel()
            if number % 100 == 0:
                await asyncio.sleep(0)
    await asyncio.to_thread(completing.join)
    outcomes = await asyncio.gather(*awaited, return_exceptions=True)
    finished = sum(outcome == number for number, outcome in enumerate(outcomes))
    cancelled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert finished + cancelled == count
    assert cancelled > 0
    assert complaints == []


# --- waiting in a thread: see test_waiting.py too ---


@pytest.mark.asyncio
async def test_wait_on_the_loop_raises_while_pending_and_returns_when_done() -> None:
    work = new_work()
    with pytest.raises(WouldBlockError, match="await work"):
        work.wait()
    work._finish(2)
    assert work.wait() == 2


def test_everything_on_a_closed_loop_is_an_error_and_not_a_hang(loop_name: str) -> None:
    loop = loops.FACTORIES[loop_name]()
    pending, done = AsyncWork[int](loop=loop), AsyncWork[int](loop=loop)
    done._finish(1)
    loop.close()
    with pytest.raises(ClosedError):
        pending.wait()
    with pytest.raises(ClosedError):
        pending.then(print)
    with pytest.raises(ClosedError):
        pending.add_done_callback(print)
    assert not pending.cancel()
    assert pending.get_next_work() is None
    assert done.wait() == 1


# --- chains, as far as this file knows them ---


@pytest.mark.asyncio
async def test_next_and_last_work_follow_the_most_recent_branch() -> None:
    work = new_work()
    assert work.get_next_work() is None
    assert work.get_last_work() is work
    first = work.then(str)
    second = work.then(repr)
    third = second.then(len)
    assert isinstance(first, AsyncFuncWork)
    assert work.get_next_work() is second
    assert work.get_last_work() is third
    assert first.get_last_work() is first
    soon(work, 1)
    outcomes: list[object] = [*await asyncio.gather(first, second, third)]
    assert outcomes == ["1", "1", 1]
    assert work.get_last_work() is third


@pytest.mark.asyncio
async def test_then_refuses_what_cannot_be_called() -> None:
    work = new_work()
    with pytest.raises(UsageError, match="42"):
        work.then(42)  # type: ignore[call-overload]
    assert work.get_next_work() is None


# --- memory and text ---


@pytest.mark.asyncio
async def test_a_result_lives_no_longer_than_its_work() -> None:
    class Value:
        pass

    work = new_work()
    value = Value()
    gone = weakref.ref(value)
    thread = threading.Thread(target=work.wait)
    thread.start()
    soon(work, value)
    del value
    await work
    await asyncio.to_thread(thread.join)
    del work, thread
    gc.collect()
    assert gone() is None


@pytest.mark.asyncio
async def test_repr_shows_the_state() -> None:
    work = new_work()
    assert repr(work) == "<AsyncWork pending>"
    work._finish("a long result")
    assert repr(work) == "<AsyncWork done>"
    work = new_work()
    work._fail(ValueError("x"), quiet=True)
    assert repr(work) == "<AsyncWork failed: ValueError('x')>"
    work = Cancellable(loop=asyncio.get_running_loop())
    work.cancel()
    assert repr(work) == "<Cancellable cancelled>"


@pytest.mark.asyncio
async def test_callbacks_added_from_a_thread_run_on_the_loop() -> None:
    work = new_work()
    called: asyncio.Future[threading.Thread] = asyncio.get_running_loop().create_future()

    def callback(_: object) -> None:
        called.set_result(threading.current_thread())

    work._finish(None)
    await asyncio.to_thread(work.add_done_callback, callback)
    assert await called is threading.current_thread()


@pytest.mark.asyncio
async def test_a_work_that_was_returned_instead_of_its_result_says_so() -> None:
    work = new_work()  # as an actor's method does that forgot to await
    with pytest.raises(TypeError, match=r"AsyncWork pending.* await it, and return or send"):
        pickle.dumps(work)
    work.cancel()
