"""Shared memory between processes: who dies, what is full, what is kept; nothing is ever left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import aiocomm
from aiocomm.errors import PeerLostError, RouteError
from aiocomm.transport.shm import receipts

from ..pairs import pair, until
from ..processes import Stage, Workers, run_workers
from .members import group_with, member

LOOPS = ["uvloop"]  # it starts processes; what differs by loop shows in the tests of the parts

MIB = 1 << 20


def value_of(number: int, size: int = 8 * MIB) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


def named() -> set[str]:
    """Shared memory with a name; others on this machine may make semaphores there meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def routes(group: Any) -> set[str]:
    sent = group.statistics()
    return {*sent.sent, *sent.received}


async def lends_and_dies(stage: Stage) -> None:
    async with member(stage, serve=1) as collective:
        group = group_with(collective, 1)
        for number in range(3):
            await group.send({"x": value_of(number)})
        stage.set("sent")
        await stage.wait("never")


async def keeps_what_the_dead_lent(stage: Stage) -> None:
    async with member(stage, serve=1) as collective:
        group = group_with(collective, 0)
        got = [await group.recv() for _ in range(2)]
        await stage.wait("sent")
        recv = group.recv()
        stage.set("received")
        late = await recv  # whole here already
        with pytest.raises(PeerLostError):
            await group.recv()
        for number, message in enumerate([*got, late]):
            assert message["x"].equal(value_of(number))
        got[0]["x"].fill_(9)
        assert routes(group) <= {"shm", "link"}


def test_what_the_sender_lent_outlives_its_death(loop_name: str) -> None:
    before = named()
    with Workers(2, loop=loop_name) as workers:
        dying = workers.start(lends_and_dies)
        alive = workers.start(keeps_what_the_dead_lent)
        workers.wait("received")
        dying.kill()
        assert alive.result() is None
    assert named() == before


async def takes_and_dies(stage: Stage) -> None:
    async with member(stage) as collective:
        group = group_with(collective, 0)
        kept = await group.recv()
        stage.set("taken")
        await stage.wait("never")
        del kept


async def outlives_its_receiver(stage: Stage) -> None:
    async with member(stage, shm_bytes=32 * MIB) as collective:
        group = group_with(collective, 1)
        other = group_with(collective, 2)
        await group.send([value_of(1)])
        works = [group.send_tensor(value_of(2)) for _ in range(20)]  # more than the pool holds
        await stage.wait("dead")
        await asyncio.wait(works)
        assert isinstance(works[-1].exception(), PeerLostError)
        for work in works[:-1]:
            work.exception()
        await other.send([value_of(3)])  # the others go on
        assert (await other.recv())[0].equal(value_of(3))


async def echoes_one(stage: Stage) -> None:
    async with member(stage) as collective:
        group = group_with(collective, 0)
        await group.send(await group.recv())
        await group.aclose()


def test_the_death_of_the_receiver_fails_the_sends_and_no_other_group(loop_name: str) -> None:
    with Workers(3, loop=loop_name) as workers:
        alive = workers.start(outlives_its_receiver)
        dying = workers.start(takes_and_dies)
        workers.start(echoes_one)
        workers.wait("taken")
        dying.kill()
        workers.set("dead")
        workers.join()
        assert alive.result() is None


async def keeps_everything(stage: Stage) -> dict[str, int]:
    async with member(stage, shm_bytes=32 * MIB) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank == 0:
            for number in range(24):
                await group.send({"x": value_of(number), "number": number})
            await group.recv()
        else:
            kept = [await group.recv() for _ in range(24)]
            for number, message in enumerate(kept):
                assert message["number"] == number
                assert message["x"].equal(value_of(number))
            await group.send("done")
        return {name: count.messages for name, count in group.statistics().sent.items()}


def test_a_receiver_that_never_lets_go_of_anything_stops_nobody(loop_name: str) -> None:
    sent, _ = run_workers(keeps_everything, 2, loop=loop_name)
    assert sent == {"shm": 24}


async def is_short_of_memory(stage: Stage, shm_bytes: int, limit: int, size: int) -> set[str]:
    """The sender may make no segment of more than ``limit`` bytes once the route is up."""
    async with member(stage, shm_bytes=shm_bytes) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank:
            for number in range(4):
                message = await group.recv()
                assert message["x"].equal(value_of(number, size))
                buffer = torch.empty(size, dtype=torch.uint8)
                assert (await group.recv_tensor(buffer)).equal(value_of(number, size))
            return routes(group)
        await group.send({"x": value_of(0, size)})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        await group.send_tensor(value_of(0, size))
        for number in range(1, 4):
            await group.send({"x": value_of(number, size)})
            await group.send_tensor(value_of(number, size))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return routes(group)


@pytest.mark.parametrize(
    ("shm_bytes", "limit", "size"),
    [
        pytest.param(64 * 1024, 1 << 30, 2 * MIB, id="pool smaller than a tensor"),
        pytest.param(64 * MIB, 4096, 16 * MIB, id="memory runs out in the middle"),
    ],
)
def test_the_ring_serves_where_there_is_no_more(
    loop_name: str, shm_bytes: int, limit: int, size: int
) -> None:
    for found in run_workers(is_short_of_memory, 2, shm_bytes, limit, size, loop=loop_name):
        assert found == {"shm"}


async def has_no_shared_memory(stage: Stage, rank: int) -> tuple[set[str], list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aiocomm").addHandler(handler)
    logging.getLogger("aiocomm").propagate = False
    if stage.rank == rank:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    async with member(stage) as collective:
        group = group_with(collective, 1 - stage.rank)
        for number in range(3):
            if stage.rank == 0:
                await group.send({"x": value_of(number)})
            else:
                assert (await group.recv())["x"].equal(value_of(number))
        large = routes(group)
        if stage.rank == 0:
            await group.send(value_of(3, 20 << 10))  # would have gone by shared memory
        else:
            assert (await group.recv()).equal(value_of(3, 20 << 10))
        assert routes(group) - large == {"link"}
        return large, warnings


def test_without_shared_memory_gloo_takes_over_with_one_warning(loop_name: str) -> None:
    found = run_workers(has_no_shared_memory, 2, 0, loop=loop_name)
    assert [sorted(each) for each, _ in found] == [["gloo"], ["gloo"]]
    (warning,) = found[0][1]
    assert "route shm cannot be set up, falling back to the next one" in warning
    assert "bytes of shared memory cannot be had: File too large" in warning


async def runs_out_of_descriptors(stage: Stage) -> None:
    async with member(stage) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank == 0:
            await group.send({"x": value_of(0, 2 * MIB)})
            await stage.wait("out")
            work = group.send({"x": value_of(1)})  # a segment that the peer does not have yet
            with contextlib.suppress(RouteError):
                await work
            assert await group.recv() == "the other direction goes on"
            return
        await group.recv()
        spare = [os.open(os.devnull, os.O_RDONLY)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard)
        )
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(spare[0]))
        stage.set("out")
        with pytest.raises(RouteError, match="no descriptor is left here"):
            await group.recv()
        for descriptor in spare:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await group.send("the other direction goes on")


def test_a_receiver_without_descriptors_loses_that_direction_only(loop_name: str) -> None:
    run_workers(runs_out_of_descriptors, 2, loop=loop_name)


async def shares(stage: Stage, aliased: bool) -> int:
    async with member(stage) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank == 0:
            module = aiocomm.share_(torch.nn.Linear(1024, 1024), aliased=aliased)
            with torch.no_grad():
                module.weight.fill_(1)
                await group.send(module.state_dict())
                module.weight.fill_(2)
            await group.send("written")
            return await group.recv()
        state = await group.recv()
        assert await group.recv() == "written"
        seen = int(state["weight"][0, 0])
        assert (state["weight"] == seen).all()
        del state
        gc.collect()
        await group.send(seen)
        return seen


@pytest.mark.parametrize(("aliased", "seen"), [(False, 1), (True, 2)])
def test_what_a_later_write_of_the_sender_means(loop_name: str, aliased: bool, seen: int) -> None:
    assert run_workers(shares, 2, aliased, loop=loop_name) == [seen, seen]


async def sends_and_leaves(stage: Stage, how: str) -> None:
    async with member(stage, serve=1) as collective:
        group = group_with(collective, 1)
        for number in range(3):
            await group.send_tensor(value_of(number, MIB))
            await group.send({"x": value_of(number, MIB)})
        stage.set("sent")
        if how == "killed":
            await stage.wait("never")


async def takes_it_later(stage: Stage) -> None:
    async with member(stage, serve=1, prefetch_bytes=0) as collective:
        group = group_with(collective, 0)
        await group.ready()
        stage.set("ready")
        await stage.wait("gone")
        while group.statistics().state == "up":  # noqa: ASYNC110
            await asyncio.sleep(0)
        for number in range(3):
            buffer = torch.empty(MIB, dtype=torch.uint8)
            assert (await group.recv_tensor(buffer)).equal(value_of(number, MIB))
            assert (await group.recv())["x"].equal(value_of(number, MIB))
        with pytest.raises(PeerLostError):
            await group.recv()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_send_that_has_completed_is_never_lost(loop_name: str, how: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        going = workers.start(sends_and_leaves, how)
        staying = workers.start(takes_it_later)
        workers.wait("sent")
        if how == "killed":
            going.kill()
        else:
            going.wait()
        workers.set("gone")
        assert staying.result() is None


KEPT: dict[str, Callable[[int], Any]] = {
    "tensor": value_of,
    "array": lambda number: value_of(number).numpy(),
    "small array beside a large one": lambda number: {
        "small": np.full(10, number),
        "large": value_of(number).numpy(),
    },
    "array beside a tensor": lambda number: [value_of(number, MIB).numpy(), value_of(number, 10)],
    "array over 1 MiB of parts": lambda number: [np.full(1000, number) for _ in range(300)],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KEPT)
async def test_what_was_received_is_no_later_messages(kind: str) -> None:
    async with pair("shm", shm_bytes=64 * MIB) as (a, b):
        kept = []
        for number in range(6):
            sending = a.send(KEPT[kind](number))
            kept.append(part_of(await b.recv()))
            await sending
        for number, part in enumerate(kept):
            assert np.array_equal(part, np.full_like(part, number))
            part[:] = 99  # nor is what the receiver writes in any later one
        sending = a.send(KEPT[kind](7))
        last = part_of(await b.recv())
        assert np.array_equal(last, np.full_like(last, 7))
        await sending


def part_of(value: Any) -> Any:
    """One array of what came; the rest is dropped."""
    if isinstance(value, dict):
        return value["small"]
    if isinstance(value, list):
        return value[0]
    return np.asarray(value)


@pytest.mark.asyncio
async def test_a_small_message_that_is_taken_late_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receipts, "LATEST", 1e6)
    async with pair("shm", shm_bytes=2 * MIB) as (a, b):
        sends = [a.send(value_of(1, 20 << 10)), a.send(value_of(2))]
        await until(lambda: b.statistics().unreceived == 2)
        route: Any = b._session.receiving._host.route
        # Pieces of the second come back first, and are of no use before that of the first.
        await until(lambda: route._receipts._said > 0)
        assert (await b.recv()).equal(value_of(1, 20 << 10))
        async with asyncio.timeout(20):
            assert (await b.recv()).equal(value_of(2))
        await asyncio.gather(*sends)
