"""What two actors exchange: everything that two processes do, in order and with time-outs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from aiocomm.worker import Workers, launch

from ..actors import OPTIONS, Talker, get
from .test_kinds import objects, same, tensors

LARGE = 3 << 20  # bytes: by a segment of shared memory, in several pieces by Gloo

pytestmark = pytest.mark.ray("pair")


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[Workers]:
    with launch(ray.remote(num_cpus=0)(Talker), 2, group="t", options=OPTIONS) as workers:
        yield workers


def both(pair: Workers, main: Any, *args: Any) -> list[Any]:
    """``main(actor, peer's rank, *args)`` in both at once; what they return."""
    return list(get([each.call.remote(main, 1 - rank, *args) for rank, each in enumerate(pair)]))


async def _everything(worker: Talker, peer: int, size: int) -> list[str]:
    torch.manual_seed(0)
    comm = worker.comm
    cases = tensors(size) | objects(size)
    if peer == 1:
        works = [comm.send(value, "t", 1) for value in cases.values()]
        works += [comm.send_tensor(tensor, "t", 1) for tensor in tensors(size).values()]
        await asyncio.gather(*works)
        return []
    wrong = []
    for name, wanted in cases.items():
        if not same(await comm.recv("t", 0), wanted):
            wrong.append(name)
    for name, wanted in tensors(size).items():
        buffer = torch.empty_like(wanted)
        if await comm.recv_tensor(buffer, "t", 0) is not buffer or not same(buffer, wanted):
            wrong.append(f"recv_tensor of {name}")
    return wrong


@pytest.mark.parametrize("size", [8, 700, 70_000], ids=["eager", "some in bulk", "large"])
def test_all_kinds_arrive_as_they_went(pair: Workers, size: int) -> None:
    assert both(pair, _everything, size) == [[], []]


async def _both_ways(worker: Talker, peer: int) -> list[int]:
    """Small and large, all at once; both send first (F16)."""
    sent = [
        worker.comm.send(
            (number, torch.full((LARGE if number % 7 == 0 else 8,), number)), "t", peer
        )
        for number in range(40)
    ]
    came = [await worker.comm.recv("t", peer) for _ in sent]
    await asyncio.gather(*sent)
    return [number for number, tensor in came if tensor[0] == tensor[-1] == number]


def test_both_directions_keep_their_order(pair: Workers) -> None:
    assert both(pair, _both_ways) == [list(range(40))] * 2


async def _impatient(worker: Talker, peer: int) -> list[Any]:
    """Receives that time out lose nothing; a send that had not left is taken back."""
    comm, came = worker.comm, []
    if peer == 0:
        for number in range(5):
            await comm.recv("t", 0)  # told that the other side has given up once
            await comm.send((number, torch.ones(LARGE)), "t", 0)
        return []
    for _ in range(5):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await comm.recv("t", 1)
        await comm.send("now", "t", 1)
        number, tensor = await comm.recv("t", 1)
        came.append((number, float(tensor.sum())))
    return came


def test_a_time_out_around_a_receive_loses_nothing(pair: Workers) -> None:
    assert both(pair, _impatient)[0] == [(number, float(LARGE)) for number in range(5)]


async def _chain(worker: Talker, peer: int) -> float:
    if peer == 1:
        received = worker.comm.recv("t", 1).then(torch.sum).then(float)
        await worker.comm.send(torch.ones(LARGE), "t", 1)
        return await received
    await worker.comm.recv("t", 0).then(lambda x: x * 2).then(worker.comm.send, "t", 0)
    return 0.0


def test_chains_end_with_the_send_of_their_last_link(pair: Workers) -> None:
    assert both(pair, _chain)[0] == 2.0 * LARGE


async def _statistics(worker: Talker, peer: int) -> set[str]:
    return set(worker.comm.group("t", peer).statistics().sent)


def test_one_host_takes_link_and_shared_memory(pair: Workers) -> None:
    both(pair, _both_ways)
    assert both(pair, _statistics) == [{"link", "shm"}] * 2
