"""Cancelling a call of recv loses no message, in whichever state of its way that is.

And works say in their texts where they belong.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch

from aiocomm.errors import AiocommError, ClosedError
from aiocomm.scheduler import recv as recv_module

from .lanes import BULK, blank, ramp, turns
from .receiver import Receiver
from .sender import Sender

pytestmark = pytest.mark.asyncio

LARGE = 2 << 20  # bytes; more than what is copied on the loop


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are taken in without waiting for their recv_tensor."""
    monkeypatch.setattr(recv_module, "PREFETCH_DELAY", 0)


at_once = pytest.mark.usefixtures("_at_once")


async def test_a_cancelled_call_leaves_its_place_to_the_next() -> None:
    receiver = Receiver()
    first, second = receiver.recv(), receiver.recv()
    first.cancel()
    receiver.inline("one")
    assert await second == "one"
    assert receiver.lane.pending == 0


async def test_a_message_leaves_the_buffer_of_a_cancelled_call() -> None:
    receiver, abandoned, buffer = Receiver(), blank(BULK), blank(BULK)
    receiver.recv_tensor(abandoned).cancel()
    cancelled = receiver.recv_tensor(abandoned)
    packed = receiver.bulk_tensor(ramp(BULK))
    cancelled.cancel()
    work = receiver.recv_tensor(buffer)
    receiver.moves[0].fill(packed)
    await turns()
    assert not work.done()  # it lies in the other one's buffer yet
    receiver.runtime.jobs[0].run()
    abandoned.zero_()
    assert await work is buffer
    assert torch.equal(buffer, ramp(BULK))


async def test_a_buffer_that_holds_a_later_message_is_emptied_first() -> None:
    receiver = Receiver()
    buffers = [blank(BULK) for _ in range(3)]
    works = [receiver.recv_tensor(buffer) for buffer in buffers]
    packed = [receiver.bulk_tensor(ramp(BULK, number)) for number in range(2)]
    receiver.moves[1].fill(packed[1])
    await turns()
    works[0].cancel()  # so the second call is due the first message, and holds the second one
    receiver.moves[0].fill(packed[0])
    await turns()
    assert len(receiver.runtime.jobs) == 2
    for job in receiver.runtime.jobs:
        job.run()
    for number in range(2):
        assert await works[number + 1] is buffers[number + 1]
        assert torch.equal(buffers[number + 1], ramp(BULK, number))


@at_once
async def test_cancelled_while_it_is_copied_the_original_goes_on() -> None:
    receiver, abandoned, buffer = Receiver(), blank(LARGE), blank(LARGE)
    receiver.inline_tensor(ramp(LARGE))
    cancelled = receiver.recv_tensor(abandoned)
    cancelled.cancel()
    work = receiver.recv_tensor(buffer)
    receiver.runtime.jobs[0].run()
    await turns()
    receiver.runtime.jobs[1].run()
    assert await work is buffer
    assert torch.equal(buffer, ramp(LARGE))


async def wait_for(work: Any) -> None:
    await work


async def test_a_value_that_nobody_took_is_first_in_line_again() -> None:
    receiver = Receiver()
    work = receiver.recv()
    task = asyncio.create_task(wait_for(work))
    await turns()
    receiver.inline({"x": ramp(3)})
    receiver.inline("behind")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(asyncio.CancelledError, match="went to the next call"):
        work.result()
    with pytest.raises(asyncio.CancelledError, match="went to the next call"):
        await work
    assert receiver.lane.unreceived == 2
    assert torch.equal((await receiver.recv())["x"], ramp(3))
    assert await receiver.recv() == "behind"
    assert receiver.lane.traffic.snapshot()["link"].messages == 2  # not counted twice


@pytest.mark.parametrize("way", ["inline", "in place"])
async def test_a_tensor_that_nobody_took_goes_to_the_next_buffer(way: str) -> None:
    receiver, abandoned, buffer = Receiver(), blank(BULK), blank(BULK)
    work = receiver.recv_tensor(abandoned)
    task = asyncio.create_task(wait_for(work))
    await turns()
    if way == "inline":
        receiver.inline_tensor(ramp(BULK))
    else:
        packed = receiver.bulk_tensor(ramp(BULK))
        receiver.moves[0].fill(packed)
        while not work.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert work.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    abandoned.zero_()
    assert await receiver.recv_tensor(buffer) is buffer
    assert torch.equal(buffer, ramp(BULK))


async def test_a_value_that_a_callback_took_is_not_given_twice() -> None:
    receiver = Receiver()
    work = receiver.recv()
    taken: list[Any] = []
    work.add_done_callback(lambda done: taken.append(done.result()))
    task = asyncio.create_task(wait_for(work))
    await turns()
    receiver.inline("once")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert taken == ["once"]
    receiver.inline("next")
    assert await receiver.recv() == "next"


async def test_they_say_where_they_belong() -> None:
    receiver, sender = Receiver(), Sender()
    work = receiver.recv()
    assert repr(work) == "<RecvWork pending: group g, direction recv, peer b:0>"
    receiver.inline("x")
    assert repr(work) == "<RecvWork done>"
    sending = sender.send([1])  # without credit
    assert repr(sending) == "<SendWork pending: group g, direction send, peer b:0>"


@pytest.mark.parametrize("end", ["a mismatch", "a close", "a cancellation", "a time-out"])
async def test_a_call_that_failed_lets_go_of_its_buffer_without_the_collector(end: str) -> None:
    receiver, buffer = Receiver(), blank(BULK)
    gone = weakref.ref(buffer)
    works = [receiver.recv_tensor(buffer)]
    del buffer
    gc.disable()
    try:
        if end == "a mismatch":
            receiver.inline("no tensor")
        elif end == "a close":
            receiver.lane.close(ClosedError("closed"))
        elif end == "a cancellation":
            works[0].cancel()
        with pytest.raises((AiocommError, asyncio.CancelledError, TimeoutError)):
            async with asyncio.timeout(0 if end == "a time-out" else None):
                await works.pop()
        await turns()
        assert gone() is None
    finally:
        gc.enable()
