"""Works whose result exists once: it is taken, or it goes back. (Receives: tests of the lanes.)"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocomm.handles.delivered import DeliveredWork


class Lent(DeliveredWork):
    """Remembers what went back."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.back: list[Any] = []

    def _put_back(self, delivered: Any) -> None:
        self.back.append(delivered)

    def deliver(self) -> None:
        self._delivered = "it"
        self.set_result("value")


@pytest.mark.asyncio
async def test_what_was_awaited_stays() -> None:
    work = Lent()
    asyncio.get_running_loop().call_soon(work.deliver)
    assert await work == "value"
    assert work.result() == "value"
    assert work.back == []


@pytest.mark.parametrize("waiters", [1, 2])
@pytest.mark.asyncio
async def test_a_waiter_that_is_cancelled_before_it_runs_gives_back(waiters: int) -> None:
    work = Lent()
    tasks = [asyncio.create_task(work.async_wait()) for _ in range(waiters)]
    work.add_done_callback(lambda _: [task.cancel() for task in tasks])
    asyncio.get_running_loop().call_soon(work.deliver)
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert work.back == ["it"]
    with pytest.raises(asyncio.CancelledError, match="went to the next call"):
        work.result()
    with pytest.raises(asyncio.CancelledError, match="went to the next call"):
        await work


@pytest.mark.asyncio
async def test_it_goes_back_with_the_last_of_its_branches() -> None:
    work = Lent()
    first, second = work.then(str.upper), work.then(str.upper)
    work.deliver()
    first.cancel()
    assert work.back == []
    second.cancel()
    assert work.back == ["it"]


@pytest.mark.asyncio
async def test_a_pending_one_falls_with_its_branch() -> None:
    work = Lent()
    work.then(str.upper).cancel()
    assert work.cancelled()
    assert work.back == []
