"""Which loop aiocomm starts."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from aiocomm.errors import WouldBlockError
from aiocomm.loops import check_no_loop, has_uvloop, join, new_event_loop


def test_uvloop_where_it_is_installed() -> None:
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, uvloop.Loop)
    assert has_uvloop()


def test_asyncio_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    assert not has_uvloop()


def test_what_blocks_is_refused_where_a_loop_runs() -> None:
    check_no_loop("await it")

    async def call() -> None:
        with pytest.raises(WouldBlockError, match="this thread: await it"):
            check_no_loop("await it")

    asyncio.run(call())


@pytest.mark.asyncio
async def test_a_task_is_joined_by_many_and_cancelled_by_its_owner_alone() -> None:
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 3

    def joined(task: asyncio.Task[int]) -> asyncio.Task[int]:
        return asyncio.create_task(join(task, lambda: ValueError("it was ended")))

    task = asyncio.create_task(work())
    first, second = joined(task), joined(task)
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    assert await second == 3

    gate.clear()
    task = asyncio.create_task(work())
    first = joined(task)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ValueError, match="it was ended"):
        await first
