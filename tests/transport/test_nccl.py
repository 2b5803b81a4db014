"""One direction over NCCL: what comes across, in which order, and what is held meanwhile."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

from aiocomm.packing import DEVICE_LARGE
from aiocomm.transport.nccl import NcclRoute
from aiocomm.transport.nccl_flow import WINDOW

from ..pairs import until
from .nccl_ends import ends, noise

pytestmark = pytest.mark.asyncio


async def test_messages_of_any_shape_come_across(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclRoute, "chunk", DEVICE_LARGE)
    async with ends() as both:
        for sizes in ([5], [3, 200, 1], [DEVICE_LARGE, 7, 9], [2 * DEVICE_LARGE + 3]):
            values = [noise(size) for size in sizes]
            sending = both.send(*map(both.sim.tensor, values))
            buffers, moved = both.fetch(*sizes)
            await moved
            await sending
            assert all(map(torch.equal, map(both.sim.read, buffers), values))
        assert both.envelopes == [b""] * 4
        # Small ones as one block, large ones by themselves, in pieces.
        assert [len(group.sent) for group in both.groups] == [1 + 1 + 2 + 3] * 2
        assert "receives open pending=0" in repr(both.receiver)


async def test_into_the_callers_memory_after_what_is_queued_for_it() -> None:
    async with ends() as both:
        sim, values = both.sim, noise(9)
        buffer = sim.tensor(torch.zeros(9, dtype=torch.uint8), 1)
        sim.write(buffer, torch.full((9,), 1, dtype=torch.uint8))
        sending = both.send(sim.tensor(values))
        await both.receiver.receive(b"", buffer, after=sim.record(sim.default[1]))
        await sending
        assert torch.equal(sim.read(buffer), values)
        sending = both.send(sim.tensor(values))
        await both.receiver.receive(b"", buffer, after=None)
        await sending


async def test_what_was_received_is_lent_to_the_stream_of_the_receiver() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(9)))
        (buffer,), moved = both.fetch(9)
        assert both.sim.lent == []
        await moved
        await sending
        assert both.sim.lent == [(buffer.data_ptr(), both.sim.default[1])]


async def test_nothing_is_written_before_what_is_queued_for_the_buffer() -> None:
    async with ends() as both:
        sim, values = both.sim, noise(9)
        buffer, mine = sim.tensor(torch.zeros(9, dtype=torch.uint8), 1), sim.stream(1)
        mine.held = True
        with sim.using(mine):
            sim.write(buffer, torch.full((9,), 1, dtype=torch.uint8))
        sending = both.send(sim.tensor(values))
        moved = both.receiver.receive(b"", buffer, after=sim.record(mine))
        for _ in range(20):
            await asyncio.sleep(0)
            sim.run()
        assert sim.read(buffer).tolist() == [0] * 9
        mine.held = False
        await moved
        await sending
        assert torch.equal(sim.read(buffer), values)


async def test_the_senders_stream_is_waited_for_and_nothing_else() -> None:
    async with ends() as both:
        sim, values = both.sim, noise(9)
        tensor, mine = sim.tensor(torch.zeros(9, dtype=torch.uint8)), sim.stream(0)
        sim.default[0].held = True  # some other computation
        with sim.using(mine):
            sim.write(tensor, values)
            sending = both.send(tensor)
        (buffer,), moved = both.fetch(9)
        await moved
        await sending
        assert torch.equal(sim.read(buffer), values)


async def test_a_tensor_on_another_device_is_brought_over_first() -> None:
    async with ends() as both:
        values = noise(9)
        sending = both.send(both.sim.tensor(values, 1))
        (buffer,), moved = both.fetch(9)
        await moved
        await sending
        assert torch.equal(both.sim.read(buffer), values)


async def test_nothing_to_move_is_done_in_its_turn() -> None:
    async with ends() as both:
        _, first = both.fetch(9)
        _, empty = both.fetch()
        await both.send(both.sim.tensor(noise(9)))
        done, _ = await asyncio.wait([empty])
        assert first.done()
        assert done


async def test_what_is_joined_on_the_way_is_nobody_elses_until_it_is_sent() -> None:
    async with ends() as both:
        sim, values = both.sim, [noise(9), noise(70)]
        both.sender._stream.held = True  # type: ignore[attr-defined]
        sending = both.send(*(sim.tensor(each, 1) for each in values))  # one block, with a gap
        gc.collect()
        others = [sim.tensor(noise(64 + size)) for size in (0, 64) for _ in range(4)]
        before = [sim.read(each) for each in others]
        buffers, moved = both.fetch(9, 70)
        both.sender._stream.held = False  # type: ignore[attr-defined]
        await moved
        await sending
        assert all(map(torch.equal, map(sim.read, buffers), values))
        assert all(map(torch.equal, map(sim.read, others), before))


async def test_a_work_that_is_in_a_stream_of_the_groups_is_held_until_it_is_done() -> None:
    async with ends() as both:
        both.sim.process_group.old = True
        sending = both.send(both.sim.tensor(noise(9)))
        _, moved = both.fetch(9)
        (receiving,) = (group for group in both.groups if group.rank == 1)
        gc.collect()
        work = receiving.works[-1]
        assert work() is not None
        await moved
        await sending
        await until(lambda: gc.collect() >= 0 and work() is None)


async def test_what_is_idle_watches_nothing() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(9)))
        _, moved = both.fetch(9)
        assert both.receiver._flow._watch is not None
        await asyncio.gather(sending, moved)
        for end in (both.sender, both.receiver):
            assert end._flow._watch is None  # a timer would keep the route


async def test_nothing_is_issued_before_the_receiver_has_issued_it() -> None:
    async with ends() as both:
        sending = both.send(both.sim.tensor(noise(9)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [group.sent for group in both.groups] == [[], []]
        _, moved = both.fetch(9)
        await moved
        await sending


async def test_a_receiver_issues_no_more_than_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclRoute, "chunk", 8)
    async with ends() as both:
        values = noise(8 * (WINDOW + 5))
        (buffer,), moved = both.fetch(values.numel())
        receiving = next(group for group in both.groups if group.rank == 1)
        assert len(receiving.sent) == WINDOW
        await both.send(both.sim.tensor(values))
        await moved
        assert torch.equal(both.sim.read(buffer), values)


async def test_a_dropped_message_takes_one_piece_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclRoute, "chunk", 64)
    async with ends() as both:
        sim, values = both.sim, noise(1000)
        sending = both.send(sim.tensor(values), sim.tensor(noise(3)))
        used = sim.used_bytes
        dropped = both.receiver.discard(b"", [1000, 3])
        again = both.receiver.discard(b"", [30])
        assert sim.used_bytes <= used + 64
        await dropped
        await sending
        await both.send(sim.tensor(noise(30)))
        await again
        gc.collect()
        sending = both.send(sim.tensor(values))
        (buffer,), moved = both.fetch(1000)
        await moved
        await sending
        assert torch.equal(sim.read(buffer), values)


async def test_a_send_is_done_when_the_receiver_has_said_that_it_has_it_all() -> None:
    async with ends() as both:
        both.kept = []
        sending = both.send(both.sim.tensor(noise(9)))
        _, moved = both.fetch(9)
        await moved
        await until(lambda: both.kept)
        await until(lambda: not any(stream.operations for stream in both.sim.streams))
        assert not sending.done()
        ((key, value),) = both.kept
        both.kept = None
        both.sender.deliver(key, value)
        await sending


async def test_buffers_are_held_until_they_are_sent_and_no_longer() -> None:
    async with ends() as both:
        sim, values = both.sim, noise(9)
        before = sim.used_bytes
        sending = both.send(sim.tensor(values), sim.tensor(values))
        gc.collect()
        buffers, moved = both.fetch(9, 9)
        await moved
        await sending
        assert torch.equal(sim.read(buffers[1]), values)
        del buffers, moved, sending
        await asyncio.sleep(0)
        gc.collect()
        assert sim.used_bytes == before
