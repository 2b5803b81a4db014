"""The receiving end: what the device copies when, what stays mapped, what is refused."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from aiocomm.errors import DeviceError, ProtocolError, RouteError
from aiocomm.transport.cuda_ipc import mappings
from aiocomm.transport.cuda_ipc import receive as module
from aiocomm.transport.cuda_ipc.receive import CudaIpcReceiver
from aiocomm.transport.cuda_ipc.wire import pack_body, parse_body
from aiocomm.transport.transfer import parse_count

from ...pairs import until
from ...simulated_memory import SimStream
from .ends import Ends, ends, noise

pytestmark = pytest.mark.asyncio

LARGE = 1 << 20


def stream_of(both: Ends) -> SimStream:
    stream = both.receiver._stream
    assert isinstance(stream, SimStream)
    return stream


async def test_the_device_waits_for_the_sender_and_the_host_does_not() -> None:
    async with ends(auto=False) as both:
        sim = both.sim
        values = noise(LARGE)
        tensor = sim.tensor(torch.zeros_like(values))
        sim.write(tensor, values)
        sending = both.send(tensor)
        memory, future = both.fetch(LARGE)
        await until(lambda: both.receiver._active[0].copying)
        sim.run(stream_of(both))
        assert not torch.equal(sim.read(memory[0]), values), "the sender has not come there"
        sim.run()
        await future
        await sending
        assert torch.equal(sim.read(memory[0]), values)
        assert [block for block, _ in sim.lent] == [memory[0].data_ptr()]


async def test_a_buffer_is_written_when_it_may_be() -> None:
    async with ends(auto=False) as both:
        sim, values = both.sim, noise(LARGE)
        buffer = sim.tensor(torch.zeros_like(values), 1)
        own = sim.stream(1)
        with sim.using(own):
            sim.write(buffer, torch.ones_like(values))
        sending = both.send(sim.tensor(values))
        receiving = both.receiver.receive(both.bodies[0], buffer, after=sim.record(own))
        await until(lambda: both.receiver._active[0].copying)
        sim.run(stream_of(both))
        assert sim.read(buffer)[0] == 0
        sim.run()
        await asyncio.gather(receiving, sending)
        assert torch.equal(sim.read(buffer), values)


async def test_messages_are_done_in_order_though_some_are_dropped() -> None:
    async with ends() as both:
        works = [both.send(both.sim.tensor(noise(LARGE))) for _ in range(3)]
        order: list[int] = []
        for number in range(3):
            body = both.bodies[number]
            if number == 1:
                future = both.receiver.discard(body, [LARGE])
            else:
                _, future = both.receiver.fetch(body, [LARGE])
            future.add_done_callback(partial(lambda number, _: order.append(number), number))
        assert both.receiver.pending == 3
        await asyncio.gather(*works)
        assert order == [0, 1, 2]
        assert both.sim.openings == 3, "the probe, and what was not dropped"


async def test_receipts_of_a_turn_are_one() -> None:
    async with ends() as both:
        works = [both.send(both.sim.tensor(noise(LARGE))) for _ in range(5)]
        for body in both.bodies:
            both.receiver.discard(body, [LARGE])
        await asyncio.gather(*works)
        assert [parse_count(value, 0) for key, value in both.said if key == "g/done"] == [5]


async def test_the_sender_writes_its_memory_again_once_it_is_told() -> None:
    async with ends() as both:
        sim, tensor = both.sim, both.sim.tensor(noise(LARGE))
        for _ in range(20):
            values = noise(LARGE)
            sim.write(tensor, values)
            sending = both.send(tensor)
            memory, future = both.fetch(LARGE)
            await sending
            sim.write(tensor, torch.zeros_like(values))
            await future
            assert torch.equal(sim.read(memory[0]), values)
        assert both.sim.openings == 2


async def test_nothing_stays_mapped_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "LINGER", 0.01)
    async with ends() as both:
        for _ in range(3):
            sending = both.send(both.sim.tensor(noise(LARGE)))
            _, future = both.fetch(LARGE)
            await asyncio.gather(sending, future)
        await until(lambda: not both.sim.opened)


# --- refused ---


def past_the_end(body: bytes) -> bytes:
    slot, (piece,) = parse_body(body)
    return pack_body(slot, [type(piece)(piece.handle, 1, piece.nbytes)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"rubbish", "cannot be read"),
        (lambda body: pack_body(77, parse_body(body)[1]), "names event 77 of 32"),
        (lambda body: pack_body(0, 2 * parse_body(body)[1]), "not as many as its message has"),
        (past_the_end, "past the end of its memory"),
    ],
)
async def test_envelopes_that_cannot_be(change: Callable[[bytes], bytes], reason: str) -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(LARGE)))
        _, future = both.receiver.fetch(change(both.bodies[0]), [LARGE])
        with pytest.raises(ProtocolError, match=reason):
            await future
        with pytest.raises(ProtocolError, match=reason):
            await both.receiver.discard(both.bodies[0], [LARGE])
        both.sender.sever()
        await asyncio.wait([sending])
        sending.exception()


async def test_nothing_is_written_before_what_is_queued_for_the_buffer() -> None:
    async with ends() as both:
        sim, values = both.sim, noise(LARGE)
        buffer, mine = sim.tensor(torch.zeros(LARGE, dtype=torch.uint8), 1), sim.stream(1)
        mine.held = True
        with sim.using(mine):
            sim.write(buffer, torch.full((LARGE,), 1, dtype=torch.uint8))
        sending = both.send(sim.tensor(values))
        moved = both.receiver.receive(both.bodies.pop(), buffer, after=sim.record(mine))
        await until(lambda: both.sender._poller.pending == 1 and not both.receiver._mapping)
        sim.run()
        assert sim.read(buffer).max() == 0
        mine.held = False
        await moved
        await sending
        assert torch.equal(sim.read(buffer), values)


async def test_memory_that_is_there_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiocomm.transport.cuda_ipc.send.SEVER_GRACE", 0.0)
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(LARGE)))
        both.sender.sever()  # as a sender that died: its memory goes
        await asyncio.wait([sending])
        sending.exception()
        await until(lambda: not both.sender._poller.pending)
        await until(lambda: not both.sim.used_bytes)
        gc.collect()
        _, future = both.fetch(LARGE)
        with pytest.raises(RouteError, match="cannot be mapped here: stale"):
            await future


async def test_there_is_not_that_much_memory() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(LARGE)))

        def allocate(*_: object) -> Any:
            raise RuntimeError("CUDA out of memory")

        both.sim.allocate = allocate  # type: ignore[assignment,method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            both.fetch(LARGE)
        both.sender.sever()
        await asyncio.wait([sending])
        sending.exception()


# --- failure ---


def as_if_later(receiver: CudaIpcReceiver, seconds: float) -> None:
    """What the receiver's watch does that much later; the machine's load is not in it."""
    assert receiver._watch is not None
    receiver._watch.cancel()
    receiver._moved_at -= seconds
    receiver._look()


async def test_a_sender_whose_device_never_comes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEVER_GRACE", 0.01)
    async with ends(stall=1000.0) as both:
        sim = both.sim
        stuck = sim.stream(0)
        stuck.held = True
        with sim.using(stuck):
            sending = both.send(sim.tensor(noise(LARGE)))
        _, future = both.fetch(LARGE)
        await until(lambda: both.receiver._active[0].copying)
        as_if_later(both.receiver, 600.0)
        assert both.receiver._watch is not None
        as_if_later(both.receiver, 600.0)
        with pytest.raises(RouteError, match=r"stands still.*Options\.stall_timeout"):
            await future
        await until(lambda: len(sim.opened) == 1)  # a copy may still read it
        monkeypatch.setattr(module, "CLOSE_GRACE", 0.01)
        await both.receiver.aclose()
        assert len(sim.opened) == 1
        stuck.held = False
        await until(lambda: not sim.opened)
        both.sender.sever()
        await asyncio.wait([sending])
        sending.exception()


async def test_a_stream_that_moves_on_does_not_stand_still() -> None:
    async with ends(stall=1000.0) as both:
        sim = both.sim
        queues = [sim.stream(0) for _ in range(4)]
        works, futures = [], []
        for queue in queues:
            queue.held = True
            with sim.using(queue):
                works.append(both.send(sim.tensor(noise(LARGE))))
            futures.append(both.fetch(LARGE)[1])
        for queue, future in zip(queues, futures, strict=True):
            as_if_later(both.receiver, 600.0)  # two of them take too long, each of them does not
            queue.held = False
            await future
        await asyncio.gather(*works)
        await until(lambda: both.receiver._watch is None)


async def test_severed_before_the_sender_was_told() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(LARGE)))
        both.receiver.discard(both.bodies[0], [LARGE])
        both.receiver.sever()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "g/done" not in dict(both.said)
        both.sender.sever()
        await asyncio.wait([sending])
        sending.exception()


async def test_a_peer_that_dies_in_the_middle_leaves_nothing_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mappings, "LINGER", 600.0)  # what was tried out at first stays for now
    async with ends() as both:
        sim = both.sim
        stream_of(both).held = True
        works = [both.send(sim.tensor(noise(LARGE))) for _ in range(3)]
        futures = [both.fetch(LARGE)[1] for _ in range(3)]
        await until(lambda: len(sim.opened) == 4)
        both.sender.sever()
        both.receiver.sever()
        for work in works:
            with pytest.raises(RouteError, match="severed"):
                await work
        stream_of(both).held = False
        for future in futures:
            with pytest.raises(RouteError, match="severed"):
                await future
        await both.receiver.aclose()
        assert (sim.opened, both.receiver.pending) == ({}, 0)


async def test_severed_while_memory_is_being_mapped() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(LARGE)))
        _, future = both.fetch(LARGE)
        future.cancel()
        both.receiver.sever()
        both.sender.sever()
        await asyncio.wait([sending])
        sending.exception()
        await both.receiver.aclose()
        assert not both.sim.opened


async def test_a_cancelled_call_gets_its_bytes_all_the_same() -> None:
    async with ends() as both:
        values = noise(LARGE)
        sending = both.send(both.sim.tensor(values))
        memory, future = both.fetch(LARGE)
        future.cancel()
        await sending
        assert torch.equal(both.sim.read(memory[0]), values)


@pytest.mark.parametrize("when", ["record", "later"])
async def test_a_device_that_fails_under_the_copy(when: str) -> None:
    async with ends() as both:
        sim = both.sim
        sending = both.send(sim.tensor(noise(LARGE)))
        if when == "later":
            sim.fail(stream_of(both))
        else:

            def record(_: object) -> Any:
                raise DeviceError("device cuda:1 failed")

            sim.record = record  # type: ignore[assignment,method-assign]
        _, future = both.fetch(LARGE)
        with pytest.raises(DeviceError, match="device cuda:1 failed"):
            await future
        with pytest.raises(DeviceError):
            await both.receiver.discard(b"", [LARGE])
        both.sender.sever()
        await asyncio.wait([sending])
        sending.exception()
        await both.receiver.aclose()
        assert not sim.opened
