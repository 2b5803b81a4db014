"""The runtime that all channels of a loop share."""

from __future__ import annotations

import asyncio

import pytest

import aiocomm
from aiocomm.channel import places
from aiocomm.errors import UsageError

HOST = "127.0.0.1"


@pytest.mark.asyncio
async def test_there_is_one_while_anybody_uses_it() -> None:
    first, second = await asyncio.gather(places.enter(HOST), places.enter(HOST))
    assert first is second
    await places.leave(first)
    assert await places.enter(HOST) is first
    await places.leave(first)
    await places.leave(first)
    third = await places.enter(HOST)
    assert third is not first
    await places.leave(third)
    assert places._places == {}


@pytest.mark.asyncio
async def test_it_is_nobodys_worker() -> None:
    place = await places.enter(HOST)
    with pytest.raises(UsageError, match="no runtime is open"):
        aiocomm.current()
    await places.leave(place)


@pytest.mark.asyncio
async def test_cancelled_on_the_way_in_it_leaves_nothing() -> None:
    entering = asyncio.create_task(places.enter(HOST))
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.wait([entering])
    assert entering.cancelled()
    assert places._places == {}


@pytest.mark.asyncio
async def test_what_cannot_be_opened_is_tried_anew() -> None:
    with pytest.raises(UsageError, match="not a numeric address"):
        await places.enter("no address")
    place = await places.enter(HOST)
    await places.leave(place)


def test_a_loop_that_ends_first_takes_it_along() -> None:
    asyncio.run(places.enter(HOST))
    asyncio.run(enter_and_leave())
    assert places._places == {}


async def enter_and_leave() -> None:
    await places.leave(await places.enter(HOST))
