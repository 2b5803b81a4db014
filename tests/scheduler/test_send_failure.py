"""The sending lane when a send is cancelled, refused, broken or closed, in each of its states."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiocomm.errors import AiocommError, ClosedError, PairingError, PeerLostError, RouteError
from aiocomm.scheduler import SendWork
from aiocomm.scheduler import send as send_module

from .lanes import BULK, ramp, turns
from .sender import Sender

pytestmark = pytest.mark.asyncio

LOST = PeerLostError("lost")
GRIEF = ZeroDivisionError("of a backend")


async def queued(sender: Sender) -> SendWork:
    return sender.send(1)


async def opening(sender: Sender) -> SendWork:
    sender.grant()
    work = sender.send(ramp(BULK))
    await turns()
    assert sender.opened == 1
    return work


async def staging(sender: Sender) -> SendWork:
    work = await opening(sender)
    sender.opening.set_result(sender.route)
    await turns()
    assert sender.runtime.jobs
    return work


async def moving(sender: Sender) -> SendWork:
    work = await staging(sender)
    sender.runtime.jobs[0].run()
    await turns()
    assert sender.route.moves
    return work


async def end(sender: Sender) -> None:
    """Let everything that is held up run its course."""
    if not sender.opening.done():
        sender.opening.set_result(sender.route)
    await turns()
    for job in sender.runtime.jobs:
        if not job.future.done():
            job.run()
    await turns()
    for move in sender.route.moves:
        if not move.future.done():
            move.future.set_result(None)
    await turns()


STATES: list[Callable[[Sender], Any]] = [queued, opening, staging, moving]
each_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)


@each_state
async def test_closing_fails_what_is_pending_whatever_becomes_of_it(state: Any) -> None:
    sender = Sender()
    work = await state(sender)
    behind = sender.send(2)
    before = len(sender.link.frames)
    sender.lane.close(LOST)
    if state is moving:
        await behind  # the bulk had begun: it has left already
    for each in (work, sender.send(3)) if state is moving else (work, behind, sender.send(3)):
        with pytest.raises(PeerLostError, match="lost"):
            await each
    await asyncio.wait_for(sender.lane.drain(), 5)
    sender.lane.close(ClosedError("later"))
    await end(sender)
    assert sender.lane.pending == 0
    assert sender.broken == []
    assert len(sender.link.frames) == before
    with pytest.raises(PeerLostError):
        await sender.send(4)


@each_state
@pytest.mark.parametrize("quiet", [True, False])
async def test_failures_that_nobody_retrieves_are_news_unless_quiet(
    state: Any, quiet: bool, complaints: list[Any]
) -> None:
    sender = Sender()
    await state(sender)
    sender.lane.close(LOST, quiet=quiet)
    await end(sender)
    del sender
    gc.collect()
    assert [str(each["exception"]) for each in complaints] == ([] if quiet else [str(LOST)])
    complaints.clear()


@each_state
async def test_only_what_has_not_started_is_taken_back(state: Any) -> None:
    sender = Sender()
    work = await state(sender)
    behind = sender.send("behind")
    assert work.cancel()
    if state is queued:
        sender.grant()
    await end(sender)
    await behind
    sequences = [frame.sequence for frame in sender.envelopes]
    assert sequences == ([0] if state is queued else [0, 1])
    assert sender.lane.pending == 0


@each_state
async def test_a_send_that_is_over_holds_nothing(state: Any) -> None:
    sender = Sender()
    work = await state(sender)
    if state is queued:
        sender.grant()
    await end(sender)
    await work
    sender.route.moves.clear()
    sender.runtime.jobs.clear()
    work_alive = weakref.ref(work)
    gc.disable()  # no cycle is left for the collector
    try:
        del work
        assert work_alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [RouteError("no route"), GRIEF])
async def test_a_route_that_cannot_be_opened_ends_the_direction(error: Exception) -> None:
    sender = Sender()
    work = await opening(sender)
    sender.opening.set_exception(error)
    await turns()
    (told,) = sender.broken
    assert error in (told, told.__cause__)
    assert not work.done()  # until the group knows why
    sender.lane.close(told)
    with pytest.raises(RouteError):
        await work


async def test_staging_that_fails_ends_the_direction() -> None:
    sender = Sender()
    work = await staging(sender)
    sender.runtime.jobs[0].future.set_exception(RuntimeError("not enough memory"))
    await turns()
    (told,) = sender.broken
    assert isinstance(told, RouteError)
    assert str(told.__cause__) == "not enough memory"
    sender.lane.close(told)
    with pytest.raises(RouteError, match="not enough memory"):
        await work


@pytest.mark.parametrize("error", [RouteError("severed"), GRIEF])
async def test_a_transfer_that_fails_ends_the_direction(error: Exception) -> None:
    sender = Sender()
    work = await moving(sender)
    sender.route.moves[0].future.set_exception(error)
    await turns()
    (told,) = sender.broken
    assert error in (told, told.__cause__)
    sender.lane.close(LOST)
    with pytest.raises(PeerLostError):
        await work


async def test_a_link_that_is_down_fails_nobody_before_the_group_knows() -> None:
    sender = Sender()
    sender.grant()
    sender.link.lose()
    works = [sender.send(number) for number in range(2)]
    assert not any(work.done() for work in works)
    sender.lane.close(LOST)
    for work in works:
        with pytest.raises(PeerLostError):
            await work


async def test_a_link_that_goes_down_under_a_bulk_start_ends_the_direction() -> None:
    sender = Sender()
    work = await staging(sender)
    sender.link.lose()
    sender.runtime.jobs[0].run()
    await turns()
    assert sender.broken == []  # the link says so itself
    sender.lane.close(LOST)
    with pytest.raises(PeerLostError):
        await work


@pytest.mark.parametrize("state", [opening, staging, moving], ids=lambda state: state.__name__)
async def test_bulk_that_its_route_has_may_end_well_after_a_goodbye(state: Any) -> None:
    sender = Sender()
    work = await state(sender)
    sender.lane.close(LOST, keep_moving=True)
    assert work.done() is (state is not moving)
    await end(sender)
    if state is moving:
        await work
    else:
        with pytest.raises(PeerLostError):
            await work
    await sender.lane.settle(0)


@pytest.mark.parametrize("how", ["time", "failure", "cancellation"])
async def test_bulk_that_does_not_end_well_after_a_goodbye_fails(how: str) -> None:
    sender = Sender()
    work = await moving(sender)
    sender.lane.close(LOST, keep_moving=True)
    if how == "failure":
        sender.route.moves[0].future.set_exception(GRIEF)
    settling = asyncio.create_task(sender.lane.settle(0 if how == "time" else 60))
    await turns()
    if how == "cancellation":
        settling.cancel()
    await asyncio.wait([settling])
    with pytest.raises(PeerLostError):
        await work
    await end(sender)


async def test_a_rejected_send_fails_while_it_is_pending() -> None:
    sender = Sender()
    work = await moving(sender)
    sender.lane.rejected(0, "met recv_tensor")
    with pytest.raises(PairingError, match="met recv_tensor") as caught:
        await work
    error = caught.value
    assert (error.group, error.direction, error.peer, error.sequence) == ("g", "send", "b:0", 0)
    await end(sender)
    assert sender.lane.pending == 0
    assert torch.equal(sender.route.moves[0].blocks[0], ramp(BULK))


@pytest.mark.parametrize("sequence", [0, 7])
async def test_a_rejected_send_that_has_completed_is_a_warning(
    sequence: int, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender()
    sender.grant()
    await sender.send(1)
    with caplog.at_level(logging.WARNING, logger=send_module.log.name):
        sender.lane.rejected(sequence, "met recv_tensor")
    (record,) = caplog.records
    assert "a send that had completed was not taken: met recv_tensor" in record.getMessage()
    assert f"message {sequence}" in record.getMessage()


async def test_an_error_of_ours_stays_itself() -> None:
    ours: AiocommError = RouteError("severed")
    assert send_module.as_route_error(ours) is ours
    other = send_module.as_route_error(GRIEF)
    assert isinstance(other, RouteError)
    assert other.__cause__ is GRIEF
