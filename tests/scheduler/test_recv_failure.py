"""The receiving lane when something breaks, in whichever state each message is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiocomm.errors import AiocommError, PeerLostError, RouteError
from aiocomm.handles.base import AsyncWork

from .lanes import BULK, blank, ramp, turns
from .receiver import CLOSED, LOST, Receiver

pytestmark = pytest.mark.asyncio

LARGE = 2 << 20  # bytes; more than what is copied on the loop
GRIEF = ZeroDivisionError("of a backend")

Way = tuple[AsyncWork[Any], "asyncio.Future[Any]"]  # the call that waits, and what it waits for


def moving_in_place(receiver: Receiver) -> Way:
    work = receiver.recv_tensor(blank(BULK))
    receiver.bulk_tensor(ramp(BULK))
    return work, receiver.moves[0].future


def moving(receiver: Receiver) -> Way:
    work = receiver.recv()
    receiver.bulk(ramp(BULK))
    return work, receiver.moves[0].future


def copying(receiver: Receiver) -> Way:
    receiver.inline_tensor(ramp(LARGE))
    return receiver.recv_tensor(blank(LARGE)), receiver.runtime.jobs[0].future


async def leaving(receiver: Receiver) -> Way:
    cancelled = receiver.recv_tensor(blank(BULK))
    packed = receiver.bulk_tensor(ramp(BULK))
    cancelled.cancel()
    work = receiver.recv_tensor(blank(BULK))
    receiver.moves[0].fill(packed)
    await turns()
    return work, receiver.runtime.jobs[0].future


STATES: list[Callable[[Receiver], Any]] = [moving_in_place, moving, copying, leaving]
each_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)


async def into(state: Callable[[Receiver], Any], receiver: Receiver) -> Way:
    way = state(receiver)
    return await way if asyncio.iscoroutine(way) else way  # type: ignore[no-any-return]


async def fails_with(work: AsyncWork[Any], error: AiocommError) -> bool:
    with pytest.raises(type(error)) as caught:
        await work
    return str(caught.value) == str(error) and caught.value is not error  # one each


@each_state
async def test_what_breaks_is_told_and_fails_with_what_the_group_finds_out(state: Any) -> None:
    receiver = Receiver()
    receiver.inline("before")
    assert await receiver.recv() == "before"
    work, move = await into(state, receiver)
    behind = receiver.recv()
    move.set_exception(GRIEF)
    await turns()
    (told,) = receiver.broken
    assert isinstance(told, RouteError)
    assert told.__cause__ is GRIEF
    assert not work.done()
    assert not behind.done()  # until it is known why
    receiver.lane.lose(LOST, keep_moving=False)
    assert await fails_with(work, LOST)
    assert await fails_with(behind, LOST)
    assert await fails_with(receiver.recv(), LOST)


@each_state
async def test_what_broke_and_is_closed_before_it_is_known_why(state: Any) -> None:
    receiver = Receiver()
    work, move = await into(state, receiver)
    move.set_exception(GRIEF)
    await turns()
    receiver.lane.close(CLOSED)
    assert await fails_with(work, CLOSED)
    receiver.lane.lose(LOST, keep_moving=True)
    assert await fails_with(receiver.recv(), CLOSED)


@each_state
@pytest.mark.parametrize("end", ["close", "lose"])
async def test_a_buffer_is_the_callers_again_when_its_call_fails(state: Any, end: str) -> None:
    receiver = Receiver()
    work, move = await into(state, receiver)
    error: AiocommError = CLOSED if end == "close" else LOST
    if end == "close":
        receiver.lane.close(CLOSED)
    else:
        receiver.lane.lose(LOST, keep_moving=False)
    await turns()
    whole = end == "lose" and state in (copying, leaving)  # these need nothing of the peer
    in_use = state in (moving_in_place, copying)
    assert work.done() is not (in_use or whole)
    if whole:
        receiver.runtime.jobs[0].run()
        buffer = work._buffer
        assert await work is buffer
        assert torch.equal(buffer, ramp(buffer.numel()))
    else:
        move.set_exception(RouteError("severed"))
        assert await fails_with(work, error)
    assert receiver.broken == []


async def test_the_last_words_of_a_peer_that_said_goodbye_are_heard() -> None:
    receiver = Receiver()
    packed = receiver.bulk(ramp(BULK))
    receiver.inline("behind")
    receiver.lane.lose(LOST, keep_moving=True)
    receiver.moves[0].fill(packed)
    assert torch.equal(await receiver.recv(), ramp(BULK))
    assert await receiver.recv() == "behind"
    assert await fails_with(receiver.recv(), LOST)


async def test_whole_messages_survive_the_loss_up_to_the_first_that_is_not() -> None:
    receiver = Receiver()
    receiver.inline("whole")
    receiver.bulk(ramp(BULK))
    receiver.inline("behind the broken one")
    receiver.lane.lose(LOST, keep_moving=False)
    assert await receiver.recv() == "whole"
    assert await fails_with(receiver.recv(), LOST)
    receiver.sequence = 99
    receiver.inline("what comes late is nobody's")
    assert receiver.lane.unreceived == 0
    receiver.moves[0].future.set_exception(GRIEF)
    await turns()
    assert receiver.broken == []


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator")])
async def test_no_memory_for_a_message_ends_the_direction(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(plan: object) -> None:
        raise error

    monkeypatch.setattr("aiocomm.transport.blocks.allocate", allocate)
    receiver = Receiver()
    work = receiver.recv()
    receiver.bulk(ramp(BULK))
    assert receiver.broken[0].__cause__ is error
    assert not receiver.moves
    receiver.lane.lose(receiver.broken[0], keep_moving=False)
    assert await fails_with(work, receiver.broken[0])


@pytest.mark.parametrize("lost", [True, False])
async def test_draining_that_fails_ends_the_direction(lost: bool) -> None:
    receiver = Receiver()
    work = receiver.recv_tensor(blank(3))
    receiver.bulk(ramp(BULK))
    with pytest.raises(AiocommError):
        await work
    if lost:
        receiver.lane.lose(LOST, keep_moving=True)
    receiver.moves[0].future.set_exception(GRIEF)
    await turns()
    assert [error.__cause__ for error in receiver.broken] == ([] if lost else [GRIEF])


@pytest.mark.parametrize("quiet", [True, False])
async def test_failures_that_nobody_retrieves_are_news_only_when_the_peer_failed(
    quiet: bool, complaints: list[Any]
) -> None:
    receiver = Receiver()
    for _ in range(2):
        receiver.recv()
    if quiet:
        receiver.lane.close(CLOSED)
    else:
        receiver.lane.lose(LOST, keep_moving=False)
    del receiver
    await turns()
    assert [type(each["exception"]) for each in complaints] == (
        [] if quiet else [PeerLostError] * 2
    )
    complaints.clear()
