"""The contract of a board, one body for every kind.

A board joins by an entry in BOARDS: a function that opens one board and yields two stores on it
that are as far apart as one process allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from aiocomm.errors import AiocommError, ClosedError, RendezvousTimeout, UsageError
from aiocomm.rendezvous import Store, TCPBoard
from aiocomm.rendezvous.base import MAX_KEY_BYTES, MAX_VALUE_BYTES
from aiocomm.rendezvous.ray import RayBoard
from aiocomm.testing import MemoryStore

from .. import loops
from .boards import wipe

Pair = tuple[Store, Store]
WAIT = 30.0  # seconds; guards against hanging, nothing waits that long
SHORT = 0.05


@contextlib.asynccontextmanager
async def memory() -> AsyncIterator[Pair]:
    store = MemoryStore()
    async with store, store:
        yield store, store


@contextlib.asynccontextmanager
async def tcp() -> AsyncIterator[Pair]:
    async with (
        TCPBoard(port=0, serve=True, timeout=WAIT) as server,
        TCPBoard(port=server.port, timeout=WAIT) as client,
    ):
        yield client, server


@contextlib.asynccontextmanager
async def on_ray() -> AsyncIterator[Pair]:
    async with RayBoard(timeout=WAIT) as one, RayBoard(timeout=WAIT) as other:
        yield other, one
    wipe()


BOARDS: dict[str, Callable[[], AbstractAsyncContextManager[Pair]]] = {
    "memory": memory,
    "ray": on_ray,
    "tcp": tcp,
}


MARKS = {"ray": pytest.mark.ray("kept_board")}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in sorted(BOARDS)])
def board(request: pytest.FixtureRequest) -> Any:
    return BOARDS[request.param]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "value",
    [b"", b"\0", bytes(range(256)), b"x" * MAX_VALUE_BYTES],
    ids=["empty", "nul", "all", "max"],
)
async def test_what_one_writes_the_other_reads(board: Any, value: bytes) -> None:
    async with board() as (one, other):
        await one.set("k", value)
        assert await other.get("k", WAIT) == value
        assert await one.get("k", 0) == value


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["worker/ünïcode 🙂;.\n/", "k" * MAX_KEY_BYTES])
async def test_any_text_is_a_key(board: Any, key: str) -> None:
    async with board() as (one, other):
        waiting = asyncio.create_task(other.get(key, WAIT))
        with pytest.raises(RendezvousTimeout):
            await other.get(key, 0)
        await one.set(key, b"v")
        assert await waiting == b"v"
        assert await other.delete(key)


@pytest.mark.asyncio
async def test_the_last_value_stands(board: Any) -> None:
    async with board() as (one, other):
        await one.set("k", b"1")
        await other.set("k", b"2")
        assert await one.get("k", WAIT) == b"2"


@pytest.mark.asyncio
async def test_delete_says_whether_there_was_something(board: Any) -> None:
    async with board() as (one, other):
        assert await one.delete("k") is False
        await one.set("k", b"v")
        assert await other.delete("k") is True
        assert await one.delete("k") is False
        with pytest.raises(RendezvousTimeout):
            await one.get("k", 0)


@pytest.mark.asyncio
async def test_a_get_waits_for_a_later_set(board: Any) -> None:
    async with board() as (one, other):
        waiting = [asyncio.create_task(store.get("k", WAIT)) for store in (one, other, one, other)]
        await _arrived(one, other)
        assert not any(task.done() for task in waiting)
        await one.set("other", b"")
        await other.set("k", b"v")
        assert await asyncio.gather(*waiting) == [b"v"] * 4


@pytest.mark.asyncio
async def test_a_key_can_be_waited_for_again_after_its_deletion(board: Any) -> None:
    async with board() as (one, other):
        for round_ in range(30):
            value = b"%d" % round_
            waiting = asyncio.create_task(one.get("k", WAIT))
            if round_ % 2:
                await _arrived(one)
            await other.set("k", value)
            assert await waiting == value
            assert await other.delete("k")


@pytest.mark.asyncio
async def test_many_gets_at_once_each_get_their_own(board: Any) -> None:
    async with board() as (one, other):
        waiting = [asyncio.create_task(one.get(f"k{i}", WAIT)) for i in range(64)]
        await asyncio.gather(*(other.set(f"k{i}", b"%d" % i) for i in reversed(range(64))))
        assert await asyncio.gather(*waiting) == [b"%d" % i for i in range(64)]


@pytest.mark.asyncio
async def test_a_get_in_vain_names_key_and_seconds_and_leaves_the_board_in_step(board: Any) -> None:
    async with board() as (one, other):
        for i in range(3):  # F24
            with pytest.raises(RendezvousTimeout, match=r"0\.05 s .*'missing'"):
                await one.get("missing", SHORT)
            await one.set("k", b"%d" % i)
            assert await one.get("k", WAIT) == b"%d" % i
            assert await other.get("k", WAIT) == b"%d" % i
        with pytest.raises(TimeoutError):
            await one.get("missing", SHORT)
        await other.set("missing", b"v")
        assert await one.get("missing", WAIT) == b"v"


@pytest.mark.asyncio
async def test_a_cancelled_get_leaves_nothing_behind(board: Any, complaints: Any) -> None:
    async with board() as (one, other):
        for arrive in (False, True):
            cancelled = [asyncio.create_task(one.get("k", WAIT)) for _ in range(3)]
            staying = asyncio.create_task(one.get("k", WAIT))
            await asyncio.sleep(0)
            if arrive:
                await _arrived(one)
            for task in cancelled:
                task.cancel()
            await other.set("k", b"v")
            assert await staying == b"v"
            await asyncio.wait(cancelled)
            assert all(task.cancelled() for task in cancelled)
            assert await other.delete("k")
        assert complaints == []


@pytest.mark.asyncio
async def test_cancelling_while_the_value_comes_is_silent(board: Any, complaints: Any) -> None:
    async with board() as (one, other):
        for i in range(50):  # F37: the race itself, from both sides
            task = asyncio.create_task(one.get(f"k{i}", WAIT))
            setting = asyncio.create_task(other.set(f"k{i}", b""))
            for _ in range(i % 7):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task, setting])
            assert setting.exception() is None
        assert complaints == []


@pytest.mark.asyncio
async def test_timeout_may_be_infinite(board: Any) -> None:
    async with board() as (one, other):
        waiting = asyncio.create_task(one.get("k", math.inf))
        await other.set("k", b"v")
        assert await waiting == b"v"


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["", None, 3, b"k", "a\0b", "\ud800", "k" * (MAX_KEY_BYTES + 1)])
async def test_an_unusable_key_is_refused_at_the_call(board: Any, key: Any) -> None:
    async with board() as (one, _):
        for call in (
            lambda: one.get(key, WAIT),
            lambda: one.set(key, b""),
            lambda: one.delete(key),
        ):
            with pytest.raises(UsageError, match="board key"):
                await call()
        await one.set("k", b"v")
        assert await one.get("k", WAIT) == b"v"


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["v", bytearray(b"v"), None, b"x" * (MAX_VALUE_BYTES + 1)])
async def test_an_unusable_value_is_refused_at_the_call(board: Any, value: Any) -> None:
    async with board() as (one, _):
        with pytest.raises(UsageError, match="'k'"):
            await one.set("k", value)
        with pytest.raises(RendezvousTimeout):
            await one.get("k", 0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "timeout", [-1, -0.001, math.nan, "1", None, True, pytest.param(10**400, id="huge")]
)
async def test_an_unusable_timeout_is_refused_at_the_call(board: Any, timeout: Any) -> None:
    async with board() as (one, _):
        with pytest.raises(UsageError, match="time-out"):
            await one.get("k", timeout)


@pytest.mark.asyncio
async def test_opening_is_counted(board: Any) -> None:
    async with board() as (one, other):
        await one.aopen()
        await one.aclose()
        await one.set("k", b"v")
        assert await other.get("k", WAIT) == b"v"


@pytest.mark.asyncio
async def test_the_last_close_fails_what_waits_and_all_that_comes_later(board: Any) -> None:
    async with board() as (one, _):
        waiting = [asyncio.create_task(one.get("k", WAIT)) for _ in range(3)]
        await asyncio.sleep(0)
        while not waiting[0].done():  # the memory board has two users by now, the others one
            await one.aclose()
            await asyncio.sleep(0)
        for task in waiting:
            with pytest.raises(ClosedError):
                await task
        for call in (lambda: one.get("k", 0), lambda: one.set("k", b""), lambda: one.delete("k")):
            with pytest.raises(ClosedError):
                await call()
        with pytest.raises(ClosedError):
            one.host
        await one.aclose()


@pytest.mark.asyncio
async def test_it_can_be_opened_again(board: Any) -> None:
    async with board() as (one, _):
        await one.aclose()
        async with one:
            await one.set("k", b"v")
            assert await one.get("k", WAIT) == b"v"
        await one.aopen()


@pytest.mark.asyncio
async def test_host_is_numeric(board: Any) -> None:
    async with board() as (one, other):
        for store in (one, other):
            assert ipaddress.ip_address(store.host).is_loopback


@pytest.mark.asyncio
async def test_two_loops_may_share_one_store(board: Any) -> None:
    async with board() as (one, other):
        name = loops.name_of(asyncio.get_running_loop())

        async def elsewhere() -> bytes:
            async with one:
                await one.set("from there", b"there")
                return await one.get("from here", WAIT)

        def run() -> bytes:
            with asyncio.Runner(loop_factory=loops.FACTORIES[name], debug=True) as runner:
                return runner.run(elsewhere())

        there = asyncio.create_task(asyncio.to_thread(run))
        assert await one.get("from there", WAIT) == b"there"
        await other.set("from here", b"here")
        assert await there == b"here"


@pytest.mark.asyncio
async def test_a_loop_that_ended_while_it_waited_is_no_fault(board: Any, complaints: Any) -> None:
    async with board() as (one, other):
        # F38: asyncio.run cancels what waits and closes the loop; the value comes after that.
        def run() -> None:
            async def leave() -> None:
                kept.append(asyncio.create_task(one.get("k", WAIT)))
                await asyncio.sleep(0)

            kept: list[asyncio.Task[bytes]] = []
            asyncio.run(leave(), debug=True)
            assert kept[0].cancelled()

        await asyncio.to_thread(run)
        await other.set("k", b"v")
        assert await one.get("k", WAIT) == b"v"
        assert complaints == []


def test_a_store_that_was_never_opened_says_so() -> None:
    for store in (MemoryStore(), TCPBoard(port=1), RayBoard()):
        with pytest.raises(UsageError, match="aopen"):
            store.host
        with asyncio.Runner() as runner:
            for call in (store.get("k", 1), store.set("k", b""), store.delete("k")):
                with pytest.raises(AiocommError, match="aopen"):
                    runner.run(call)
            runner.run(store.aclose())


async def _arrived(*stores: Store) -> None:
    """Calls of one store reach the board in order: after one that was answered, the others have."""
    await asyncio.sleep(0)
    for store in stores:
        await store.delete("never there")
