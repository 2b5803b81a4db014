"""The board in memory, beyond what every board promises (``rendezvous/test_base.py``)."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.errors import ClosedError, RendezvousTimeout, UsageError
from aiocomm.testing import MemoryStore

WAIT = 30.0  # seconds; guards against hanging


@pytest.mark.asyncio
async def test_what_was_written_outlives_the_last_close() -> None:
    store = MemoryStore()
    async with store:
        await store.set("k", b"v")
    with pytest.raises(ClosedError):
        await store.get("k", 0)
    async with store:
        assert await store.get("k", 0) == b"v"


@pytest.mark.asyncio
async def test_two_stores_have_nothing_in_common() -> None:
    async with MemoryStore() as one, MemoryStore() as other:
        await one.set("k", b"v")
        with pytest.raises(RendezvousTimeout, match="'k'"):
            await other.get("k", 0)


@pytest.mark.asyncio
async def test_the_host_is_what_was_given() -> None:
    store = MemoryStore("192.0.2.7")
    with pytest.raises(UsageError, match="not open"):
        _ = store.host
    async with store:
        assert store.host == "192.0.2.7"


@pytest.mark.asyncio
async def test_a_get_that_ended_leaves_no_waiter() -> None:
    async with MemoryStore() as store:
        with pytest.raises(RendezvousTimeout):
            await store.get("k", 0.001)
        kept = asyncio.create_task(store.get("k", WAIT))
        left = asyncio.create_task(store.get("k", WAIT))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        assert [len(each) for each in store._waiters.values()] == [1]
        await store.set("k", b"v")
        assert await kept == b"v"
        assert store._waiters == {}


@pytest.mark.asyncio
async def test_repr_shows_state() -> None:
    store = MemoryStore()
    assert repr(store) == "<MemoryStore of 0 keys, closed>"
    async with store:
        await store.set("k", b"v")
        assert repr(store) == "<MemoryStore of 1 keys, open>"
