"""The one door: who may come in, in which order, and who is told that it is shut."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest

from aiocomm.copier import MOST_THREADS
from aiocomm.errors import ClosedError, ProtocolError, WrongLoopError
from aiocomm.options import Options
from aiocomm.runtime import Runtime

from .processes import Stage, run_workers


def runtime_here() -> Runtime:
    return Runtime(asyncio.get_running_loop(), Options(), "a:0")


def ignore(error: Exception) -> None:
    raise AssertionError(error)


def nothing() -> None: ...


def in_thread(call: Callable[[], Any]) -> Any:
    """What it returns, in a thread that runs no loop, while this one is blocked."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.asyncio
async def test_on_the_loop_an_entry_runs_at_once_and_raises_here() -> None:
    runtime = runtime_here()
    done: list[int] = []
    runtime.enter(lambda: done.append(1), ignore)
    assert done == [1]

    def broken() -> None:
        raise ProtocolError("broken")

    with pytest.raises(ProtocolError, match="broken"):
        runtime.enter(broken, ignore)
    runtime.close()


@pytest.mark.asyncio
async def test_entries_of_each_thread_keep_their_order() -> None:
    runtime = runtime_here()
    threads, each = 8, 500
    got: list[tuple[int, int]] = []
    done = asyncio.Event()
    start = threading.Barrier(threads)

    def note(thread: int, number: int) -> None:
        assert asyncio.get_running_loop() is runtime.loop
        got.append((thread, number))
        if len(got) == threads * each:
            done.set()

    def work(thread: int) -> None:
        start.wait()
        for number in range(each):
            runtime.enter(partial(note, thread, number), ignore)

    with ThreadPoolExecutor(threads) as pool:
        works = [asyncio.wrap_future(pool.submit(work, thread)) for thread in range(threads)]
        await done.wait()
        await asyncio.gather(*works)
    for thread in range(threads):
        assert [number for of, number in got if of == thread] == list(range(each))
    runtime.close()


@pytest.mark.asyncio
async def test_a_call_on_the_loop_does_not_overtake_what_threads_have_entered() -> None:
    runtime = runtime_here()
    got: list[str] = []
    in_thread(lambda: runtime.enter(lambda: got.append("thread"), ignore))
    assert got == []
    runtime.enter(lambda: got.append("loop"), ignore)
    assert got == ["thread", "loop"]
    runtime.close()


@pytest.mark.asyncio
async def test_what_a_thread_posts_after_its_entry_does_not_overtake_it() -> None:
    runtime = runtime_here()
    loop = runtime.loop
    got: list[str] = []
    first_in, second_done = threading.Event(), threading.Event()
    done = asyncio.Event()
    post = loop.call_soon_threadsafe

    def slow_post(callback: Any, *args: Any, **more: Any) -> Any:
        if threading.current_thread().name == "first" and callback == runtime._run_entries:
            first_in.set()
            second_done.wait(0.05)  # the second one cannot get through: a bounded stall, no wait
        return post(callback, *args, **more)

    def second() -> None:
        first_in.wait()
        runtime.enter(lambda: got.append("second"), ignore)
        loop.call_soon_threadsafe(got.append, "its cancellation")
        second_done.set()
        loop.call_soon_threadsafe(done.set)

    wrapper = mock.Mock(wraps=loop, call_soon_threadsafe=slow_post)
    runtime.loop = wrapper
    threads = [
        threading.Thread(
            target=lambda: runtime.enter(lambda: got.append("first"), ignore), name="first"
        ),
        threading.Thread(target=second),
    ]
    for thread in threads:
        thread.start()
    await done.wait()
    for thread in threads:
        thread.join()
    assert got == ["first", "second", "its cancellation"]
    runtime.loop = loop
    runtime.close()


@pytest.mark.asyncio
async def test_an_entry_of_a_thread_that_fails_stops_none_behind_it() -> None:
    runtime = runtime_here()
    done = asyncio.Event()
    failures: list[Exception] = []

    def broken(error: Exception) -> None:
        raise error

    def work() -> None:
        for error in (ProtocolError("of ours"), ZeroDivisionError("of another")):
            runtime.enter(partial(broken, error), failures.append)
        runtime.enter(done.set, ignore)

    in_thread(work)
    await done.wait()
    assert [str(failure) for failure in failures] == ["of ours", "of another"]
    runtime.close()


@pytest.mark.asyncio
async def test_closing_lets_in_what_came_before_and_nothing_after() -> None:
    runtime = runtime_here()
    got: list[int] = []
    in_thread(lambda: runtime.enter(lambda: got.append(1), ignore))
    runtime.close()
    assert got == [1]
    with pytest.raises(ClosedError, match="runtime of a:0 is closed: open a new one"):
        runtime.enter(nothing, ignore)
    with pytest.raises(ClosedError):
        runtime.check()
    with pytest.raises(ClosedError):
        in_thread(lambda: runtime.enter(nothing, ignore))
    with pytest.raises(ClosedError):  # one that has passed the first look when the door shuts
        in_thread(lambda: runtime._enqueue(nothing, ignore))
    assert got == [1]
    runtime.close()


@pytest.mark.asyncio
async def test_the_first_refusal_stays() -> None:
    runtime = runtime_here()
    runtime.refuse(ClosedError("the first"))
    runtime.close()
    with pytest.raises(ClosedError, match="the first"):
        runtime.check()


@pytest.mark.asyncio
async def test_a_refusal_holds_nothing_of_the_calls_that_it_refused() -> None:
    runtime = runtime_here()
    runtime.close()

    class Payload: ...

    def refused_call() -> weakref.ref[Payload]:
        payload = Payload()
        with pytest.raises(ClosedError):
            runtime.enter(lambda: print(payload), ignore)
        return weakref.ref(payload)

    held = refused_call()
    gc.collect()
    assert held() is None


def test_every_call_is_refused_once_the_loop_is_closed() -> None:
    async def make() -> Runtime:
        return runtime_here()

    runtime = asyncio.run(make())
    for _ in range(3):
        with pytest.raises(ClosedError, match="event loop of a:0 is closed"):
            runtime.enter(nothing, ignore)


@pytest.mark.asyncio
async def test_another_loop_is_told_where_to_go() -> None:
    runtime = runtime_here()

    async def elsewhere() -> None:
        with pytest.raises(WrongLoopError, match="runtime of a:0 was opened in another event loop"):
            runtime.enter(nothing, ignore)
        with pytest.raises(WrongLoopError, match="event loop in which a:0 was opened"):
            runtime.check()

    in_thread(lambda: asyncio.run(elsewhere()))
    with pytest.raises(WrongLoopError):
        in_thread(runtime.check)
    runtime.check()
    runtime.close()


def _status_of_child(child: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            child()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def fork_and_use(stage: Stage) -> str:
    runtime = runtime_here()
    runtime._lock.acquire()  # as another thread may hold it at the fork

    def child() -> None:
        for call in (lambda: runtime.enter(nothing, ignore), runtime.check):
            with pytest.raises(WrongLoopError, match=f"opened in process {os.getppid()}"):
                call()
        assert runtime._lock.acquire(blocking=False)

    try:
        assert _status_of_child(child) == 0
    finally:
        runtime._lock.release()
    got: list[str] = []
    runtime.enter(lambda: got.append("the parent goes on"), ignore)
    runtime.close()
    return got[0]


def test_a_forked_child_is_refused_at_once_and_the_parent_goes_on(loop_name: str) -> None:
    assert run_workers(fork_and_use, 1, loop=loop_name) == ["the parent goes on"]


@pytest.mark.asyncio
async def test_large_copies_run_in_threads_that_end_with_it() -> None:
    runtime = runtime_here()
    before = threading.active_count()
    assert await runtime.off_loop(lambda number: number + 1, 1) == 2
    assert before < threading.active_count() <= before + MOST_THREADS
    runtime.close()
    assert threading.active_count() == before


@pytest.mark.asyncio
async def test_a_closed_runtime_starts_no_thread() -> None:
    runtime = runtime_here()
    runtime.close()
    with pytest.raises(ClosedError):
        runtime.off_loop(print)


@pytest.mark.asyncio
async def test_an_interrupt_before_the_loop_was_woken_leaves_that_to_the_next_call() -> None:
    loop = mock.Mock()
    loop.call_soon_threadsafe.side_effect = [KeyboardInterrupt, None]
    runtime = Runtime(loop, Options(), "a:0")
    got: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_thread(lambda: runtime.enter(lambda: got.append("interrupted"), ignore))
    for name in ("next", "last"):
        in_thread(partial(runtime.enter, partial(got.append, name), ignore))
    wakings = [call.args[0] for call in loop.call_soon_threadsafe.call_args_list]
    assert len(wakings) == 2  # of which the first was lost
    wakings[1]()
    assert got == ["interrupted", "next", "last"]
    runtime.close()
