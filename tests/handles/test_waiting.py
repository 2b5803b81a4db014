"""A thread that waits hears of completion, and of the end of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from aiocomm.errors import ClosedError
from aiocomm.handles import AsyncWork
from aiocomm.handles.waiting import _guards, block_until_done

from .. import loops
from .works import new_work

TIMEOUT = 30.0  # against hanging, nothing else


class Waiter(threading.Thread):
    """Waits for a work; ``outcome`` is what came of it."""

    def __init__(self, work: AsyncWork[int]) -> None:
        super().__init__()
        self._work = work
        self.outcome: object = None

    def run(self) -> None:
        try:
            self.outcome = self._work.wait(TIMEOUT)
        except Exception as error:
            self.outcome = error


async def until_hung_up(work: AsyncWork[int]) -> None:
    """Until the thread's bell hangs on the work: it blocks, or is about to."""
    while not work._callbacks:  # noqa: ASYNC110 - it is a thread's doing, and no event tells
        await asyncio.sleep(0)


@pytest.fixture
def loop(loop_name: str) -> asyncio.AbstractEventLoop:
    loop = loops.FACTORIES[loop_name]()
    loop.set_debug(True)
    return loop


def close(loop: asyncio.AbstractEventLoop) -> None:
    loop.close()


def end_generators_and_close(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.parametrize("end", [close, end_generators_and_close])
def test_a_waiting_thread_hears_that_the_loop_ends(
    loop: asyncio.AbstractEventLoop, end: Callable[[asyncio.AbstractEventLoop], None]
) -> None:
    works = [AsyncWork[int](loop=loop) for _ in range(3)]
    waiters = [Waiter(work) for work in works for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    for work in works:
        loop.run_until_complete(until_hung_up(work))
    end(loop)
    for waiter in waiters:
        waiter.join()
        assert isinstance(waiter.outcome, ClosedError)


def test_a_loop_that_ends_before_it_heard_of_the_thread(loop: asyncio.AbstractEventLoop) -> None:
    work = AsyncWork[int](loop=loop)
    posted = threading.Event()
    post = loop.call_soon_threadsafe

    def observed(*args: object) -> object:
        handle = post(*args)  # type: ignore[arg-type]
        del args
        posted.set()
        return handle

    class Observed:
        """The loop, as the thread sees it."""

        call_soon_threadsafe = staticmethod(observed)
        is_closed = loop.is_closed

    outcome: list[bool] = []
    thread = threading.Thread(
        target=lambda: outcome.append(block_until_done(work, Observed(), TIMEOUT))  # type: ignore[arg-type]
    )
    thread.start()
    posted.wait()
    loop.close()
    thread.join()
    assert outcome == [True]
    assert not work.done()


def test_run_does_not_wait_for_threads_that_wait_for_it(loop_name: str) -> None:
    """asyncio.run joins the default executor's threads before it closes the loop."""
    waiting: list[asyncio.Future[int]] = []

    async def main() -> None:
        work = AsyncWork[int]()
        waiting.append(asyncio.get_running_loop().run_in_executor(None, work.wait, TIMEOUT))
        await until_hung_up(work)

    with asyncio.Runner(debug=True, loop_factory=loops.FACTORIES[loop_name]) as runner:
        runner.run(main())
    assert isinstance(waiting[0].exception(), ClosedError)


def test_completion_in_the_last_turn_of_the_loop_still_counts(
    loop: asyncio.AbstractEventLoop,
) -> None:
    work = AsyncWork[int](loop=loop)
    waiter = Waiter(work)
    waiter.start()
    loop.run_until_complete(until_hung_up(work))
    work.set_result(5)  # its callbacks will never run
    loop.close()
    waiter.join()
    assert waiter.outcome == 5


def test_a_thread_that_comes_after_the_generators_ended(loop: asyncio.AbstractEventLoop) -> None:
    first, second = AsyncWork[int](loop=loop), AsyncWork[int](loop=loop)
    waiters = [Waiter(first), Waiter(second)]
    waiters[0].start()
    loop.run_until_complete(until_hung_up(first))
    loop.run_until_complete(loop.shutdown_asyncgens())
    waiters[1].start()

    async def joined() -> None:
        while waiters[1].is_alive():  # noqa: ASYNC110 - the end of a thread
            await asyncio.sleep(0)

    loop.run_until_complete(joined())
    loop.close()
    for waiter in waiters:
        waiter.join()
        assert isinstance(waiter.outcome, ClosedError)


@pytest.mark.asyncio
async def test_nothing_piles_up_in_the_loop() -> None:
    loop = asyncio.get_running_loop()
    work = AsyncWork[int](loop=loop)
    for _ in range(20):
        assert not await asyncio.to_thread(block_until_done, work, loop, 0)
    work._finish(1)
    for _ in range(20):
        assert await asyncio.to_thread(block_until_done, work, loop, None)
    assert _guards[loop].bells == set()
    assert not work._callbacks


@pytest.mark.asyncio
async def test_wait_in_a_thread_gives_result_error_or_cancellation() -> None:
    good, bad, dropped = new_work(), new_work(), new_work()
    waiting = [asyncio.create_task(asyncio.to_thread(work.wait)) for work in (good, bad, dropped)]
    good._finish(1)
    bad._fail(ValueError("x"))
    dropped.cancel()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], ValueError)
    assert isinstance(outcomes[2], asyncio.CancelledError)


@pytest.mark.asyncio
async def test_wait_times_out_and_the_work_goes_on_with_nothing_left_on_it() -> None:
    work = new_work()
    for timeout in (-1, 0, 0.001):
        with pytest.raises(TimeoutError, match="it goes on"):
            await asyncio.to_thread(work.wait, timeout)
    await asyncio.sleep(0)  # the bells are taken down by then
    assert not work._callbacks
    work._finish(7)
    assert await asyncio.to_thread(work.wait, 0) == 7


@pytest.mark.asyncio
async def test_many_threads_wait_for_one_work() -> None:
    work = new_work()
    ready = threading.Barrier(9)
    results: list[int] = []

    def wait() -> None:
        ready.wait()
        results.append(work.wait(30))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(ready.wait)
    work._finish(6)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert results == [6] * 8


@pytest.mark.parametrize(
    "timeout", [1e10, 1e300, 10**400, float("inf")], ids=["decades", "huge", "no float", "for ever"]
)
def test_a_time_out_may_be_longer_than_the_system_can_wait(
    loop: asyncio.AbstractEventLoop, timeout: float
) -> None:
    async def body() -> None:
        work = new_work()
        waiting = asyncio.to_thread(block_until_done, work, asyncio.get_running_loop(), timeout)
        work._finish(3)
        assert await waiting

    loop.run_until_complete(body())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
