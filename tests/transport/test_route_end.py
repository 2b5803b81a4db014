"""One end of a route that both sides set up: what ends its opening, and what it says afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocomm.errors import DeviceError, ProtocolError, RouteError
from aiocomm.transport.route_end import RouteEnd

pytestmark = pytest.mark.asyncio


class Fake(RouteEnd):
    """An end that is set up when its test says so."""

    backend = "fake"

    def __init__(self, timeout: float = 10.0) -> None:
        loop = asyncio.get_running_loop()
        super().__init__("g", loop=loop, publish=lambda key, value: None, timeout=timeout)
        self.ready: asyncio.Future[None] = loop.create_future()
        self.begun = asyncio.Event()
        self.dropped = self.cancelled = 0

    async def _set_up(self) -> None:
        self.begun.set()
        try:
            await self.ready
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _drop(self) -> None:
        self.dropped += 1


async def opening(end: Fake) -> asyncio.Task[None]:
    task = asyncio.create_task(end.open())
    await end.begun.wait()
    return task


async def test_it_is_set_up_once_for_all_who_open_it() -> None:
    end = Fake()
    first, second = await opening(end), await opening(end)
    end.ready.set_result(None)
    await asyncio.gather(first, second)
    await end.open()  # it is open
    assert end._error is None
    assert (end.dropped, end.cancelled) == (0, 0)


async def test_one_waiter_that_is_cancelled_severs_it_for_the_other() -> None:
    end = Fake()
    first, second = await opening(end), await opening(end)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(RouteError, match="the fake route 'g' was severed on this side"):
        await second
    assert (end.dropped, end.cancelled) == (1, 1)


async def test_every_waiter_has_an_error_of_its_own() -> None:
    end = Fake()
    waiting = [await opening(end) for _ in range(2)]
    end.sever()
    first, second = await asyncio.gather(*waiting, return_exceptions=True)
    assert str(first) == str(second)
    assert first is not second


async def test_a_peer_that_does_not_open_its_side() -> None:
    end = Fake(timeout=0.0)
    with pytest.raises(RouteError, match=r"in 0 s: the peer does not open its side") as caught:
        await end.open()
    assert isinstance(caught.value.__cause__, TimeoutError)
    with pytest.raises(RouteError, match="was not set up"):
        await end.open()
    assert end.dropped == 1


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (RuntimeError("no\nstack of C++"), RouteError, r"'g' could not be set up: no$"),
        (MemoryError(), RouteError, r"could not be set up: MemoryError$"),
        (TimeoutError("of theirs"), RouteError, r"could not be set up: of theirs$"),
        (DeviceError("cuda:0 failed"), DeviceError, r"^cuda:0 failed$"),
        (ProtocolError("rubbish"), ProtocolError, r"^rubbish$"),
    ],
)
async def test_what_cannot_be_set_up(error: Exception, raised: Any, text: str) -> None:
    end = Fake()
    waiting = await opening(end)
    end.ready.set_exception(error)
    with pytest.raises(raised, match=text) as caught:
        await waiting
    assert type(caught.value) is raised
    assert error in (caught.value.__cause__, end._error)
    assert end.dropped == 1


async def test_severed_before_it_is_opened_and_twice() -> None:
    end = Fake()
    assert str(end._refusal()) == "the fake route 'g' is not open"
    end.sever()
    end.sever()
    with pytest.raises(RouteError, match="severed"):
        await end.open()
    assert end.dropped == 1
    assert not end.begun.is_set()


async def test_a_loop_that_ends_and_cancels_all_tasks_has_opened_nothing() -> None:
    end = Fake()
    waiting = await opening(end)
    assert end._opening is not None
    end._opening.cancel()
    with pytest.raises(RouteError, match="is not open"):
        await waiting
    end.sever()
    assert end.dropped == 1


async def test_severed_in_the_turn_in_which_it_opened() -> None:
    end = Fake()
    waiting = await opening(end)
    end.ready.set_result(None)
    end.ready.add_done_callback(lambda _: end.sever())  # behind what wakes the task
    with pytest.raises(RouteError, match="severed"):
        await waiting


async def test_what_fails_while_it_is_severed_changes_nothing() -> None:
    end = Fake()
    waiting = await opening(end)
    end.ready.set_exception(RuntimeError("too late"))
    end.sever()
    with pytest.raises(RouteError, match="severed"):
        await waiting
    assert end.dropped == 1


async def test_setting_up_that_severs_it() -> None:
    class Severing(Fake):
        async def _set_up(self) -> None:
            self.sever()  # as a link does that is down when something is published

    end = Severing()
    with pytest.raises(RouteError, match="severed"):
        await end.open()
    with pytest.raises(RouteError, match="severed"):
        await end.open()


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="eager tasks: Python 3.12")
async def test_with_eager_tasks_it_can_be_severed_as_well() -> None:
    class Severing(Fake):
        async def _set_up(self) -> None:
            self.sever()
            await super()._set_up()

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    end = Severing()
    with pytest.raises(RouteError, match="severed"):
        await end.open()
    assert end.cancelled == 1
