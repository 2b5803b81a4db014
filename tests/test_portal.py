"""What a call comes to where no event loop runs: its result, its work, or its being taken back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar
from unittest import mock

import pytest

from aiocomm.errors import ClosedError, UsageError, WouldBlockError
from aiocomm.handles.base import AsyncWork
from aiocomm.handles.delivered import DeliveredWork
from aiocomm.portal import loop_options, perform

T = TypeVar("T")
WAIT = 30.0  # seconds; guards against hanging


def finish(work: AsyncWork[T], async_op: bool = False, timeout: float | None = None) -> Any:
    return perform(lambda: work, async_op, timeout, instead="await it")


class Delivery(DeliveredWork):
    """What it delivers comes back to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.back = threading.Event()

    def deliver(self, value: object) -> None:
        self._delivered = value
        self.set_result(value)

    def _put_back(self, delivered: Any) -> None:
        self.back.set()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that runs in another thread."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def test_the_result_or_the_work(loop: asyncio.AbstractEventLoop) -> None:
    work: AsyncWork[int] = AsyncWork(loop=loop)
    assert finish(work, True) is work
    loop.call_soon_threadsafe(work.set_result, 3)
    assert finish(work, False) == 3


def test_after_a_time_out_it_is_taken_back(loop: asyncio.AbstractEventLoop) -> None:
    work: AsyncWork[None] = AsyncWork(loop=loop)
    with pytest.raises(TimeoutError, match=r"pending>: not done within 0\.01 s, and taken"):
        finish(work, False, 0.01)
    with pytest.raises(asyncio.CancelledError):
        work.wait(WAIT)


@pytest.mark.parametrize("when", ["just in time", "too late to be taken back"])
def test_what_comes_after_all_is_the_result(loop: asyncio.AbstractEventLoop, when: str) -> None:
    class Late(AsyncWork[int]):
        def _withdraw(self) -> bool:
            if when == "just in time":
                self.set_result(3)
                return super()._withdraw()
            self._loop.call_soon(self.set_result, 3)
            return False

    assert finish(Late(loop=loop), False, 0.01) == 3


def test_a_time_out_when_the_loop_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.new_event_loop()
    work: AsyncWork[None] = AsyncWork(loop=ended)

    def late(timeout: float | None) -> None:
        ended.close()
        raise TimeoutError

    monkeypatch.setattr(work, "wait", late)
    with pytest.raises(ClosedError, match="is closed"):
        finish(work, False, 0)


def test_the_time_out_counts_from_the_call(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: AsyncWork[None] = AsyncWork(loop=loop)
    waited: list[float | None] = []
    monkeypatch.setattr(work, "wait", waited.append)
    for timeout, began, ended in ((7, 0.0, 5.0), (7, 0.0, 9.0), (None, 0.0, 5.0)):
        clock = mock.Mock(monotonic=iter((began, ended)).__next__)
        monkeypatch.setattr("aiocomm.portal.time", clock)
        finish(work, False, timeout)
    assert waited == [2, 0, None]


def test_what_is_refused_begins_nothing() -> None:
    def never() -> AsyncWork[None]:
        raise AssertionError("it was begun")

    for async_op, timeout, text in ((False, -1, "time-out"), (True, 1, r"give it to wait\(\)")):
        with pytest.raises(UsageError, match=text):
            perform(never, async_op, timeout, instead="")

    async def call() -> None:
        with pytest.raises(WouldBlockError, match="await it"):
            perform(never, False, instead="await it")

    asyncio.run(call())


def test_a_time_out_of_the_work_itself_is_its_failure(loop: asyncio.AbstractEventLoop) -> None:
    work: AsyncWork[None] = AsyncWork(loop=loop)
    loop.call_soon_threadsafe(work.set_exception, TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        finish(work, False, WAIT)


def test_a_failed_work_is_not_left_to_the_collector(loop: asyncio.AbstractEventLoop) -> None:
    made: list[weakref.ref[AsyncWork[None]]] = []

    def failing() -> AsyncWork[None]:
        work: AsyncWork[None] = AsyncWork(loop=loop)
        loop.call_soon_threadsafe(work._fail, ValueError("it failed"))
        made.append(weakref.ref(work))
        return work

    gc.disable()
    try:
        with pytest.raises(ValueError, match="it failed"):
            perform(failing, False, instead="")
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(WAIT)  # the loop has let go of it too
        assert made[0]() is None
    finally:
        gc.enable()


def test_what_came_just_before_an_interrupt_goes_back(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Delivery(loop)

    def interrupted(timeout: float | None) -> None:
        delivered = threading.Event()
        loop.call_soon_threadsafe(work.deliver, "once")
        loop.call_soon_threadsafe(delivered.set)
        assert delivered.wait(WAIT)
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(work, False)
    assert work.back.wait(WAIT)


def test_an_interrupt_after_the_end_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.new_event_loop()
    work: AsyncWork[None] = AsyncWork(loop=ended)

    def interrupted(timeout: float | None) -> None:
        ended.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(work, False)


def test_the_loop_is_uvloop_where_there_is_one() -> None:
    assert set(loop_options()) == {"use_uvloop"}
