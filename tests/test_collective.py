"""Runtimes make and cache groups, find one another, and are found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import TCPBoard, WorkerAddress
from aiocomm.errors import AddressError, ClosedError, UsageError, WrongLoopError
from aiocomm.testing import MemoryStore

from .pairs import LARGE, MEMBERS, ramp, ready, runtimes, until
from .transport.links import apart

pytestmark = pytest.mark.asyncio


# --- making groups ---

BAD_MEMBERS: dict[str, tuple[Any, str]] = {
    "not a member": (["b:0", "c:0"], r"a:0 is not a member of \(b:0, c:0\)"),
    "one": (["a:0"], "1 addresses were given: a:0"),
    "none": ([], "0 addresses"),
    "three": (["a:0", "b:0", "c:0"], "3 addresses were given: a:0, b:0, c:0"),
    "twice the same": (["a:0", "a:0"], "a:0 was given twice"),  # F6
    "empty name": (["a:0", ":0"], "worker name ''"),
    "blank name": (["a:0", " :0"], "worker name ' '"),
    "no rank": (["a:0", "b"], "'b' is not a worker address"),
    "negative rank": (["a:0", "b:-1"], "'b:-1' is not a worker address"),
    "one string": ("a:0", "'a:0' is no list: give one of two addresses"),
    "nothing": (None, "None is no list"),
    "a number": (5, "5 is no list"),
    "no string": (["a:0", 7], "7 is neither"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
async def test_members_that_make_no_group(case: str) -> None:
    members, text = BAD_MEMBERS[case]
    async with aiocomm.open("a:0", store=MemoryStore()) as collective:
        with pytest.raises(AddressError, match=text) as raised:
            collective.create_collective_group(members)
        assert isinstance(raised.value, ValueError)
        assert "0 groups" in repr(collective)


@pytest.mark.parametrize("name", ["", " ", "\t", 7])
async def test_group_names_that_are_none(name: Any) -> None:
    async with aiocomm.open("a:0", store=MemoryStore()) as collective:
        with pytest.raises(AddressError, match="group name"):
            collective.create_collective_group(MEMBERS, name)


@pytest.mark.parametrize("name", ["x" * 5000, '"' * 900, "\0" * 300, "\ud800"])
async def test_group_names_that_cannot_travel_are_refused_at_once(name: str) -> None:
    async with aiocomm.open("a:0", store=MemoryStore()) as collective:
        with pytest.raises(AddressError, match=r"give (shorter ones|it other text)"):
            collective.create_collective_group(MEMBERS, name)
        assert "0 groups" in repr(collective)


async def test_the_longest_group_names_can_be_linked() -> None:
    with apart("unix"):
        async with runtimes("link") as (first, second):
            name = "x" * 2000
            one, other = (each.create_collective_group(MEMBERS, name) for each in (first, second))
            one.send("hello")
            assert await other.recv() == "hello"


async def test_a_group_is_made_once_for_its_members_and_name() -> None:
    async with aiocomm.open("a:0", store=MemoryStore()) as collective:
        make = collective.create_collective_group
        group = make(MEMBERS)
        assert make(list(reversed(MEMBERS))) is group
        assert make([WorkerAddress("b", 0), "a:0"]) is group
        assert (group.rank, str(group.peer), group.name) == (0, "b:0", "a:0|b:0")
        assert [str(member) for member in group.members] == MEMBERS
        named = make(MEMBERS, "weights")
        assert named is not group
        assert named.name == "weights"
        assert make(MEMBERS, "weights") is named
        assert make(["a:0", "c:0"]) is not group
        assert "3 groups" in repr(collective)
        await group.aclose()
        assert make(MEMBERS) is not group


async def test_making_a_group_touches_no_network() -> None:
    store = MemoryStore()
    async with aiocomm.open("a:0", store=store) as collective:
        tasks = asyncio.all_tasks()
        group = collective.create_collective_group(MEMBERS)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == tasks
        assert group.statistics().state == "new"


async def test_groups_of_the_same_pair_are_independent() -> None:
    async with runtimes("link") as (first, second):
        names = [None, "one", "two"]
        ours = [first.create_collective_group(MEMBERS, name) for name in names]
        theirs = [second.create_collective_group(MEMBERS, name) for name in reversed(names)]
        for number, group in enumerate(ours):
            await group.send(number)
        waiting = theirs[2].recv(), theirs[2].recv()
        assert [await group.recv() for group in theirs[:2]] == [2, 1]
        assert await waiting[0] == 0
        await ours[1].aclose()
        await ours[0].send("still here")
        assert await waiting[1] == "still here"


@pytest.mark.parametrize("route", ["memory", "link"])
async def test_both_dial_at_once_a_hundred_times(route: str) -> None:
    async with runtimes(route) as (first, second):
        for number in range(100):
            groups = [
                each.create_collective_group(MEMBERS, f"crossing {number}")
                for each in (first, second)
            ]
            for turn in range(number % 5):  # who is ahead, and by how much
                if turn == 0:
                    groups[number % 2].recv().cancel()
                await asyncio.sleep(0)
            sends = [group.send(number) for group in groups]
            async with asyncio.timeout(20):
                assert [await group.recv() for group in groups] == [number, number]
                await asyncio.gather(*sends)
            await asyncio.gather(*(group.aclose() for group in groups))


@pytest.mark.parametrize("route", ["memory", "gloo"])
async def test_messages_wait_for_a_group_that_is_made_later(route: str) -> None:
    async with runtimes(route) as (first, second):
        early = first.create_collective_group(MEMBERS)
        await early.send("before you were")
        await early.send(ramp(LARGE))
        group = second.create_collective_group(MEMBERS)
        await until(lambda: group.statistics().unreceived == 2)
        assert await group.recv() == "before you were"
        assert torch.equal(await group.recv(), ramp(LARGE))


async def test_messages_outlive_the_sender_and_its_group() -> None:
    store = MemoryStore()
    with apart("unix"):
        async with aiocomm.open("b:0", store=store) as second:
            async with aiocomm.open("a:0", store=store) as first:
                first.create_collective_group(MEMBERS).send("farewell")  # F14: dropped, unawaited
            group = second.create_collective_group(MEMBERS)
            assert group.statistics().state == "lost"
            assert await group.recv() == "farewell"
            assert second.create_collective_group(MEMBERS) is not group


# --- life of a runtime ---


async def test_the_running_loop_knows_its_runtimes() -> None:
    with pytest.raises(UsageError, match="no runtime is open"):
        aiocomm.current()
    async with runtimes("memory") as (first, second):
        with pytest.raises(UsageError, match="a:0, b:0"):
            aiocomm.current()
        assert aiocomm.current("a:0") is first
        assert aiocomm.current(WorkerAddress("b", 0)) is second
        with pytest.raises(UsageError):
            aiocomm.current("c:0")
        await second.aclose()
        assert aiocomm.current() is first
    with pytest.raises(UsageError):
        aiocomm.current()


async def test_the_environment_says_who_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOMM_ADDRESS", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(AddressError, match="AIOCOMM_ADDRESS"):
        async with aiocomm.open(store=MemoryStore()):
            pass
    monkeypatch.setenv("AIOCOMM_ADDRESS", "a:0")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        async with aiocomm.open():
            pass
    async with TCPBoard(port=0, serve=True) as board:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(board.port))
        monkeypatch.setenv("RANK", "1")
        async with aiocomm.open() as first, aiocomm.open("b:0") as second:
            assert str(first.address) == "a:0"
            groups = [each.create_collective_group(MEMBERS) for each in (first, second)]
            await groups[0].send("by the environment")
            assert await groups[1].recv() == "by the environment"


async def test_an_address_that_is_none_opens_nothing() -> None:
    with pytest.raises(AddressError):
        async with aiocomm.open("nobody", store=MemoryStore()):
            pass


@pytest.mark.tight
@pytest.mark.parametrize("route", ["memory", "link", "gloo"])
async def test_nothing_is_left_after_close(route: str) -> None:
    async with runtimes(route) as (first, second):
        groups = [each.create_collective_group(MEMBERS) for each in (first, second)]
        for group, other in (groups, groups[::-1]):
            await asyncio.gather(group.send(bytes(100_000)), other.recv())
        await asyncio.gather(first.aclose(), second.aclose())
        await first.aclose()  # idempotent
        await second.abort()
        with pytest.raises(ClosedError):
            first.create_collective_group(MEMBERS)
        for call in (lambda: groups[0].send(1), groups[1].recv):
            with pytest.raises(ClosedError):
                call()


async def test_leaving_by_an_exception_drops_what_is_pending() -> None:
    sends: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        async with aiocomm.open("a:0", store=MemoryStore()) as collective:
            group = collective.create_collective_group(MEMBERS)
            sends += [group.send(1), group.recv()]
            raise ZeroDivisionError
    for work in sends:
        assert isinstance(work.exception(), ClosedError)


async def test_abort_cuts_a_drain_short() -> None:
    async with runtimes("link", window_messages=1, close_timeout=60.0) as (first, second):
        groups = [each.create_collective_group(MEMBERS) for each in (first, second)]
        await ready(*groups)
        sends = [groups[0].send(number) for number in range(3)]
        closing = asyncio.create_task(first.aclose())
        await until(lambda: groups[0].statistics().state == "closing")
        assert not closing.done()
        async with asyncio.timeout(5):
            await first.abort()
            await closing
        assert sends[0].done()
        assert isinstance(sends[2].exception(), ClosedError)


async def test_a_runtime_belongs_to_its_loop() -> None:
    async with aiocomm.open("a:0", store=MemoryStore()) as collective:

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                collective.create_collective_group(MEMBERS)
            for end in (collective.aclose, collective.abort):
                with pytest.raises(WrongLoopError, match="in which a:0 was opened"):
                    await end()
            with pytest.raises(UsageError):
                aiocomm.current()

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
