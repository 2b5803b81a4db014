"""Peers that die, hang, or vanish between two calls: what was pending fails, the rest goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiocomm.errors import PeerClosedError, PeerLostError

from ..processes import Stage, Workers
from .members import group_with, member, outcomes

MIB = 1 << 20
HUGE = 128 * MIB  # a transfer that is still under way when a signal comes
# What Gloo forgot in the middle of a chunk ends so many seconds later, which is waited for below. A
# chunk of a healthy peer takes less on the busiest machine.
STALL = 6.0


def _loss(error: BaseException | None) -> str:
    assert isinstance(error, PeerLostError), error
    assert not isinstance(error, PeerClosedError), error
    assert error.peer == "w:1", error
    return type(error).__name__


async def survivor(stage: Stage, **settings: Any) -> None:
    """Rank 0: much is pending with the victim, and another group is at work."""
    async with member(stage, **settings) as collective:
        group, other = group_with(collective, 1), group_with(collective, 2)
        buffer = torch.empty(HUGE, dtype=torch.uint8)
        works: list[Any] = [group.recv_tensor(buffer) for _ in range(6)]
        works += [group.recv(), group.send_tensor(buffer), group.send("small"), group.send(buffer)]
        chained = works[0].then(lambda _: None)
        # What is sent has gone at once where it is small; what is received, the same.
        while not group._session.receiving.moving:  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0)
        stage.set("moving")
        failed = asyncio.create_task(outcomes([*works, chained]))
        exchanged = 0
        while not failed.done() or exchanged < 2:
            await other.send(exchanged)
            assert await other.recv() == exchanged
            exchanged += 1
        lost = [error for error in failed.result() if error is not None]
        assert len(lost) >= 4, failed.result()
        assert failed.result()[5] is not None, "all had arrived before the signal"
        assert all(map(_loss, lost))
        with pytest.raises(PeerLostError):
            await group.recv()
        await other.send(None)
        assert await other.recv() is None


async def victim(stage: Stage, **settings: Any) -> None:
    async with member(stage, **settings) as collective:
        group = group_with(collective, 0)
        tensor = torch.zeros(HUGE, dtype=torch.uint8)
        await asyncio.gather(*(group.send_tensor(tensor) for _ in range(6)))
        await stage.wait("never")


async def echo(stage: Stage, **settings: Any) -> None:
    async with member(stage, **settings) as collective:
        group = group_with(collective, 0)
        while (message := await group.recv()) is not None:
            await group.send(message)
        await group.send(None)


@pytest.mark.parametrize("route", ["shm", "gloo", "link"])
def test_the_death_of_a_peer_in_mid_transfer(loop_name: str, route: str) -> None:
    with Workers(3, loop=loop_name) as workers:
        # That the victim is silent is not what ends them: only its death does.
        workers.start(survivor, route=route, stall_timeout=STALL, peer_timeout=600.0)
        dying = workers.start(victim, route=route)
        workers.start(echo, route=route)
        workers.wait("moving")
        dying.kill()
        workers.join()


def test_a_peer_that_hangs_in_mid_transfer(loop_name: str) -> None:
    settings: dict[str, Any] = {
        "peer_timeout": 3.0,
        "heartbeat_interval": 0.2,
        "stall_timeout": STALL,
    }
    with Workers(3, loop=loop_name) as workers:
        alive = workers.start(survivor, **settings)
        hanging = workers.start(victim, **settings)
        workers.start(echo, **settings)
        workers.wait("moving")
        hanging.stop()
        assert alive.result() is None
        hanging.kill()
        workers.join()


async def waits_for_the_dead(stage: Stage) -> None:
    async with member(stage, peer_timeout=0.5) as collective:
        group = group_with(collective, 1)
        await stage.wait("dead")
        send, recv = group.send(torch.zeros(MIB)), group.recv()
        for error in await outcomes([send, recv]):
            assert isinstance(error, PeerLostError)
            assert "did its process die" in str(error)
        again = group_with(collective, 1)
        assert again is not group
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await again.send(1)


async def appears(stage: Stage) -> None:
    async with member(stage) as collective:
        group_with(collective, 0)
        stage.set("here")
        await stage.wait("never")


def test_a_peer_that_died_before_the_first_call(loop_name: str) -> None:  # F28
    with Workers(2, loop=loop_name) as workers:
        workers.start(waits_for_the_dead)
        dying = workers.start(appears)
        workers.wait("here")
        dying.kill()
        dying.wait()
        workers.set("dead")
        workers.join()


async def meets_twice(stage: Stage) -> list[str]:
    async with member(stage) as collective:
        group = group_with(collective, 1)
        first = await group.recv()
        stage.set("met")
        with pytest.raises(PeerLostError):
            await group.recv()
        stage.set("lost")
        group = group_with(collective, 1)
        send = group.send("who are you?")
        second = await group.recv()
        await send
        return [first, second]


async def one_life(stage: Stage, name: str, *, last: bool) -> None:
    stage.rank = 1
    if last:
        await stage.wait("lost")
    async with member(stage) as collective:
        group = group_with(collective, 0)
        await group.send(name)
        if not last:
            await stage.wait("never")
        assert await group.recv() == "who are you?"


def test_a_peer_that_is_started_again(loop_name: str) -> None:
    with Workers(3, loop=loop_name) as workers:
        both = workers.start(meets_twice)
        dying = workers.start(one_life, "first life", last=False)
        workers.wait("met")
        dying.kill()
        workers.start(one_life, "second life", last=True)
        workers.join()
        assert both.result() == ["first life", "second life"]
