"""How a write finds those who wait: races, and writers that die half way."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from aiocomm.rendezvous import TCPBoard, board

from ..processes import Stage, Workers
from .boards import WAIT, arrived, board_threads, eventually


async def _set_late(stage: Stage, port: int, count: int) -> None:
    async with TCPBoard(port=port, timeout=WAIT) as board:
        await stage.wait("go")
        for number in range(count):
            await board.set(f"k{number}", b"%d" % number)


@pytest.mark.asyncio
async def test_hundreds_of_gets_take_two_threads() -> None:
    count = 200
    with Workers(1) as workers:
        async with TCPBoard(port=0, serve=True) as server:
            workers.start(_set_late, server.port, count)
            async with TCPBoard(port=server.port) as client:
                waiting = [asyncio.create_task(client.get(f"k{i}", WAIT)) for i in range(count)]
                await arrived(client)
                assert board_threads() == ["aiocomm-board"] * 2 + ["aiocomm-board-watch"]
                workers.set("go")
                values = await asyncio.gather(*waiting)
                assert values == [b"%d" % i for i in range(count)]
                assert not [t for t in threading.enumerate() if t.name.startswith("asyncio_")]
            await asyncio.to_thread(workers.join)


@pytest.mark.asyncio
async def test_gets_and_sets_that_race_always_meet() -> None:
    async with (
        TCPBoard(port=0, serve=True) as server,
        TCPBoard(port=server.port) as one,
        TCPBoard(port=server.port) as two,
    ):
        for number in range(300):
            key = f"k{number}"
            results = await asyncio.gather(one.get(key, WAIT), two.set(key, b"v"))
            assert results[0] == b"v"


@pytest.mark.asyncio
async def test_a_writer_that_died_half_way_leaves_nobody_deaf() -> None:
    async with TCPBoard(port=0, serve=True) as board:
        raw = dist.TCPStore("127.0.0.1", board.port, None, False, wait_for_workers=False)
        waiting = asyncio.create_task(board.get("k", WAIT))
        await arrived(board)
        token = raw.compare_set("aiocomm/await/k", "never", "never").decode()
        watcher = token.partition(".")[0]
        # It took the token and told the watcher, and died before it wrote the value.
        raw.set("aiocomm/await/k", "")
        raw.append(f"aiocomm/log/{watcher}", "k\0")
        raw.set(f"aiocomm/wake/{watcher}", "")
        # Until the watcher has put a new token there.
        await eventually(lambda: raw.compare_set("aiocomm/await/k", "never", "never") != b"")
        await board.set("k", b"v")
        assert await waiting == b"v"


@pytest.mark.asyncio
async def test_a_writer_that_died_after_the_value_has_woken_the_waiter() -> None:
    async with TCPBoard(port=0, serve=True) as board:
        raw = dist.TCPStore("127.0.0.1", board.port, None, False, wait_for_workers=False)
        waiting = asyncio.create_task(board.get("k", WAIT))
        await arrived(board)
        watcher = raw.compare_set("aiocomm/await/k", "never", "never").decode().partition(".")[0]
        raw.append(f"aiocomm/log/{watcher}", "k\0")
        raw.set(f"aiocomm/wake/{watcher}", "")  # another writer wakes it in between: too early
        await eventually(lambda: not raw.check([f"aiocomm/wake/{watcher}"]))
        raw.multi_set(["aiocomm/value/k", f"aiocomm/wake/{watcher}"], [b"v", b""])
        assert await waiting == b"v"


def test_entering_and_leaving_the_list_of_watchers() -> None:
    store = dist.HashStore()
    names = [f"{number:016x}" for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: board.enter(store, name), names))
        assert board.tokens(board.read(store, board.WATCHERS)) == set(names)
        list(pool.map(lambda name: board.leave(store, name), names[1:]))
    board.leave(store, "nobody")
    assert board.tokens(board.read(store, board.WATCHERS)) == {names[0]}
    board.say_goodbye(store, 0.0)
    assert board.read(store, board.wake_of(names[0])) == b""
    assert board.take_log(store, names[0]) == {board.GOODBYE}
    assert board.take_log(store, names[0]) == frozenset()
