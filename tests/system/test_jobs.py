"""Jobs of several workers: meeting in any order, rings, crowds, both sides sending first."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm.copier import MOST_THREADS
from aiocomm.testing import MemoryStore

from ..pairs import each_route, pair, ramp
from ..processes import Stage, Workers, run_workers
from .members import group_with, member

LOOPS = ["asyncio"]  # it starts processes; what differs by loop shows in the tests of the parts

MIB = 1 << 20


@each_route
@pytest.mark.asyncio
async def test_both_send_64_mib_first_in_one_process(route: str) -> None:  # F16
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    async with pair(route) as groups, asyncio.timeout(60):
        sends = [group.send(tensor) for group in groups]
        recvs = [group.recv() for group in groups]
        for received in await asyncio.gather(*recvs):
            assert torch.equal(received, tensor)
        await asyncio.gather(*sends)


async def both_send_first(stage: Stage, **options: Any) -> dict[str, int]:
    async with member(stage, **options) as collective:
        group = group_with(collective, 1 - stage.rank)
        tensor = torch.full((64 * MIB,), stage.rank, dtype=torch.uint8)
        buffer = torch.empty(64 * MIB, dtype=torch.uint8)
        send = group.send_tensor(tensor)
        recv = group.recv_tensor(buffer)
        await asyncio.gather(send, recv)
        assert (buffer == 1 - stage.rank).all()
        return {name: count.nbytes for name, count in group.statistics().received.items()}


@pytest.mark.parametrize("route", ["shm", "gloo", "link"])
def test_both_send_64_mib_first_between_processes(loop_name: str, route: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(both_send_first, route=route)
        for received in workers.join():
            assert set(received) == {route}


async def ring(stage: Stage) -> list[int]:
    async with member(stage) as collective:
        following, preceding = (stage.rank + 1) % stage.count, (stage.rank - 1) % stage.count
        to, of = group_with(collective, following), group_with(collective, preceding)
        token, seen = [stage.rank], []
        for _ in range(stage.count):
            send = to.send({"seen": token, "ballast": ramp(200_000, stage.rank)})
            message = await of.recv()
            assert torch.equal(message["ballast"], ramp(200_000, preceding))
            await send
            token = [*message["seen"], stage.rank]
            seen.append(message["seen"][-1])
        return token


def test_a_ring_of_three(loop_name: str) -> None:  # F21
    for rank, token in enumerate(run_workers(ring, 3, loop=loop_name)):
        assert len(token) == 4
        assert token[-1] == rank
        assert all((right - left) % 3 == 1 for left, right in itertools.pairwise(token))


async def opposite(stage: Stage) -> None:
    async with member(stage) as collective:
        names = ["g1", "g2"] if stage.rank == 0 else ["g2", "g1"]
        groups = {name: group_with(collective, 1 - stage.rank, name) for name in names}
        await asyncio.gather(*(group.ready() for group in groups.values()))  # F22, at once
        sends = [group.send((name, stage.rank)) for name, group in groups.items()]
        for name, group in groups.items():  # and one after the other
            assert await group.recv() == (name, 1 - stage.rank)
        await asyncio.gather(*sends)


def test_groups_made_in_opposite_orders(loop_name: str) -> None:
    run_workers(opposite, 2, loop=loop_name)


async def impatient(stage: Stage) -> list[str]:
    async with member(stage, connect_timeout=0.3) as collective:
        group = collective.create_collective_group([str(collective.address), "missing:0"])
        with pytest.raises(aiocomm.errors.RendezvousTimeout) as raised:
            await group.ready()
        await stage.barrier("in vain")
        return [str(raised.value)]


def test_a_member_that_is_missing_is_named(loop_name: str) -> None:  # F22, serially
    for (text,) in run_workers(impatient, 2, loop=loop_name):
        assert "missing:0 did not appear" in text


async def crowd(stage: Stage, count: int) -> int:
    async with member(stage) as collective:
        threads = threading.active_count()
        groups = [group_with(collective, 1 - stage.rank, f"group {n}") for n in range(count)]

        async def talk(number: int) -> None:
            send = groups[number].send(ramp(100_000, number))
            assert torch.equal(await groups[number].recv(), ramp(100_000, number))
            await send

        await asyncio.gather(*map(talk, range(count)))
        await stage.barrier("talked")
        await asyncio.gather(*(group.aclose() for group in groups))
        return threading.active_count() - threads


def test_twenty_groups_at_once(loop_name: str) -> None:  # F23
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(crowd, 20)
        for more_threads in workers.join():
            assert more_threads <= MOST_THREADS  # those that make large copies


def test_many_loops_in_one_process_make_and_close_groups() -> None:  # F21
    store = MemoryStore()
    meet = threading.Barrier(16)
    failures: list[BaseException] = []

    async def talk(number: int) -> None:
        async with aiocomm.open(f"w:{number}", store=store) as collective:
            partner = number ^ 1
            group = group_with(collective, partner)
            send = group.send(number)
            assert await group.recv() == partner
            await send

    def run(number: int) -> None:
        try:
            meet.wait(30)
            asyncio.run(talk(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


async def never_asks(stage: Stage) -> None:
    """Its runtime is open, it makes no group; only at the end it looks what there is."""
    async with member(stage) as collective:
        stage.set("open")
        await stage.wait("sent")
        group = group_with(collective, 1)
        assert await group.recv() == "small"
        assert torch.equal(await group.recv(), ramp(MIB))


async def sends_unasked(stage: Stage) -> None:
    async with member(stage) as collective:
        await stage.wait("open")
        group = group_with(collective, 0)
        await group.send("small")
        await group.send(ramp(MIB))  # taken in ahead, as far as the budget goes
        stage.set("sent")


def test_a_peer_that_makes_no_group_still_gets_its_messages(loop_name: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        workers.start(never_asks)
        workers.start(sends_unasked)
        workers.join()
