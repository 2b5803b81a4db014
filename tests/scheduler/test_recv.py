"""The receiving lane: messages and calls meet in order, and only what fits.

What is cancelled is in test_works.py, what fails in test_recv_failure.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiocomm.errors import ClosedError, DecodeError, PairingError, ProtocolError
from aiocomm.payload import pack, pack_tensor
from aiocomm.scheduler import recv as recv_module
from aiocomm.scheduler.envelope import credit_head, read_credit
from aiocomm.scheduler.recv import MOVING_LIMIT
from aiocomm.stats import RouteCount
from aiocomm.transport.base import FrameKind

from .lanes import BULK, FakeLink, blank, ramp, turns
from .receiver import Receiver

pytestmark = pytest.mark.asyncio

LARGE = 2 << 20  # bytes; more than what is copied on the loop


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are taken in without waiting for their recv_tensor."""
    monkeypatch.setattr(recv_module, "PREFETCH_DELAY", 0)


at_once = pytest.mark.usefixtures("_at_once")


async def test_the_window_is_granted_with_the_link() -> None:
    receiver = Receiver(window_messages=8, window_bytes=100)
    (frame,) = receiver.link.frames
    assert (frame.kind, frame.head) == (FrameKind.CREDIT, credit_head(8, 100, first=True))


async def test_the_first_call_gets_the_first_message() -> None:
    receiver = Receiver()
    early = [receiver.recv(), receiver.recv()]
    assert receiver.lane.pending == 2
    packed = [receiver.inline(number) for number in range(4)]
    assert [await work for work in early] == [0, 1]
    assert receiver.lane.unreceived == 2
    assert [await receiver.recv(), await receiver.recv()] == [2, 3]
    nbytes = sum(len(each.meta) for each in packed)
    assert receiver.lane.traffic.snapshot() == {"link": RouteCount(4, nbytes)}


@pytest.mark.parametrize("posted", [True, False])
async def test_small_tensors_fill_the_buffer(posted: bool) -> None:
    receiver, buffer = Receiver(), blank(10)
    work = receiver.recv_tensor(buffer) if posted else None
    receiver.inline_tensor(ramp(10))
    assert await (work or receiver.recv_tensor(buffer)) is buffer
    assert torch.equal(buffer, ramp(10))


async def test_what_is_handed_over_is_the_object_itself() -> None:
    receiver = Receiver()
    tensor = ramp(BULK)
    receiver.by_reference(pack(tensor))
    receiver.by_reference(pack_tensor(tensor))
    got = await receiver.recv()
    assert got.data_ptr() == tensor.data_ptr()
    buffer = blank(BULK)
    await receiver.recv_tensor(buffer)
    assert torch.equal(buffer, tensor)
    assert receiver.lane.traffic.snapshot()["memory"].messages == 2
    assert receiver.lane.traffic.snapshot()["memory"].nbytes > 2 * BULK


@pytest.mark.parametrize("posted", [True, False])
async def test_bulk_moves_into_fresh_memory(posted: bool) -> None:
    receiver = Receiver()
    work = receiver.recv() if posted else None
    packed = receiver.bulk(ramp(BULK))
    (move,) = receiver.moves
    assert move.sizes == [BULK]
    assert receiver.lane.moving == 1
    work = work or receiver.recv()
    await turns()
    assert not work.done()
    move.fill(packed)
    assert torch.equal(await work, ramp(BULK))
    counted = receiver.lane.traffic.snapshot()
    assert counted == {"fake": RouteCount(1, len(packed.meta) + BULK)}
    assert receiver.lane.moving == 0


async def test_bulk_moves_straight_into_the_buffer() -> None:
    receiver, buffer = Receiver(), blank(BULK)
    work = receiver.recv_tensor(buffer)
    packed = receiver.bulk_tensor(ramp(BULK))
    assert receiver.moves[0].blocks[0].data_ptr() == buffer.data_ptr()
    receiver.moves[0].fill(packed)
    assert await work is buffer
    assert torch.equal(buffer, ramp(BULK))


async def test_a_tensor_waits_a_moment_for_its_buffer() -> None:
    receiver, buffer = Receiver(), blank(BULK)
    packed = receiver.bulk_tensor(ramp(BULK))
    assert receiver.moves == []
    work = receiver.recv_tensor(buffer)
    assert receiver.moves[0].blocks[0].data_ptr() == buffer.data_ptr()
    receiver.moves[0].fill(packed)
    assert await work is buffer


@at_once
@pytest.mark.parametrize("size", [BULK, LARGE])
async def test_a_tensor_that_came_before_its_buffer_is_copied(size: int) -> None:
    receiver, buffer = Receiver(), blank(size)
    packed = receiver.bulk_tensor(ramp(size))
    while not receiver.moves:  # noqa: ASYNC110
        await asyncio.sleep(0)
    receiver.moves[0].fill(packed)
    await turns()
    work = receiver.recv_tensor(buffer)
    assert len(receiver.runtime.jobs) == (size == LARGE)  # a large one is copied off the loop
    for job in receiver.runtime.jobs:
        assert not work.done()
        job.run()
    assert await work is buffer
    assert torch.equal(buffer, ramp(size))


async def test_an_inline_tensor_larger_than_this_side_sends_is_copied_off_the_loop() -> None:
    receiver, buffer = Receiver(), blank(LARGE)
    receiver.inline_tensor(ramp(LARGE))
    work = receiver.recv_tensor(buffer)
    receiver.runtime.jobs[0].run()
    assert await work is buffer
    assert torch.equal(buffer, ramp(LARGE))


async def test_only_a_few_move_at_a_time() -> None:
    receiver = Receiver()
    works = [receiver.recv() for _ in range(MOVING_LIMIT + 2)]
    packed = [receiver.bulk(ramp(BULK, number)) for number in range(MOVING_LIMIT + 2)]
    assert len(receiver.moves) == MOVING_LIMIT
    for number in range(MOVING_LIMIT + 2):
        receiver.moves[number].fill(packed[number])
        assert torch.equal(await works[number], ramp(BULK, number))
        assert len(receiver.moves) == min(MOVING_LIMIT + number + 1, MOVING_LIMIT + 2)


async def test_taken_in_unasked_is_bounded() -> None:
    receiver = Receiver(prefetch_bytes=BULK)
    packed = [receiver.bulk(ramp(BULK, number)) for number in range(2)]
    assert len(receiver.moves) == 1
    receiver.moves[0].fill(packed[0])
    await turns()
    assert len(receiver.moves) == 1
    await receiver.recv()
    assert len(receiver.moves) == 2
    receiver.moves[1].fill(packed[1])
    assert torch.equal(await receiver.recv(), ramp(BULK, 1))


async def test_small_ones_do_not_overtake_bulk() -> None:
    receiver = Receiver()
    works = [receiver.recv(), receiver.recv()]
    packed = receiver.bulk(ramp(BULK))
    receiver.inline("behind")
    await turns()
    assert not any(work.done() for work in works)
    receiver.moves[0].fill(packed)
    assert torch.equal(await works[0], ramp(BULK))
    assert await works[1] == "behind"


# --- what does not pair ---


@pytest.mark.parametrize("way", ["inline", "moving", "arrived"])
async def test_a_mismatch_fails_both_calls_and_spares_the_next_message(way: str) -> None:
    receiver, buffer = Receiver(), blank(BULK + 1)
    work = receiver.recv_tensor(buffer) if way == "arrived" else None
    if way == "inline":
        receiver.inline_tensor(ramp(9))
    else:
        packed = receiver.bulk([ramp(BULK)])
    if way == "moving":
        receiver.moves[0].fill(packed)
        await turns()
    if work is None:
        work = receiver.recv_tensor(buffer)
    with pytest.raises(PairingError, match=r"met recv_tensor\(uint8\[4097\] on cpu\)") as caught:
        await work
    error = caught.value
    assert (error.direction, error.sequence) == ("recv", 0)
    assert (error.group, error.peer) == ("g", "b:0")
    (reject,) = receiver.link.of(FrameKind.REJECT)
    assert (reject.sequence, reject.head.decode()) == (0, error.message)
    if way == "arrived":
        assert receiver.moves[0].sizes == [BULK]  # drained
        assert not receiver.moves[0].blocks
        assert receiver.lane.moving == 1
        receiver.moves[0].future.set_result(None)
    assert not buffer.any()
    receiver.inline("next")
    assert await receiver.recv() == "next"


async def test_recv_does_not_take_a_tensor() -> None:
    receiver = Receiver()
    receiver.inline_tensor(ramp(3))
    with pytest.raises(PairingError, match=r"^send_tensor\(uint8\[3\] on cpu\) met recv\(\): "):
        await receiver.recv()
    work = receiver.recv_tensor(blank(3))
    receiver.inline([1])
    with pytest.raises(PairingError, match=r"^send\(obj\) met recv_tensor\(uint8\[3\] on cpu\): "):
        await work


# --- credit, settling, users' code ---


async def test_a_quarter_of_the_window_is_given_back_at_a_time() -> None:
    receiver = Receiver(window_messages=8)
    charge = len(pack(0).meta)
    for number in range(5):
        receiver.inline(number)
        assert await receiver.recv() == number
    credits = [read_credit(frame.head) for frame in receiver.link.of(FrameKind.CREDIT)[1:]]
    assert credits == [(False, 2, 2 * charge)] * 2


async def test_settling_waits_for_what_moves_in() -> None:
    receiver = Receiver()
    await receiver.lane.settle()
    packed = receiver.bulk(ramp(BULK))
    settled = asyncio.create_task(receiver.lane.settle())
    await turns()
    assert not settled.done()
    receiver.moves[0].fill(packed)
    await settled
    assert torch.equal(await receiver.recv(), ramp(BULK))


async def test_a_closed_lane_drains_what_still_comes_until_it_is_told_to_stop() -> None:
    receiver = Receiver(window_messages=8, prefetch_bytes=0)
    receiver.bulk(ramp(BULK))
    receiver.bulk_tensor(ramp(BULK))
    work = receiver.recv_tensor(blank(1))
    with pytest.raises(PairingError):
        await work
    receiver.lane.close(ClosedError("closed"), drain=True)
    receiver.bulk(ramp(BULK))
    receiver.inline("small")
    assert len(receiver.moves) == 3
    assert len(receiver.link.of(FrameKind.CREDIT)) == 1 + 2
    receiver.lane.stop_draining()
    receiver.bulk(ramp(BULK))
    assert len(receiver.moves) == 3
    settling = asyncio.create_task(receiver.lane.settle())
    for move in receiver.moves:
        await turns()
        assert not settling.done()
        move.future.set_result(None)
    await settling
    assert receiver.broken == []


class Fragile:
    def __reduce__(self) -> tuple[Any, ...]:
        return _fail_to_load, ()


def _fail_to_load() -> None:
    raise ZeroDivisionError("of the user's")


async def test_a_class_that_fails_to_load_fails_that_call_and_no_other() -> None:
    receiver = Receiver()
    receiver.inline(Fragile())
    receiver.inline("next")
    with pytest.raises(DecodeError) as caught:
        await receiver.recv()
    error = caught.value
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (error.group, error.direction, error.peer, error.sequence) == ("g", "recv", "b:0", 0)
    assert await receiver.recv() == "next"


class Reentrant:
    def __reduce__(self) -> tuple[Any, ...]:
        return _call_recv, ()


_outer: list[Receiver] = []
_inner: list[Any] = []


def _call_recv() -> str:
    _inner.append(_outer[0].recv())
    return "outer"


async def test_loading_may_call_recv_itself() -> None:
    receiver = Receiver()
    _outer[:], _inner[:] = [receiver], []
    works = [receiver.recv(), receiver.recv()]
    receiver.inline(Reentrant())
    receiver.inline("second")
    receiver.inline("third")
    assert [await works[0], await works[1], await _inner[0]] == ["outer", "second", "third"]


# --- what the peer must not do ---


async def test_hostile_envelopes_are_the_peers_fault() -> None:
    receiver = Receiver()
    receiver.sequence = 1
    with pytest.raises(ProtocolError, match="sent message 1 where 0 was due"):
        receiver.inline("out of turn")
    receiver.sequence = 0
    receiver.lane._host.route = None
    with pytest.raises(ProtocolError, match="sends bulk, and no route was agreed on"):
        receiver.bulk(ramp(BULK))
    receiver.sequence = 0
    receiver.inline("in turn")
    assert await receiver.recv() == "in turn"


async def test_a_link_that_is_down_fails_no_call() -> None:
    receiver = Receiver(window_messages=1)
    receiver.link.lose()
    receiver.inline("the last one")
    receiver.inline_tensor(ramp(3))
    assert await receiver.recv() == "the last one"
    with pytest.raises(PairingError):
        await receiver.recv()
    down = FakeLink()
    down.lose()
    receiver.lane.link_up(down)  # type: ignore[arg-type]
    assert down.frames == []
