"""Bulk on its way: each message's end is told once, also when its direction is over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocomm.entries import Outgoing
from aiocomm.errors import PeerLostError, RouteError
from aiocomm.scheduler.moves import Moves, as_route_error

pytestmark = pytest.mark.asyncio


class Told:
    """The moves, and what they told."""

    def __init__(self) -> None:
        self.ends: list[tuple[Any, str, str]] = []
        self.moves = Moves(self._ended)

    def _ended(self, entry: Outgoing, route: str, error: BaseException | None) -> None:
        self.ends.append((entry.owner, route, str(error or "")))

    def add(self, name: str, future: asyncio.Future[None] | None = None) -> Any:
        entry = Outgoing(name, 1, True)
        future = future or asyncio.get_running_loop().create_future()
        self.moves.add(entry, "gloo", future)
        return entry, future


async def test_each_end_is_told_once() -> None:
    told = Told()
    (first, well), (_, badly), (_, cancelled) = (told.add(name) for name in "abc")
    assert first in told.moves
    well.set_result(None)
    badly.set_exception(RouteError("it broke"))
    cancelled.cancel()
    await asyncio.sleep(0)
    assert told.ends == [("a", "gloo", ""), ("b", "gloo", "it broke"), ("c", "gloo", "")]
    assert first not in told.moves


async def test_what_is_done_already_is_told_at_once() -> None:
    told = Told()
    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    told.add("a", future)
    assert told.ends == [("a", "gloo", "")]


async def test_what_is_late_may_end_well_and_the_rest_has_failed() -> None:
    told = Told()
    _, first = told.add("a")
    given_up, never = told.add("b")
    given_up.owner = None
    _, second = told.add("c")
    settling = asyncio.create_task(told.moves.settle(0.05, PeerLostError("gone")))
    await asyncio.sleep(0)
    first.set_result(None)
    await settling
    assert told.ends == [("a", "gloo", ""), (None, "gloo", "gone"), ("c", "gloo", "gone")]
    for future in (never, second):
        future.set_result(None)
    await asyncio.sleep(0)
    assert len(told.ends) == 3
    await told.moves.settle(0.05, PeerLostError("gone"))


async def test_a_settling_that_is_cancelled_fails_what_is_left() -> None:
    told = Told()
    told.add("a")
    settling = asyncio.create_task(told.moves.settle(60, PeerLostError("gone")))
    await asyncio.sleep(0)
    settling.cancel()
    await asyncio.wait([settling])
    assert told.ends == [("a", "gloo", "gone")]


async def test_errors_of_ours_stay_what_they_are() -> None:
    error = PeerLostError("gone")
    assert as_route_error(error) is error
    wrapped = as_route_error(MemoryError("none left"))
    assert isinstance(wrapped, RouteError)
    assert isinstance(wrapped.__cause__, MemoryError)
    assert "none left" in str(wrapped)
