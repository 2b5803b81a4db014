"""Chains of ``then`` on works of a group, and the examples of the seed document as written."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import AsyncWork
from aiocomm.errors import PeerClosedError
from aiocomm.testing import MemoryStore

from ..pairs import LARGE, MEMBERS, each_route, pair, ramp, until

aio = pytest.mark.asyncio


@aio
@each_route
async def test_plain_and_coroutine_functions_take_the_result(route: str) -> None:
    async with pair(route) as (a, b):
        loop_thread = threading.get_ident()

        def plain(tensor: torch.Tensor, plus: int, *, times: int) -> int:
            assert threading.get_ident() == loop_thread
            return (int(tensor.sum()) + plus) * times

        async def later(number: int) -> str:
            await asyncio.sleep(0)
            return f"it is {number}"

        chain = b.recv().then(plain, 1, times=2).then(later).then(str.upper)
        await a.send(torch.ones(LARGE))
        assert await chain == f"IT IS {2 * (LARGE + 1)}"


@aio
@each_route
async def test_a_function_that_returns_work_is_followed_to_its_end(route: str) -> None:
    async with pair(route) as (a, b):

        def answer(number: int) -> AsyncWork[Any]:
            return b.send(number + 1).then(lambda _: b.recv()).then(lambda last: (number, last))

        chain = b.recv().then(answer)
        await a.send(1)
        assert await a.recv() == 2
        assert not chain.done()
        await a.send("last word")
        assert await chain == (1, "last word")


@aio
async def test_each_then_is_a_branch_of_its_own() -> None:
    async with pair("link") as (a, b):
        recv = b.recv()
        assert recv.get_next_work() is None
        assert recv.get_last_work() is recv
        left, right = recv.then(lambda x: x + 1), recv.then(lambda x: x * 10)
        end = right.then(str)
        assert recv.get_next_work() is right
        assert recv.get_last_work() is end
        await a.send(4)
        assert (await left, await right, await end, await recv) == (5, 40, "40", 4)


@aio
async def test_an_exception_skips_the_rest_and_reaches_every_branch() -> None:
    async with pair("link") as (a, b):
        called: list[Any] = []

        def fails(_: Any) -> None:
            raise ZeroDivisionError("in the function")

        recv = b.recv()
        failed = recv.then(fails)
        branches = [failed.then(called.append), failed.then(called.append).then(called.append)]
        await a.send(1)
        for branch in branches:
            with pytest.raises(ZeroDivisionError, match="in the function") as raised:
                await branch
            assert "fails" in [entry.name for entry in raised.traceback]
        assert await recv == 1
        assert called == []
        await a.send(2)
        assert await b.recv() == 2


@aio
async def test_the_loss_of_the_peer_runs_down_the_chain() -> None:
    async with pair("memory") as (a, b):
        chain = b.recv().then(lambda _: None).then(lambda _: None)
        await asyncio.gather(a.ready(), b.ready())
        await a.aclose()
        with pytest.raises(PeerClosedError):
            await chain


@aio
async def test_what_nobody_retrieves_is_reported_once(complaints: list[Any]) -> None:  # F41
    async with pair("link") as (a, b):

        def fails(_: Any) -> None:
            raise ZeroDivisionError

        b.recv().then(fails).then(str)
        gc.collect()
        await a.send(1)
        await until(lambda: (gc.collect() and complaints) or complaints)
        assert [complaint["exception"].__class__ for complaint in complaints] == [ZeroDivisionError]
        complaints.clear()


@aio
async def test_a_time_out_around_a_chain_loses_no_message() -> None:
    async with pair("link") as (a, b):
        called: list[Any] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await b.recv().then(called.append)
        await a.send("kept")
        assert await b.recv() == "kept"
        assert called == []


# --- the seed document ---


@aio
@each_route
async def test_the_example_of_the_seed_on_the_async_group(route: str) -> None:
    async with pair(route) as (group, other):
        obj, tensor = {"weights": ramp(LARGE)}, torch.zeros(LARGE, dtype=torch.uint8)
        echo = other.recv().then(other.send)

        # Awaited in the loop.
        send_work = group.send(obj, async_op=True)
        await send_work.async_wait()

        # wait() blocks, so it is for a thread.
        def in_a_thread() -> Any:
            recv_work = group.recv(async_op=True)
            return recv_work.wait()

        received = await asyncio.to_thread(in_a_thread)
        assert torch.equal(received["weights"], obj["weights"])
        await echo

        seen: list[Any] = []

        def postprocess(buf: torch.Tensor) -> None:
            seen.append(buf)
            return None

        def chained_in_a_thread() -> Any:
            w = group.recv_tensor(tensor, async_op=True)
            w2 = w.then(postprocess)
            return w2.wait()

        waiting = asyncio.ensure_future(asyncio.to_thread(chained_in_a_thread))
        await other.send_tensor(ramp(LARGE))
        assert await waiting is None
        assert seen == [tensor]
        assert torch.equal(tensor, ramp(LARGE))


def test_the_example_of_the_seed_on_the_blocking_group() -> None:
    store = MemoryStore()
    obj, tensor = {"weights": ramp(100_000)}, torch.zeros(LARGE, dtype=torch.uint8)
    seen: list[Any] = []

    def other_side() -> None:
        with aiocomm.blocking.open("b:0", store=store) as collective:
            group = collective.create_collective_group(MEMBERS)
            group.send(group.recv())
            group.send_tensor(ramp(LARGE))
            assert group.recv() == "done"

    thread = threading.Thread(target=other_side)
    thread.start()
    with aiocomm.blocking.open("a:0", store=store) as collective:
        group = collective.create_collective_group(MEMBERS)
        send_work = group.send(obj, async_op=True)
        assert send_work.wait() is None

        recv_work = group.recv(async_op=True)
        obj = recv_work.wait()
        assert torch.equal(obj["weights"], ramp(100_000))

        def postprocess(buf: torch.Tensor) -> None:
            seen.append(buf)
            return None

        w = group.recv_tensor(tensor, async_op=True)
        w2 = w.then(postprocess)
        assert w2.wait() is None
        assert seen == [tensor]
        assert torch.equal(tensor, ramp(LARGE))
        group.send("done")
    thread.join()
