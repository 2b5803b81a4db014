"""Answers from threads, awaited in a loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from aiocomm.rendezvous.bridge import bridge, in_thread, in_thread_or_undo


@pytest.mark.asyncio
async def test_value_error_and_cancellation_come_through() -> None:
    good: Future[int] = Future()
    bad: Future[int] = Future()
    gone: Future[int] = Future()
    waiting = [bridge(each) for each in (good, bad, gone)]
    await asyncio.to_thread(good.set_result, 1)
    await asyncio.to_thread(bad.set_exception, KeyError("k"))
    await asyncio.to_thread(gone.cancel)
    assert await waiting[0] == 1
    with pytest.raises(KeyError):
        await waiting[1]
    with pytest.raises(asyncio.CancelledError):
        await waiting[2]


@pytest.mark.asyncio
async def test_an_answer_to_one_who_left_is_silent(complaints: list[Any]) -> None:
    for answer in (
        lambda source: source.set_result(1),
        lambda source: source.set_exception(OSError()),
    ):
        source: Future[int] = Future()
        target = bridge(source)
        target.cancel()
        answer(source)
        source = Future()
        target = bridge(source)
        answer(source)
        await asyncio.sleep(0)
        assert target.done()
        del target  # nobody ever looks at it
        gc.collect()
    assert complaints == []


def test_an_answer_to_a_closed_loop_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    source: Future[int] = Future()

    async def leave() -> None:
        bridge(source)

    asyncio.run(leave())
    with caplog.at_level(logging.DEBUG):
        source.set_result(1)
    assert caplog.records == []


@pytest.mark.asyncio
async def test_a_call_in_a_thread_brings_its_result_or_its_error() -> None:
    def fail() -> None:
        raise KeyError("k")

    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError):
        await in_thread(fail)


@pytest.mark.asyncio
async def test_what_comes_after_a_cancellation_is_undone() -> None:
    go, undone = threading.Event(), Future[bool]()
    task = asyncio.create_task(in_thread_or_undo(go.wait, undone.set_result))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await bridge(undone) is True
    assert await in_thread_or_undo(go.is_set, undone.set_result) is True
