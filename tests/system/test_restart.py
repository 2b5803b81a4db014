"""Actors that die and are started again: their peers know at once, and meet the next life."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from aiocomm.rendezvous.ray import RayBoard
from aiocomm.worker import Workers, launch

from ..actors import OPTIONS, WAIT, Talker, again, get, held
from ..pairs import until

pytestmark = pytest.mark.ray("actors")
# Where the route makes no difference, one is enough: a restart takes a second or two.
one_route = pytest.mark.parametrize("actors", ["shm"], indirect=True, scope="module")

MIB = 1 << 20
LARGE = 64 * MIB
RESTARTS = {"shm": 3, "gloo": 2}


@pytest.fixture(scope="module")
def kept_board(cluster: None) -> Iterator[None]:
    with RayBoard(timeout=WAIT):
        yield


@pytest.fixture(scope="module", params=["shm", "gloo"])
def actors(kept_board: None, request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Two actors that Ray starts again, and the route that their bulk takes."""
    options = replace(OPTIONS, route=request.param)
    kind = ray.remote(num_cpus=0, max_restarts=-1)(Talker)
    with launch(kind, 2, group="t", options=options) as workers:
        yield workers


def kill(actor: Any) -> None:
    """End its process as the kernel would; Ray starts it again."""
    os.kill(again(lambda: actor.whoami.remote())["pid"], signal.SIGKILL)


def talk(first: Any, second: Any) -> None:
    """Each sends, the other receives; small and in bulk."""
    for size in (8, 2 * MIB):
        sent = [first.send.remote(torch.ones(size), "t", 1)]
        sent += [second.send.remote(torch.ones(size), "t", 0)]
        for came in get([second.recv.remote("t", 0), first.recv.remote("t", 1)]):
            assert len(came) == size
        assert get(sent) == [None, None]


async def _lost(worker: Talker, what: str) -> str:
    """Something that has to do with rank 1 until it fails; the error."""
    try:
        while True:
            if what == "recv":
                await worker.comm.recv("t", 1)
            else:
                await worker.comm.send(torch.ones(LARGE, dtype=torch.uint8), "t", 1)
    except Exception as error:
        return type(error).__name__


async def _taking(worker: Talker) -> None:
    while True:
        await worker.comm.recv("t", 0)


async def _waits(worker: Talker) -> None:
    """Return once a receive from rank 1 is pending."""
    await until(lambda: worker.comm.group("t", 1).statistics().pending_recvs)


async def _moves(worker: Talker) -> None:
    """Return while large messages of rank 0 come in."""

    def count() -> int:
        received = worker.comm.group("t", 0).statistics().received
        return sum(each.messages for each in received.values())

    before = count()
    await until(lambda: count() > before + 1)


def pending(first: Any) -> Any:
    """A receive from rank 1 that has been called."""
    waiting = first.recv.remote("t", 1)
    get(first.call.remote(_waits))
    return waiting


def killed(actors: Workers, what: str) -> None:
    """Kill the second while the first has to do with it; that fails at once, they meet again."""
    first, second = actors
    talk(first, second)
    lost = first.call.remote(_lost, what)
    if what == "send":
        second.call.remote(_taking)
        get(second.call.remote(_moves))
    else:
        get(first.call.remote(_waits))
    kill(second)
    assert get(lost) == "PeerLostError"  # F34
    again(second.whoami.remote)
    talk(first, second)


def test_a_killed_actor_fails_a_send_at_once_and_is_met_again(actors: Workers) -> None:
    killed(actors, "send")


@one_route
def test_a_killed_actor_fails_a_receive_at_once_and_is_met_again(actors: Workers) -> None:
    killed(actors, "recv")


def test_restarts_in_a_row_leave_nothing_with_the_peer(actors: Workers) -> None:
    first, second = actors
    talk(first, second)
    before = get(first.call.remote(held))
    for _ in range(RESTARTS[get(first.call.remote(_route))]):
        waiting = pending(first)
        kill(second)
        assert get(waiting)[0] == "PeerLostError"
        waiting = first.recv.remote("t", 1)
        assert again(lambda: second.send.remote(torch.ones(2 * MIB), "t", 0)) is None
        assert len(get(waiting)) == 2 * MIB
    talk(first, second)
    after = get(first.call.remote(_lets_go, before))
    assert all(after[what] <= before[what] for what in before), (before, after)


async def _lets_go(worker: Talker, before: dict[str, int]) -> dict[str, int]:
    """What it holds, once that is no more than before: threads and sockets of C++ end by and by."""

    def no_more() -> bool:
        return all(count <= before[what] for what, count in held(worker).items())

    with contextlib.suppress(TimeoutError):
        await until(no_more, pause=0.05)
    return held(worker)


def _route(worker: Talker) -> str | None:
    return worker.comm.group("t", 1).statistics().bulk_route


@one_route
def test_both_may_die(actors: Workers) -> None:
    first, second = actors
    talk(first, second)
    kill(first)
    kill(second)
    for actor in actors:
        again(actor.whoami.remote)
    talk(first, second)


@one_route
def test_ray_may_restart_one_itself(actors: Workers) -> None:
    first, second = actors
    talk(first, second)
    waiting = pending(first)
    ray.kill(second, no_restart=False)
    assert get(waiting)[0] == "PeerLostError"
    again(second.whoami.remote)
    talk(first, second)
