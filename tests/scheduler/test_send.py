"""The sending lane: messages leave in the order of the calls, within the peer's window.

What fails, is cancelled or closed is in test_send_failure.py.
"""

from __future__ import annotations

import pytest
import torch

from aiocomm.errors import ProtocolError
from aiocomm.packing import ALIGN
from aiocomm.payload import pack, pack_tensor
from aiocomm.scheduler import send as send_module
from aiocomm.scheduler.envelope import Envelope, credit_head
from aiocomm.stats import RouteCount
from aiocomm.transport.base import MAX_BODY

from .lanes import BULK, blank, ramp, turns
from .sender import Sender

pytestmark = pytest.mark.asyncio

MANY = 1500  # messages, far more than the stack is deep


async def test_nothing_leaves_before_the_peer_has_granted_its_window() -> None:
    sender = Sender()
    packed = pack(ramp(10)), pack("two")
    works = [sender.submit(each) for each in packed]
    assert sender.link.frames == []
    assert sender.lane.pending == 2
    sender.grant()
    first, second = sender.envelopes
    assert (first.sequence, second.sequence) == (0, 1)
    assert first.body == bytes(range(10))
    read = Envelope.read(first.head)
    assert (read.bulk, read.charge) == (False, len(packed[0].meta) + 10)
    assert bytes(read.meta) == packed[0].meta
    assert [work.result() for work in works] == [None, None]  # type: ignore[func-returns-value]
    assert sender.lane.pending == 0
    nbytes = sum(len(each.meta) + each.nbytes for each in packed)
    assert sender.lane.traffic.snapshot() == {"link": RouteCount(2, nbytes)}


async def test_a_small_message_has_left_when_its_call_returns() -> None:
    sender = Sender()
    sender.grant()
    tensor = ramp(10)
    work = sender.send_tensor(tensor)
    assert work.done()
    tensor.zero_()
    assert sender.envelopes[0].body == bytes(range(10))


async def test_past_the_window_sends_wait_for_credit() -> None:
    sender = Sender()
    sender.grant(2)
    works = [sender.send(number) for number in range(4)]
    assert [work.done() for work in works] == [True, True, False, False]
    charge = len(pack(0).meta)
    sender.grant(1, charge, first=False)
    assert [work.done() for work in works] == [True, True, True, False]
    sender.grant(2, 2 * charge, first=False)
    assert [frame.sequence for frame in sender.envelopes] == [0, 1, 2, 3]


async def test_the_window_counts_bytes_too() -> None:
    sender = Sender()
    sender.grant(1000, 1000)
    works = [sender.send(bytes(600)) for _ in range(2)]
    assert [work.done() for work in works] == [True, False]
    sender.grant(1, len(pack(bytes(600)).meta), first=False)
    assert works[1].done()


@pytest.mark.parametrize(
    ("messages", "nbytes", "first"), [(2, 0, False), (1, 1 << 30, False), (5, 5, True)]
)
async def test_credit_that_cannot_be_is_the_peers_fault(
    messages: int, nbytes: int, first: bool
) -> None:
    sender = Sender()
    sender.grant(10)
    assert sender.send(1).done()
    with pytest.raises(ProtocolError, match="gives credit that it cannot give"):
        sender.grant(messages, nbytes, first=first)
    with pytest.raises(ProtocolError, match="cannot be read"):
        sender.lane.credit_received(credit_head(1, 1)[:-1])
    assert sender.send(2).done()


async def test_a_first_window_of_nothing_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError):
        Sender().grant(0, 0)


async def test_bulk_waits_for_its_route_and_nobody_overtakes_it() -> None:
    sender = Sender()
    sender.grant()
    bulk = sender.send(ramp(BULK))
    behind = sender.send("small")
    await turns()
    assert sender.opened == 1
    assert sender.link.frames == []
    sender.opening.set_result(sender.route)
    await turns()
    assert sender.link.frames == []
    sender.runtime.jobs[0].run()
    await turns()
    assert sender.kinds == ["bulk", "inline"]
    (move,) = sender.route.moves
    assert torch.equal(move.blocks[0], ramp(BULK))
    assert behind.done()
    assert not bulk.done()
    assert sender.lane.pending == 1
    move.future.set_result(None)
    await bulk
    assert sender.lane.traffic.snapshot()["fake"].messages == 1
    assert sender.lane.traffic.snapshot()["fake"].nbytes > BULK


async def test_bulk_takes_little_of_the_window() -> None:
    sender = Sender()
    sender.grant(1000, 2000)
    await sender.with_route(BULK)
    for _ in range(5):
        sender.send_tensor(ramp(BULK))
    assert sender.kinds == ["bulk"] * 5
    for move in sender.route.moves:
        move.future.set_result(None)
    await turns()
    assert sender.lane.pending == 0


async def test_once_the_route_is_open_bulk_leaves_with_its_call() -> None:
    sender = Sender()
    sender.grant()
    await sender.with_route(BULK)
    tensor = ramp(BULK)
    work = sender.send_tensor(tensor)
    assert sender.kinds == ["bulk"]
    assert sender.route.moves[0].blocks[0].data_ptr() == tensor.data_ptr()  # nothing copied
    assert sender.opened == 1
    sender.route.moves[0].future.set_result(None)
    await work


async def test_much_staging_is_done_off_the_loop() -> None:
    sender = Sender()
    sender.grant()
    await sender.with_route(BULK)
    many = [blank(100_000) for _ in range(20)]
    work = sender.send(many)
    behind = sender.send("small")
    await turns()
    assert sender.link.frames == []
    sender.runtime.jobs[0].run()
    await turns()
    assert sender.kinds == ["bulk", "inline"]
    assert behind.done()
    sender.route.moves[0].future.set_result(None)
    await work


async def test_in_one_process_objects_are_handed_over_and_tensors_copied() -> None:
    sender = Sender(in_process=True)
    sender.grant()
    small, large = ramp(10), ramp(BULK)
    for tensor in (small, large):
        assert sender.send(tensor).done()
        assert sender.send_tensor(tensor).done()
    assert sender.kinds == ["inline"] * 4
    bodies = [frame.body[0] for frame in sender.envelopes]
    assert [
        body.data_ptr() == tensor.data_ptr()
        for body, tensor in zip(bodies, (small, small, large, large), strict=True)
    ] == [True, False, True, False]
    assert torch.equal(bodies[3], large)
    nbytes = sum(
        len(make(tensor).meta) + tensor.nbytes
        for tensor in (small, large)
        for make in (pack, pack_tensor)
    )
    assert sender.lane.traffic.snapshot() == {"memory": RouteCount(4, nbytes)}


@pytest.mark.parametrize("in_process", [True, False])
async def test_many_queued_messages_start_one_after_the_other(in_process: bool) -> None:
    sender = Sender(in_process=in_process)
    tensor = ramp(BULK)
    works = [sender.send(tensor) for _ in range(MANY)]
    sender.opening.set_result(sender.route)
    sender.grant(MANY)
    await turns()
    for job in sender.runtime.jobs:
        job.run()
    await turns()
    assert [frame.sequence for frame in sender.envelopes] == list(range(MANY))
    for move in sender.route.moves:
        move.future.set_result(None)
    await turns()
    assert all(work.done() for work in works)


async def test_very_many_tiny_tensors_do_not_ride_in_an_envelope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert send_module.MOST_INLINE * ALIGN + (8 << 20) <= MAX_BODY  # with the largest eager limit
    monkeypatch.setattr(send_module, "MOST_INLINE", 2)
    sender = Sender()
    sender.grant()
    await sender.with_route(BULK)
    works = [sender.send([blank(1) for _ in range(count)]) for count in (2, 3)]
    assert sender.kinds == ["inline", "bulk"]
    sender.route.moves[0].future.set_result(None)
    for work in works:
        await work


async def test_draining_waits_for_every_send() -> None:
    sender = Sender()
    await sender.lane.drain()
    work = sender.send(1)
    sender.runtime.loop.call_soon(sender.grant)
    await sender.lane.drain()
    assert work.done()
