"""Copies run in their threads, end in a future each, and wake the loop as seldom as they can."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref

import pytest

from aiocomm.copier import MOST_THREADS, NICENESS, Copier, default_threads

pytestmark = pytest.mark.asyncio


def copier(threads: int = 1) -> Copier:
    return Copier(asyncio.get_running_loop(), threads)


async def test_calls_begin_in_their_order() -> None:
    made, begun = copier(), []
    gate = threading.Event()

    def call(number: int) -> int:
        gate.wait()
        begun.append((number, threading.current_thread().name))
        return number

    futures = [made.run(call, number) for number in range(5)]
    gate.set()
    assert await asyncio.gather(*futures) == [0, 1, 2, 3, 4]
    assert begun == [(number, "aiocomm-copy_0") for number in range(5)]
    made.close()


async def test_threads_run_beside_each_other() -> None:
    made, meeting = copier(3), threading.Barrier(3)
    await asyncio.gather(*(made.run(meeting.wait, 20) for _ in range(3)))
    made.close()


async def test_the_threads_give_way_to_the_loop() -> None:
    made = copier()

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await made.run(niceness) == min(19, niceness() + NICENESS)
    made.close()


async def test_ten_thousand_calls_from_several_threads_are_all_told() -> None:
    made = copier(3)
    futures = [made.run(abs, -number) for number in range(10_000)]
    assert await asyncio.gather(*futures) == list(range(10_000))
    made.close()


async def test_an_error_is_the_callers_and_the_next_call_works() -> None:
    made = copier()

    def fail() -> None:
        raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        await made.run(fail)
    assert await made.run(abs, -1) == 1
    made.close()


async def test_a_cancelled_call_runs_and_is_nobodys() -> None:
    made, ran = copier(), threading.Event()
    future = made.run(ran.set)
    future.cancel()
    assert await made.run(abs, -1) == 1
    assert ran.is_set()
    assert future.cancelled()
    made.close()


async def test_nothing_of_a_call_is_kept() -> None:
    class Thing:
        pass

    made, thing = copier(), Thing()
    gone = weakref.ref(thing)
    await made.run(lambda held: None, thing)
    del thing
    gc.collect()
    assert gone() is None
    made.close()


async def test_closing_ends_what_was_begun_and_the_threads() -> None:
    ran: list[int] = []
    before, made = threading.active_count(), copier(2)
    futures = [made.run(ran.append, number) for number in range(20)]
    made.close()
    assert sorted(ran) == list(range(20))
    assert threading.active_count() == before
    await asyncio.gather(*futures)


async def test_threads_that_outlive_the_loop_are_quiet() -> None:
    other, ran = asyncio.new_event_loop(), threading.Event()
    made = Copier(other, 1)
    made.run(lambda: None)
    other.close()
    made._jobs.put((asyncio.get_running_loop().create_future(), ran.set, ()))
    made.close()
    assert ran.is_set()


async def test_threads_are_no_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 2), (64, MOST_THREADS)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_threads() == threads
