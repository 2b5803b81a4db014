"""Records that are told instead of read on a board."""

from __future__ import annotations

import asyncio

import pytest

import aiocomm
from aiocomm.channel.introductions import CLIENT, SERVER, Introduction, Introductions, new_address
from aiocomm.errors import RendezvousTimeout, UsageError


def test_clients_sort_before_servers() -> None:
    assert new_address(CLIENT) < new_address(SERVER)
    assert new_address(CLIENT) != new_address(CLIENT)


@pytest.mark.asyncio
async def test_a_record_is_kept_for_as_long_as_anybody_needs_it() -> None:
    here = Introductions(new_address(CLIENT), "127.0.0.1")
    other = Introduction("server", "worker/server", b"record")
    here.introduce(other)
    here.introduce(other)  # two handles of one channel
    here.forget(other)
    assert await here.get(other.key, 0) == b"record"
    here.forget(other)
    assert here._records == {}
    assert not here._uses


@pytest.mark.asyncio
async def test_who_was_introduced_is_found_and_the_other_way_round_not() -> None:
    ours, theirs = (Introductions(new_address(kind), "127.0.0.1") for kind in (CLIENT, SERVER))
    with pytest.raises(UsageError, match="is not open"):
        ours.own
    async with (
        aiocomm.open(ours.address, store=ours) as here,
        aiocomm.open(theirs.address, store=theirs) as there,
    ):
        members = [ours.address, theirs.address]
        coming = there.create_collective_group(members).recv()  # waits to be dialled
        ours.introduce(theirs.own)
        await here.create_collective_group(members).send("hello")
        assert await coming == "hello"
        assert theirs.own == Introduction(theirs.address, theirs.own.key, theirs.own.record)


@pytest.mark.asyncio
async def test_waiting_ends_with_the_introduction_or_the_time() -> None:
    store = Introductions("a:0", "127.0.0.1")
    waiting = asyncio.create_task(store.get("worker/b:0", 20.0))
    await asyncio.sleep(0)
    store.introduce(Introduction("c:0", "worker/c:0", b"other"))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.introduce(Introduction("b:0", "worker/b:0", b"record"))
    assert await waiting == b"record"
    assert await store.delete("worker/b:0")
    assert not await store.delete("worker/b:0")
    with pytest.raises(RendezvousTimeout, match="nobody introduced 'worker/b:0' to a:0"):
        await store.get("worker/b:0", 0)
