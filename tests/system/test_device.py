"""What a group promises of tensors on a device, on every way that they may take, simulated."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

from aiocomm.errors import PairingError, PayloadError

from ..device_pairs import LARGE, SMALL, device_pair, each_size, each_way, each_wire
from ..pairs import MEMBERS

pytestmark = pytest.mark.asyncio


@each_way
@each_size
async def test_what_was_queued_before_send_is_what_arrives(way: str, size: int) -> None:
    async with device_pair(way) as world:
        for start in range(3):
            values = world.ramp(size, start)
            tensor = world.here(torch.zeros(size))
            world.sim.write(tensor, values)  # queued, and not carried out yet
            sending = world.a.send({"x": tensor, "n": start})
            got = await world.b.recv()
            await sending
            assert got["n"] == start
            assert world.sim.device_of(got["x"]) == torch.device("cuda", world.there)
            assert torch.equal(world.sim.read(got["x"]), values)


@each_way
@each_size
async def test_a_buffer_is_filled_after_what_was_queued_for_it(way: str, size: int) -> None:
    async with device_pair(way) as world:
        values = world.ramp(size, 5)
        buffer = world.buffer(size)
        with world.sim.using(world.sim.stream(world.there)):
            world.sim.write(buffer, torch.full((size,), -1.0))  # would be seen if it came later
            receiving = world.b.recv_tensor(buffer)
        sending = world.a.send_tensor(world.here(values))
        assert await receiving is buffer
        await sending
        world.sim.run()
        assert torch.equal(world.sim.read(buffer), values)


@each_way
@each_size
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("late", ["the receiver", "the sender"])
async def test_a_buffer_on_any_device_waits_for_what_is_queued_on_both_sides(
    way: str, size: int, index: int, late: str
) -> None:
    async with device_pair(way) as world:
        values, zeros, sim = world.ramp(size, 5), torch.zeros(size), world.sim
        tensor, buffer = sim.tensor(zeros, 0), sim.tensor(zeros, index)
        ours, theirs = sim.stream(0), sim.stream(index)
        (theirs if late == "the receiver" else ours).held = True
        with sim.using(theirs):
            sim.write(buffer, torch.full((size,), -1.0))
            receiving = world.b.recv_tensor(buffer)
        with sim.using(ours):
            sim.write(tensor, values)
            sending = world.a.send_tensor(tensor)
        for _ in range(300):  # as far as it comes
            await asyncio.sleep(0)
            sim.run()
        assert set(sim.read(buffer).tolist()) == {0.0 if late == "the receiver" else -1.0}
        assert not receiving.done()
        ours.held = theirs.held = False
        assert await receiving is buffer
        await sending
        assert torch.equal(sim.read(buffer), values)


@each_way
@each_size
async def test_the_sender_may_drop_its_tensor_at_once(way: str, size: int) -> None:
    async with device_pair(way) as world:
        values = world.ramp(size, 3)
        tensor = world.here(torch.zeros(size))
        world.sim.write(tensor, values)
        work = world.a.send_tensor(tensor)
        del tensor
        gc.collect()
        buffer = world.buffer(size)
        await world.b.recv_tensor(buffer)
        await work
        assert torch.equal(world.sim.read(buffer), values)


@each_way
@each_size
async def test_a_function_that_queues_work_on_what_came_is_done_when_the_device_is(
    way: str, size: int
) -> None:
    async with device_pair(way) as world:
        sim, values = world.sim, world.ramp(size, 3)
        began = asyncio.Event()

        def use(message: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            message["y"] = sim.tensor(torch.zeros(size), world.there)
            stream = sim.current_stream(world.there)
            stream.held = True
            sim.copy(message["y"], message["x"], stream)
            began.set()
            return message

        with sim.using(sim.default[world.there]):  # its device is the current one
            sending = world.a.send({"x": world.here(values)})
            work = world.b.recv().then(use)
            await began.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not work.done()
            sim.default[world.there].held = False
            got = await work
            assert torch.equal(sim.read(got["y"]), values), "nobody had to wait for a stream"
            await sending


@each_way
async def test_many_small_tensors_travel_together(way: str) -> None:
    async with device_pair(way) as world:
        sent = {f"{n}": world.here(torch.full((n + 1,), n, dtype=torch.int16)) for n in range(100)}
        shared = world.here(world.ramp(100))
        sent["left"], sent["right"] = shared[:60], shared[40:]
        work = world.a.send(sent)
        got = await world.b.recv()
        await work
        for n in range(100):
            assert world.sim.read(got[f"{n}"]).tolist() == [n] * (n + 1)
        assert world.sim.read(got["right"]).tolist() == list(range(40, 100))
        world.sim.write(got["left"], torch.zeros(60))
        world.sim.run()
        assert world.sim.read(got["right"])[:20].tolist() == [0.0] * 20
        if way == "nccl":
            assert [len(group.sent) for group in world.process_groups] == [1, 1]


@each_way
async def test_order_holds_across_both_kinds_of_memory(way: str) -> None:
    async with device_pair(way) as world:
        works = []
        for n in range(24):
            size = (SMALL, LARGE, 4 * LARGE)[n % 3]
            values = world.ramp(size, n)
            works.append(world.a.send(world.here(values) if n % 2 else values))
            works.append(world.a.send(n))
        for n in range(24):
            size = (SMALL, LARGE, 4 * LARGE)[n % 3]
            got = await world.b.recv()
            values = world.sim.read(got) if n % 2 else got
            assert torch.equal(values, world.ramp(size, n))
            assert await world.b.recv() == n
        await asyncio.gather(*works)


@each_way
async def test_both_directions_at_once(way: str) -> None:
    async with device_pair(way) as world:
        tensors = [world.sim.tensor(world.ramp(LARGE, n), n % 2) for n in range(8)]
        works = [(world.a, world.b)[n % 2].send(tensor) for n, tensor in enumerate(tensors)]
        for n in range(8):
            got = await (world.b, world.a)[n % 2].recv()
            assert torch.equal(world.sim.read(got), world.ramp(LARGE, n))
        await asyncio.gather(*works)


@each_wire
@each_size
async def test_what_comes_is_lent_to_the_stream_of_the_calling_thread(way: str, size: int) -> None:
    async with device_pair(way) as world:
        mine = world.sim.stream(1)

        def call() -> Any:
            with world.sim.using(mine):
                return world.b.recv()

        # Else it could be given out again, once dropped, while a kernel in that stream reads it.
        for cancelled in (False, True):
            sending = world.a.send({"x": world.here(world.ramp(size)), "n": 1})
            receiving = await asyncio.to_thread(call)
            if cancelled and receiving.cancel():  # else it has come while the thread was at work
                receiving = await asyncio.to_thread(call)
            got = await receiving
            await sending
            assert (got["x"].data_ptr(), mine) in world.sim.lent
            world.sim.lent.clear()


async def test_what_comes_is_lent_to_no_stream_of_another_device() -> None:
    async with device_pair("staged", device=None) as world:
        mine = world.sim.stream(1)

        def call() -> Any:
            with world.sim.using(mine):  # the runtime receives on the device of the loop's thread
                return world.b.recv()

        receiving = await asyncio.to_thread(call)
        await world.a.send(world.here(world.ramp(SMALL)))
        assert world.sim.device_of(await receiving).index == 0
        assert {stream.index for _, stream in world.sim.lent} == {0}


async def test_a_device_that_is_not_there_is_no_matter_for_what_is_on_the_host() -> None:
    async with device_pair("staged", device=7) as world:
        await world.a.send("a word")
        assert await world.b.recv() == "a word"


@each_way
@each_size
async def test_the_stream_of_a_calling_thread_is_its_own(way: str, size: int) -> None:
    async with device_pair(way) as world:
        values, tensor = world.ramp(size, 4), world.here(torch.zeros(size))
        world.sim.default[0].held = True  # the loop's thread has much to do

        def call() -> Any:
            with world.sim.using(world.sim.stream(0)):
                world.sim.write(tensor, values)
                return world.a.send(tensor)

        sending = await asyncio.to_thread(call)
        assert torch.equal(world.sim.read(await world.b.recv()), values)
        await sending


async def test_groups_may_begin_in_opposite_orders() -> None:
    async with device_pair("nccl") as world:
        first, second = (
            [each.create_collective_group(MEMBERS, name) for name in "xy"]
            for each in world.collectives
        )
        sends = [group.send(world.here(world.ramp(LARGE))) for group in first]
        recvs = [group.recv() for group in second[::-1]]
        back = [group.send(world.buffer(LARGE)) for group in second[::-1]]
        got = [await each for each in (*recvs, *(group.recv() for group in first))]
        assert [world.sim.read(each)[1].item() for each in got] == [1, 1, 0, 0]
        await asyncio.gather(*sends, *back)
        assert len(world.process_groups) == 8


@each_way
async def test_tensors_without_elements(way: str) -> None:
    async with device_pair(way) as world:
        sent = [world.sim.empty(torch.float32, (0,)), world.sim.empty(torch.int8, (2, 0))]
        await world.a.send(sent)
        got = await world.b.recv()
        assert [tensor.shape for tensor in got] == [(0,), (2, 0)]
        assert not any(map(world.sim.on_cpu, got))
        buffer = world.sim.empty(torch.float32, (0,))
        work = world.a.send_tensor(sent[0])
        assert await world.b.recv_tensor(buffer) is buffer
        await work


# --- refused ---


async def test_what_cannot_be_sent_is_refused_at_the_call_and_the_next_call_works() -> None:
    async with device_pair("nccl") as world:
        square = world.here(world.ramp(36)).view(6, 6)
        with pytest.raises(
            PayloadError, match=r"not contiguous: send tensor.contiguous\(\), a copy"
        ):
            world.a.send({"x": square.T})
        with pytest.raises(PayloadError, match="not contiguous"):
            world.a.send_tensor(square[:, ::2])
        with pytest.raises(PayloadError, match="not contiguous"):
            world.b.recv_tensor(square.T)
        with pytest.raises(PayloadError, match=r"on cpu and on cuda:0: move them to one device"):
            world.a.send([torch.zeros(3), square])
        with pytest.raises(PayloadError, match=r"on cuda:0 and on cuda:1"):
            world.a.send({"x": square, "y": world.buffer(3)})
        work = world.a.send(square)
        assert world.sim.read(await world.b.recv()).tolist() == world.ramp(36).view(6, 6).tolist()
        await work


@each_way
@each_size
@pytest.mark.parametrize("sent_from", ["device", "host"])
async def test_a_buffer_in_other_memory_is_a_mismatch(
    way: str, size: int, sent_from: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with device_pair(way) as world:
        values, on_device = world.ramp(size), sent_from == "device"
        buffer = torch.zeros(size) if on_device else world.buffer(size)
        sending = world.a.send_tensor(world.here(values) if on_device else values)
        with pytest.raises(PairingError, match=r"on (cuda|cpu)\) met recv_tensor.*on (cuda|cpu)"):
            await world.b.recv_tensor(buffer)
        content = buffer if on_device else world.sim.read(buffer)
        assert content.tolist() == [0.0] * size
        await asyncio.wait([sending])
        sending.exception()
        work = world.a.send_tensor(world.here(values))
        buffer = world.buffer(size)
        await world.b.recv_tensor(buffer)
        await work
        assert torch.equal(world.sim.read(buffer), values)
    caplog.clear()


# --- cancelled ---


@each_way
@each_size
async def test_a_cancelled_receive_loses_nothing(way: str, size: int) -> None:
    async with device_pair(way) as world:
        values = world.ramp(size, 9)
        first = world.buffer(size)
        receiving = world.b.recv_tensor(first)
        sending = world.a.send_tensor(world.here(values))
        for _ in range(6):
            await asyncio.sleep(0)
        receiving.cancel()
        second = world.buffer(size)
        await world.b.recv_tensor(second)
        await sending
        assert torch.equal(world.sim.read(second), values)


@each_way
@each_size
async def test_a_message_that_nobody_took_after_all_is_the_next_ones(way: str, size: int) -> None:
    async with device_pair(way) as world:
        values = world.ramp(size, 9)
        receiving = world.b.recv_tensor(world.buffer(size))
        taking = asyncio.ensure_future(_take(receiving))
        await asyncio.sleep(0)
        await world.a.send_tensor(world.here(values))
        await asyncio.wait([receiving])
        if taking.cancel():
            await asyncio.wait([taking])
        if taking.cancelled():
            buffer = world.buffer(size)
            assert await world.b.recv_tensor(buffer) is buffer
            assert torch.equal(world.sim.read(buffer), values)


async def _take(work: Any) -> Any:
    return await work


@each_way
@each_size
async def test_a_cancelled_send_goes_on_or_is_taken_back(way: str, size: int) -> None:
    async with device_pair(way) as world:
        await asyncio.gather(world.a.ready(), world.b.ready())
        works = [world.a.send(world.here(world.ramp(size, n))) for n in range(6)]
        works[3].cancel()
        kept = [n for n, work in enumerate(works) if not work.cancelled()]
        assert kept == [0, 1, 2, 4, 5]
        got = [world.sim.read(await world.b.recv())[0].item() for _ in kept]
        assert got == kept
        await asyncio.gather(*(works[n] for n in kept))
        await world.a.send("the end")
        assert await world.b.recv() == "the end"
