"""The same groups without an event loop: both modes, many threads, one process and two."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import Options, TCPBoard, WorkerAddress, blocking
from aiocomm.errors import (
    AddressError,
    ClosedError,
    PairingError,
    PayloadError,
    PeerClosedError,
    UsageError,
    WouldBlockError,
    WrongLoopError,
)
from aiocomm.handles.base import AsyncWork
from aiocomm.testing import MemoryStore

from .processes import Stage, Workers, run_workers

MEMBERS = ["a:0", "b:0"]
BULK = 1 << 20  # bytes; far above the eager limit
WAIT = 30.0  # seconds; guards against hanging


def opened(address: str, store: Any, **settings: Any) -> Any:
    return blocking.open(address, store=store, options=Options(**settings))


def elsewhere(call: Callable[[], Any]) -> Any:
    """What it returns, called on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def exchange(group: blocking.CollectiveGroup, rank: int) -> list[float]:
    """Both modes of every call, small and large; the sums of what came."""
    sums = []
    for size in (8, BULK):
        data = torch.full((size,), rank + 1, dtype=torch.uint8)
        into = torch.zeros(size, dtype=torch.uint8)
        works = [group.send({"data": data}, async_op=True), group.send_tensor(data, async_op=True)]
        if rank:
            sums.append(float(group.recv()["data"].sum()))
            assert group.recv_tensor(into) is into
        else:
            got = group.recv(async_op=True).then(lambda message: message["data"].sum())
            filled = group.recv_tensor(into, async_op=True)
            sums.append(float(got.wait()))
            assert filled.wait() is into
        sums.append(float(into.sum()))
        assert [work.wait() for work in works] == [None, None]  # type: ignore[func-returns-value]
        if rank:
            assert group.send(data) is None  # type: ignore[func-returns-value]
            assert group.send_tensor(data) is None  # type: ignore[func-returns-value]
        else:
            group.recv()
            group.recv_tensor(into)
    return sums


def work_blocking(stage: Stage, board: TCPBoard, address: str) -> tuple[list[float], list[str]]:
    with blocking.open(address, store=board) as collective:
        group = collective.create_collective_group(MEMBERS)
        group.ready()
        sums = exchange(group, stage.rank)
        return sums, sorted(group.statistics().sent)


def test_two_processes_exchange() -> None:
    with TCPBoard(port=0, serve=True) as board, Workers(2) as workers:
        for address in MEMBERS:
            workers.start(work_blocking, board, address)
        first, second = workers.join()
    assert first == ([16.0, 16.0, 2.0 * BULK, 2.0 * BULK], ["link", "shm"])
    assert second == ([8.0, 8.0, 1.0 * BULK, 1.0 * BULK], ["link", "shm"])


def test_two_runtimes_of_one_process_exchange() -> None:
    store = MemoryStore()
    with opened("a:0", store) as a, opened("b:0", store) as b, ThreadPoolExecutor(2) as pool:
        groups = [each.create_collective_group(MEMBERS) for each in (a, b)]
        sums = list(pool.map(exchange, groups, (0, 1)))
        assert sums == [[16.0, 16.0, 2.0 * BULK, 2.0 * BULK], [8.0, 8.0, 1.0 * BULK, 1.0 * BULK]]
        assert set(groups[0].statistics().sent) == {"memory"}


def test_what_a_group_says_of_itself() -> None:
    store = MemoryStore()
    with opened("a:0", store) as a, opened("b:0", store) as b:
        assert a.address == WorkerAddress("a", 0)
        group = a.create_collective_group(reversed(MEMBERS), "weights")
        other = b.create_collective_group(MEMBERS, group_name="weights")
        assert (group.name, group.rank, other.rank) == ("weights", 0, 1)
        assert group.peer == WorkerAddress("b", 0)
        assert [str(member) for member in group.members] == MEMBERS
        assert "<blocking <CollectiveGroup 'weights' rank 0 of a:0, b:0: new" in repr(group)
        assert repr(a) == "<blocking <Collective a:0: 1 groups>>"
        assert group.statistics().state == "new"
        group.ready()
        assert (group.statistics().state, other.statistics().peer) == ("up", "a:0")


def test_each_thread_keeps_its_order() -> None:
    store, threads, each = MemoryStore(), 6, 60
    with opened("a:0", store) as a, opened("b:0", store) as b, ThreadPoolExecutor(threads) as pool:
        ours, theirs = (collective.create_collective_group(MEMBERS) for collective in (a, b))
        start = threading.Barrier(threads)

        def send(thread: int) -> None:
            start.wait()
            for number in range(each):
                ours.send((thread, number), async_op=bool(number % 2))

        sending = [pool.submit(send, thread) for thread in range(threads)]
        got = [theirs.recv() for _ in range(threads * each)]
        for future in sending:
            future.result()
    for thread in range(threads):
        assert [number for of, number in got if of == thread] == list(range(each))


def test_errors_come_out_of_the_calls() -> None:
    store = MemoryStore()
    with opened("a:0", store) as a, opened("b:0", store) as b:
        ours, theirs = (collective.create_collective_group(MEMBERS) for collective in (a, b))
        with pytest.raises(AddressError, match="a:0 is not a member"):
            a.create_collective_group(["b:0", "c:0"])
        with pytest.raises(PayloadError):
            ours.send(lambda: None)
        with pytest.raises(PayloadError):
            ours.send_tensor(torch.zeros(4, 4).T)
        ours.send([1])
        with pytest.raises(PairingError, match=r"send\(obj\) met recv_tensor"):
            theirs.recv_tensor(torch.zeros(3))
        ours.send([2])
        assert theirs.recv() == [2]
        late = theirs.recv(async_op=True)
        where = r"group a:0\|b:0, direction recv, peer a:0> was not done within 0.0 s; it goes on"
        for work in (late, late.then(len).then(str)):
            with pytest.raises(TimeoutError, match=where):
                work.wait(0.0)


def test_closing_and_what_is_refused_afterwards() -> None:
    store = MemoryStore()
    with opened("a:0", store) as a, opened("b:0", store) as b:
        ours, theirs = (collective.create_collective_group(MEMBERS) for collective in (a, b))
        ours.ready()
        waiting = theirs.recv(async_op=True)
        ours.close()
        ours.close()
        with pytest.raises(ClosedError, match="create_collective_group makes a new one"):
            ours.send(1)
        with pytest.raises(PeerClosedError):
            waiting.wait()
        theirs.abort()
        again = [collective.create_collective_group(MEMBERS) for collective in (a, b)]
        again[0].send("new")
        assert again[1].recv() == "new"
        again[1].send("unreceived", async_op=True)
    for refused in (
        lambda: again[0].send(1),
        lambda: again[0].recv(async_op=True),
        again[0].statistics,
        again[0].ready,
        lambda: a.create_collective_group(MEMBERS),
    ):
        with pytest.raises(ClosedError, match="closed"):
            refused()
    again[0].close()
    again[0].abort()


def use_in_a_fork(stage: Stage) -> int:
    with opened("a:0", MemoryStore()) as a:
        group = a.create_collective_group(MEMBERS)
        calls = [group.statistics, group.recv, lambda: a.create_collective_group(MEMBERS)]
        if not (pid := os.fork()):
            try:
                for call in calls:
                    with pytest.raises(WrongLoopError, match="before this one was forked"):
                        call()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert group.statistics().state == "new"
    return status


def test_a_forked_child_is_refused_at_once() -> None:
    assert run_workers(use_in_a_fork, 1) == [0]


@pytest.mark.asyncio
async def test_a_thread_that_runs_a_loop_is_told_to_await() -> None:
    store = MemoryStore()
    entered = asyncio.Event()
    leave = threading.Event()
    loop = asyncio.get_running_loop()
    held: list[Any] = []

    def hold() -> None:
        with opened("a:0", store) as a:
            group = a.create_collective_group(MEMBERS)
            held.extend((a, group, group.recv(async_op=True)))
            loop.call_soon_threadsafe(entered.set)
            leave.wait()

    with pytest.raises(WouldBlockError, match=r"use aiocomm\.open and await"), opened("b:0", store):
        pass
    holding = asyncio.ensure_future(asyncio.to_thread(hold))
    await entered.wait()
    a, group, work = held
    again = lambda: a.create_collective_group(MEMBERS)  # noqa: E731
    for call in (group.ready, group.statistics, again, group.recv, lambda: group.send(1)):
        with pytest.raises(WouldBlockError, match=r"use aiocomm\.open and await"):
            call()
    with pytest.raises(WrongLoopError, match="opened in another event loop"):
        group.send(1, async_op=True)
    with pytest.raises(WouldBlockError, match=r"asyncio\.to_thread\(work\.wait\)"):
        work.wait()
    with pytest.raises(WrongLoopError):
        await work
    leave.set()
    await holding


def test_an_interrupted_recv_takes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with opened("a:0", store) as a, opened("b:0", store) as b:
        ours, theirs = (collective.create_collective_group(MEMBERS) for collective in (a, b))
        with monkeypatch.context() as patch:

            def interrupted(work: AsyncWork[Any], timeout: float | None = None) -> None:
                raise KeyboardInterrupt

            patch.setattr(AsyncWork, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                theirs.recv()
        ours.send("whole")
        assert theirs.recv() == "whole"


def test_a_time_out_takes_no_message() -> None:
    store = MemoryStore()
    with opened("a:0", store) as a, opened("b:0", store) as b:
        ours, theirs = (collective.create_collective_group(MEMBERS) for collective in (a, b))
        late = r"direction recv, peer a:0: not done within 0\.01 s, and taken back"
        into = torch.zeros(3)
        for call in (theirs.recv, lambda timeout: theirs.recv_tensor(into, timeout=timeout)):
            with pytest.raises(TimeoutError, match=late):
                call(timeout=0.01)
        ours.send("whole")
        assert theirs.recv(timeout=WAIT) == "whole"
        ours.send_tensor(torch.ones(3))
        assert theirs.recv_tensor(into, timeout=WAIT) is into
        with pytest.raises(UsageError, match="time-out"):
            theirs.recv(timeout=-1)


def test_opening_fails_as_the_async_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOMM_ADDRESS", raising=False)
    with pytest.raises(AddressError, match="set AIOCOMM_ADDRESS"), blocking.open():
        pass
    with pytest.raises(ZeroDivisionError), opened("a:0", MemoryStore()):
        raise ZeroDivisionError


def test_it_runs_on_uvloop_in_a_thread_of_its_own() -> None:
    with opened("a:0", MemoryStore()) as a:
        loop = a._collective._runtime.loop
        assert type(loop).__module__.startswith("uvloop")
        assert elsewhere(lambda: a.create_collective_group(MEMBERS).rank) == 0
    assert loop.is_closed()
    assert aiocomm.blocking is blocking


# --- the communication of an actor, by the peer's address ---


def test_all_calls_by_address_in_both_modes_before_the_board_is_open() -> None:
    store = MemoryStore()
    a, b = (comm(address, store) for address in MEMBERS)
    data, into = torch.arange(BULK, dtype=torch.uint8), torch.empty(BULK, dtype=torch.uint8)
    works = [a.send({"x": data}, "b", 0, async_op=True), a.send_tensor(data, "b", 0, async_op=True)]
    assert b.recv("a", 0)["x"].equal(data)
    assert b.recv_tensor(into, "a", 0) is into
    assert into.equal(data)
    b.send("back", "a", 0)
    assert a.recv("b", 0, async_op=True).wait() == "back"
    for work in works:
        work.wait()
    assert a.address == WorkerAddress("a", 0)
    group = a.group("b", 0)
    assert group.peer == WorkerAddress("b", 0)
    group.send("by the group")
    assert b.recv("a", 0) == "by the group"
    assert repr(a) == "<blocking <Comm of <Collective a:0: 1 groups>>>"
    for each in (a, b):
        each.close()


def comm(address: str, store: Any, **settings: Any) -> blocking.Comm:
    return blocking.Comm(WorkerAddress.parse(address), board=store, options=Options(**settings))


def test_many_threads_share_it() -> None:
    store = MemoryStore()
    a, b = (comm(address, store) for address in MEMBERS)
    with ThreadPoolExecutor(100) as pool:
        received = [pool.submit(b.recv, "a", 0) for _ in range(50)]
        sent = [pool.submit(a.send, number, "b", 0) for number in range(50)]
        assert sorted(each.result() for each in received) == list(range(50))
        for each in sent:
            each.result()
    a.abort()
    b.abort()


def test_what_cannot_work_is_refused_and_the_next_call_works() -> None:
    store = MemoryStore()
    a, b = (comm(address, store) for address in MEMBERS)
    with pytest.raises(AddressError):
        a.send(1, "a", 0)
    with pytest.raises(AddressError):
        a.group("", 0)
    for call in (a.group, a.recv):
        with pytest.raises(AddressError, match="give name and rank apart"):
            call("b:0", 0)
    with pytest.raises(PayloadError):
        a.send(lambda: None, "b", 0)

    async def on_a_loop() -> None:
        for call in (lambda: a.recv("b", 0), a.ready, a.close):
            with pytest.raises(WouldBlockError):
                call()

    asyncio.run(on_a_loop())
    a.ready()
    a.send("next", "b", 0)
    assert b.recv("a", 0) == "next"
    a.close()
    b.close()


def test_closing_ends_the_calls_that_wait_and_those_that_come() -> None:
    a = comm("a:0", MemoryStore())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.recv, "b", 0)
        while not a._comm._groups:  # the call is in the loop's line from then on
            pass
        a.close()
        with pytest.raises(ClosedError):
            waiting.result()
    for call in (lambda: a.send(1, "b", 0), lambda: a.recv("c", 0), a.ready):
        with pytest.raises(ClosedError):
            call()
    a.close()
    a.abort()


def test_the_next_life_of_a_peer_is_met() -> None:
    store = MemoryStore()
    a = comm("a:0", store)
    for life in range(2):
        b = comm("b:0", store)
        b.send(life, "a", 0)
        assert a.recv("b", 0) == life
        waiting = a.recv("b", 0, async_op=True)
        b.close()
        with pytest.raises(PeerClosedError):
            waiting.wait()
    a.close()
