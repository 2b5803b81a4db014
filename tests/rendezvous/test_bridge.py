"""Answers from threads, awaited in a loop."""

from __future__ import annotations

import asyncio
import gc
import logging
from concurrent.futures import Future
from typing import Any

import pytest

from aiocomm.rendezvous.bridge import bridge


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
