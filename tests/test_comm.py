"""``Comm``: calls before anything is open, peers by address, and the next life of a peer."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import Options, WorkerAddress
from aiocomm.comm import Comm, Seat
from aiocomm.errors import (
    AddressError,
    ClosedError,
    PairingError,
    PayloadError,
    PeerLostError,
    RendezvousError,
    UsageError,
    WrongLoopError,
)
from aiocomm.testing import MemoryStore

from . import loops
from .pairs import LARGE, ramp, until
from .test_presence import Board
from .transport.links import apart

each_loop = pytest.mark.asyncio


def make(address: str, board: MemoryStore, **settings: Any) -> Comm:
    return Comm(WorkerAddress.parse(address), board=board, options=Options(**settings))


@asynccontextmanager
async def comms(board: MemoryStore, *addresses: str) -> AsyncIterator[list[Comm]]:
    made = [make(address, board) for address in addresses]
    try:
        yield made
    finally:
        await asyncio.gather(*(comm.aclose() for comm in made))


@each_loop
async def test_calls_are_in_order_before_anything_is_open() -> None:
    board = Board()
    board.gate.clear()
    async with comms(board, "a:0", "b:0") as (a, b):
        sent = [a.send(number, "b", 0) for number in range(5)]
        received = [b.recv("a", 0) for _ in range(5)]
        await board.reached.wait()
        board.gate.set()
        assert await asyncio.gather(*received) == list(range(5))
        await asyncio.gather(*sent)
    assert board.users == 0


@each_loop
async def test_all_four_calls_in_both_directions() -> None:
    async with comms(MemoryStore(), "a:0", "b:3") as (a, b):
        data = ramp(LARGE)
        into = torch.empty_like(data)
        works = [a.send({"x": data}, "b", 3), a.send_tensor(data, "b", 3), b.send("back", "a", 0)]
        assert (await b.recv("a", 0))["x"].equal(data)
        assert await b.recv_tensor(into, "a", 0) is into
        assert into.equal(data)
        assert await a.recv("b", 3) == "back"
        await asyncio.gather(*works)
        assert a.address == WorkerAddress("a", 0)
        assert "a:0: 1 groups" in repr(a)


@each_loop
async def test_it_is_the_runtime_of_its_loop() -> None:
    async with comms(MemoryStore(), "a:0") as (a,):
        assert aiocomm.current().address == a.address
        await a.ready()
    with pytest.raises(UsageError, match="no runtime is open"):
        aiocomm.current()


@each_loop
async def test_the_group_of_a_peer_is_that_of_the_calls() -> None:
    async with comms(MemoryStore(), "a:0", "b:0") as (a, b):
        group = a.group("b", 0)
        assert a.group("b", 0) is group
        chained = b.recv("a", 0).then(str.upper)
        await group.send("x")
        assert await chained == "X"
        assert group.statistics().sent["memory"].messages == 1


@each_loop
@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [
        ("a", 0, "a:0 was given twice"),
        ("", 0, "worker name ''"),
        ("b", -1, "rank -1"),
        (None, 0, "worker name None"),
        (["b"], 0, "worker name"),
        ("b", {}, "rank {}"),
        ("b:0", 0, "give name and rank apart, as 'b', 0"),
    ],
)
async def test_peers_that_nobody_can_be(name: Any, rank: Any, text: str) -> None:
    async with comms(MemoryStore(), "a:0", "b:0") as (a, b):
        for call in (a.recv, a.group):
            with pytest.raises(AddressError, match=text):
                call(name, rank)
        for send in (a.send, a.send_tensor):
            with pytest.raises(AddressError, match=text):
                send(torch.ones(1), name, rank)
        a.send("next", "b", 0)  # the next call works
        assert await b.recv("a", 0) == "next"


@each_loop
async def test_what_a_group_refuses_is_refused_here() -> None:
    async with comms(MemoryStore(), "a:0", "b:0") as (a, b):
        with pytest.raises(PayloadError):
            a.send(lambda: None, "b", 0)
        with pytest.raises(PayloadError):
            a.send_tensor(torch.ones(4, 4).T, "b", 0)
        for call in (a.send, a.send_tensor):
            with pytest.raises(UsageError, match="async_op=False would stop the event loop"):
                call(torch.ones(1), "b", 0, async_op=False)
        with pytest.raises(UsageError, match="async_op=False"):
            a.recv("b", 0, async_op=False)
        a.send("object", "b", 0)
        with pytest.raises(PairingError):
            await b.recv_tensor(torch.ones(1), "a", 0)
        a.send("next", "b", 0)
        assert await b.recv("a", 0) == "next"


@each_loop
async def test_a_receive_that_timed_out_loses_nothing() -> None:
    async with comms(MemoryStore(), "a:0", "b:0") as (a, b):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await b.recv("a", 0)
        await a.send("late", "b", 0)
        assert await b.recv("a", 0) == "late"


@each_loop
async def test_a_board_that_refuses_is_an_error_at_each_call_until_it_does_not() -> None:
    board = Board(refusals=2)
    async with comms(board, "b:0") as (b,):
        async with asyncio.timeout(20):
            with pytest.raises(RendezvousError, match="the board is not there"):
                await b.ready()
            for call in (b.recv("a", 0), b.recv("c", 0)):
                with pytest.raises(RendezvousError, match="the board is not there") as raised:
                    await call
                assert raised.value.peer in ("a:0", "c:0")
        async with comms(board, "a:0") as (a,):
            a.send("at last", "b", 0)
            assert await b.recv("a", 0) == "at last"


# --- the next life of a peer ---


@each_loop
async def test_pending_calls_fail_with_the_peer_and_the_next_ones_reach_its_next_life() -> None:
    board = MemoryStore()
    with apart("unix"):
        async with comms(board, "a:0") as (a,):
            for life in range(3):
                b = make("b:0", board)
                await b.send(life, "a", 0)
                assert await a.recv("b", 0) == life
                pending = a.recv("b", 0)
                b.group("a", 0)._session._link.abort()  # as its process dies
                with pytest.raises(PeerLostError):
                    await pending
                await b.abort()
            assert len(a._groups) == 1
            assert not a._former


@each_loop
async def test_what_a_dead_peer_had_sent_whole_is_received_first() -> None:
    board = MemoryStore()
    with apart("unix"):
        async with comms(board, "a:0") as (a,):
            for life in range(2):
                b = make("b:0", board)
                await asyncio.gather(*(b.send((life, number), "a", 0) for number in range(3)))
                await until(lambda: _unreceived(a) == 3)
                if life:
                    await b.send("sent", "a", 0)
                    await until(lambda: _unreceived(a) == 4)
                else:
                    await b.aclose()
                    await until(lambda: _states(a) == ["lost"])
            answer = a.send("to the second life", "b", 0)
            assert await b.recv("a", 0) == "to the second life"
            await answer
            came = [await a.recv("b", 0) for _ in range(7)]
            assert came == [*((0, n) for n in range(3)), *((1, n) for n in range(3)), "sent"]
            assert not a._former
            await b.aclose()


def _sessions(comm: Comm) -> list[Any]:
    return [cached.session for cached in comm._collective._cached()]


def _states(comm: Comm) -> list[str]:
    return [session.state.value for session in _sessions(comm)]


def _unreceived(comm: Comm) -> int:
    return sum(s.receiving.unreceived for s in _sessions(comm) if s.state.value == "up")


@each_loop
async def test_a_group_that_the_user_closed_gives_way_to_a_new_one() -> None:
    async with comms(MemoryStore(), "a:0", "b:0") as (a, b):
        await a.send(1, "b", 0)
        assert await b.recv("a", 0) == 1
        await a.group("b", 0).aclose()
        second = b.recv("a", 0)
        a.send(2, "b", 0)
        try:
            assert await second == 2
        except PeerLostError:  # it was in line before the goodbye arrived
            assert await b.recv("a", 0) == 2


@each_loop
async def test_a_lost_group_holds_nothing_of_those_who_waited() -> None:  # F20
    board = MemoryStore()

    async def use(wait: Callable[[], Awaitable[Any]]) -> weakref.ref[Any]:
        data = ramp(LARGE)  # what the frame of the waiting function holds
        with pytest.raises(PeerLostError):
            await wait()
        return weakref.ref(data)

    with apart("unix"):
        async with comms(board, "a:0") as (a,):
            b = make("b:0", board)
            await b.send(1, "a", 0)
            assert await a.recv("b", 0) == 1
            group = a.group("b", 0)
            waiting = [asyncio.create_task(use(lambda: a.recv("b", 0))) for _ in range(2)]
            await until(lambda: group.statistics().pending_recvs == 2)
            await b.abort()
            held = [*await asyncio.gather(*waiting)]
            held += [await use(call) for call in (group.recv, lambda: group.send(1), group.ready)]
            waiting.clear()
            gc.collect()
            assert [each() for each in held] == [None] * 5
            assert group.statistics().state == "lost"


# --- threads, loops, closing ---


@each_loop
async def test_no_loop_in_this_thread_names_what_to_use() -> None:
    def without_loop() -> None:
        with pytest.raises(UsageError, match=r"a:0 has no event loop.*BlockingWorker"):
            make("a:0", MemoryStore())

    await asyncio.to_thread(without_loop)


@each_loop
async def test_another_loop_is_refused() -> None:
    async with comms(MemoryStore(), "a:0") as (a,):

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                a.send(1, "b", 0)

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))


@each_loop
async def test_after_closing_every_call_says_so() -> None:
    board = Board()
    a = make("a:0", board)
    await a.ready()
    waiting = a.recv("b", 0)
    await a.aclose()
    await a.aclose()
    await a.abort()
    with pytest.raises(ClosedError):
        await waiting
    for call in (lambda: a.send(1, "b", 0), lambda: a.recv("c", 0), lambda: a.group("b", 0)):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        await a.ready()
    assert board.users == 0


@each_loop
async def test_closing_from_the_thread_that_ends_the_process_lets_sends_leave() -> None:
    board = MemoryStore()
    with apart("unix"):
        async with comms(board, "b:0") as (b,):
            a = make("a:0", board)
            a.send(ramp(LARGE), "b", 0)
            await asyncio.to_thread(a.close_from_thread)
            assert (await b.recv("a", 0)).equal(ramp(LARGE))


def test_closing_when_the_loop_has_stopped_runs_it_once_more(loop_name: str) -> None:
    loop = loops.make(loop_name, [])
    board = Board()

    async def use() -> Comm:
        a = make("a:0", board)
        await a.ready()
        return a

    a = loop.run_until_complete(use())
    a.close_from_thread()
    assert board.users == 0
    loop.close()


def test_closing_when_the_loop_is_gone_does_nothing() -> None:
    async def use() -> Comm:
        a = make("a:0", MemoryStore())
        await a.ready()
        await a.aclose()
        return a

    asyncio.run(use()).close_from_thread()


def test_closing_from_a_thread_waits_for_a_stuck_loop_only_so_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiocomm.comm.CLOSE_GRACE", 0.0)
    go, made = threading.Event(), threading.Event()
    found: list[Comm] = []

    async def use() -> None:
        found.append(make("a:0", MemoryStore(), close_timeout=0.05))
        await found[0].ready()
        made.set()
        go.wait()  # stuck
        await found[0].abort()

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    made.wait()
    found[0].close_from_thread()
    go.set()
    thread.join()
    assert "ends without a goodbye: its event loop is stuck" in caplog.text


@pytest.mark.parametrize("wrong", [{"address": "a:0"}, {"board": "somewhere"}, {"options": {}}])
def test_a_seat_takes_nothing_else(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"^{name} .* is not usable: give an aiocomm"):
        Seat(**wrong)
