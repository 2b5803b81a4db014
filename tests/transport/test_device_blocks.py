"""Buffers of a device joined and brought to one device, in the order of the streams."""

from __future__ import annotations

import torch

from aiocomm.packing import ALIGN, Block, plan_device, scatter
from aiocomm.transport.device_blocks import bring_over, gather_on_device, give_away

from ..simulated import Simulated, simulated


def noise(sim: Simulated, *sizes: int) -> list[torch.Tensor]:
    return [sim.tensor(torch.randint(0, 256, (size,), dtype=torch.uint8)) for size in sizes]


def test_small_buffers_are_joined_with_zeros_between() -> None:
    with simulated() as sim:
        sizes = [3, ALIGN, 5, 1]
        buffers = noise(sim, *sizes)
        blocks = plan_device(sizes)
        (joined,), held = gather_on_device(sim, blocks, buffers, sim.stream(0))
        others = noise(sim, *[ALIGN] * 8)  # the memory of what nobody holds would be one of these
        before = [sim.read(other) for other in others]
        sim.run()
        assert all(map(torch.equal, map(sim.read, others), before))
        assert len(held) == 1
        whole = sim.read(joined)
        assert whole.numel() == 3 * ALIGN + 1
        for (number, offset, size), buffer in zip(blocks[0].parts, buffers, strict=True):
            assert torch.equal(whole[offset : offset + size], sim.read(buffer))
            assert number < len(buffers)
        assert whole[3:ALIGN].tolist() == [0] * (ALIGN - 3)
        for part, buffer in zip(scatter(blocks, [joined], sizes), buffers, strict=True):
            assert torch.equal(sim.read(part), sim.read(buffer))


def test_a_block_of_one_buffer_is_that_buffer() -> None:
    with simulated() as sim:
        (buffer,) = noise(sim, 9)
        (same,), held = gather_on_device(sim, [Block(9, ((0, 0, 9),))], [buffer], sim.stream(0))
        assert same is buffer
        assert held == []


def test_buffers_on_another_device_are_copied_over_when_they_are_full() -> None:
    with simulated() as sim:
        buffers = noise(sim, 4, 7)
        filling, using = sim.stream(0), sim.stream(1)
        filling.held = True
        with sim.using(filling):
            sim.write(buffers[0], torch.arange(4, dtype=torch.uint8))
        after = sim.record(filling)
        near = bring_over(sim, buffers, using, after)
        result = sim.tensor(torch.zeros(4, dtype=torch.uint8), 1)
        sim.copy(result, near[0], using)
        sim.run()
        assert sim.read(result).tolist() == [0, 0, 0, 0], "the stream waits for the copy"
        filling.held = False
        sim.run()
        assert sim.read(result).tolist() == [0, 1, 2, 3]
        assert torch.equal(sim.read(near[1]), sim.read(buffers[1]))
        assert [sim.device_of(each).index for each in near] == [1, 1]


def test_memory_on_the_other_device_is_written_to_when_its_stream_has_come_there() -> None:
    with simulated() as sim:
        buffers = noise(sim, 4, 7)
        using = sim.stream(1)
        using.held = True  # whoever had the memory before still uses it in this stream
        near = bring_over(sim, buffers, using, sim.record(sim.default[0]))
        sim.run()
        using.held = False
        sim.run()
        assert all(map(torch.equal, map(sim.read, near), map(sim.read, buffers)))


def test_buffers_on_the_device_itself_stay() -> None:
    with simulated() as sim:
        buffers = noise(sim, 4)
        stream = sim.stream(0)
        assert bring_over(sim, buffers, stream, sim.record(stream)) is buffers


def test_what_is_given_away_is_known_to_be_used_in_the_current_stream() -> None:
    with simulated() as sim:
        memory = [sim.allocate(8, sim.stream(1))]
        with sim.using(sim.stream(1)):
            give_away(sim, memory, 1)
            assert sim.lent == [(memory[0].data_ptr(), sim.streams[-1])]
