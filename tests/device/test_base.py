"""The interface: what every accelerator must have, and that the simulated one is a strict one."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch

from aiocomm.device.base import Accelerator, Identity
from aiocomm.errors import DeviceError

from ..simulated import Simulated
from ..simulated_memory import FRESH, RUBBISH, SCRIBBLE


def test_every_operation_says_what_it_does() -> None:
    for name, member in vars(Accelerator).items():
        if inspect.isfunction(member):
            assert member.__doc__, name
            assert name in Accelerator.__abstractmethods__


def test_a_chip_is_known_by_two_texts() -> None:
    assert Identity("a", "b") == Identity("a", "b") != Identity("c", "b")


# --- that the simulated one is strict enough for the tests that rely on it ---


def test_nothing_happens_before_its_stream_comes_there() -> None:
    sim = Simulated()
    source, target = sim.tensor(torch.arange(4)), sim.tensor(torch.zeros(4, dtype=torch.int64))
    first, second = sim.stream(0), sim.stream(0)
    with sim.using(first):
        sim.write(source, torch.full((4,), 7))
    event = sim.record(first)
    sim.wait(second, event)
    sim.copy(target, source, second)
    done = sim.record(second)
    sim.run(second)
    assert not done.query()
    assert sim.read(target).tolist() == [0, 0, 0, 0]
    sim.run(first)
    assert event.query()
    sim.run(second)
    assert done.query()
    assert sim.read(target).tolist() == [7, 7, 7, 7]


def test_without_a_wait_the_old_bytes_are_copied() -> None:
    sim = Simulated()
    source, target = sim.tensor(torch.arange(4)), sim.tensor(torch.zeros(4, dtype=torch.int64))
    sim.write(source, torch.full((4,), 7))
    copying = sim.stream(0)
    sim.copy(target, source, copying)
    sim.run(copying)
    assert sim.read(target).tolist() == [0, 1, 2, 3]


def test_the_host_sees_rubbish_and_what_is_dropped_is_scribbled_over() -> None:
    sim = Simulated()
    source, target = sim.tensor(torch.ones(4, dtype=torch.uint8)), sim.allocate(4, sim.default[0])
    assert source.tolist() == [RUBBISH] * 4
    assert not sim.on_cpu(source)
    assert sim.device_of(source) == torch.device("cuda", 0)
    sim.copy(target, source, sim.default[0])
    del source
    gc.collect()
    sim.run()
    assert sim.read(target).tolist() == [SCRIBBLE] * 4


def test_fresh_memory_is_still_written_to_by_who_had_it_before_in_its_own_stream() -> None:
    sim = Simulated()
    home, other = sim.stream(0), sim.stream(0)
    values = sim.tensor(torch.arange(4, dtype=torch.uint8))
    early, late = sim.allocate(4, home), sim.allocate(4, home)
    sim.copy(early, values, other)
    sim.run(other)
    assert sim.read(early).tolist() == [0, 1, 2, 3]
    sim.wait(other, sim.record(home))
    sim.copy(late, values, other)
    sim.run()
    assert sim.read(early).tolist() == [FRESH] * 4
    assert sim.read(late).tolist() == [0, 1, 2, 3]
    gone = sim.allocate(4, home)
    del gone
    reused = sim.tensor(torch.arange(4, dtype=torch.uint8))
    sim.run()
    assert sim.read(reused).tolist() == [0, 1, 2, 3], "it is not theirs any more"


def test_memory_is_kept_for_the_streams_that_it_was_lent_to() -> None:
    sim = Simulated()
    home, *others = (sim.stream(0) for _ in range(3))
    memory, values = sim.allocate(4, home), sim.tensor(torch.arange(4, dtype=torch.uint8))
    sim.copy(memory, values, home)
    sim.run()
    targets = [sim.tensor(torch.zeros(4, dtype=torch.uint8)) for _ in others]
    for stream, target in zip(others, targets, strict=True):
        sim.lend(memory, stream)
        sim.copy(target, memory, stream)
    used = sim.used_bytes
    del memory
    for stream in others:
        assert sim.used_bytes == used
        sim.run(stream)
    assert sim.used_bytes < used
    assert [sim.read(target).tolist() for target in targets] == [[0, 1, 2, 3]] * 2


def test_a_device_copies_to_pinned_memory_only() -> None:
    sim = Simulated()
    source, pinned = sim.tensor(torch.arange(4)), sim.pinned(32)
    sim.copy(pinned, source, sim.default[0])
    sim.run()
    assert sim.on_cpu(pinned)
    assert pinned.view(torch.int64).tolist() == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="not pinned"):
        sim.copy(torch.zeros(4, dtype=torch.int64), source, sim.default[0])


def test_a_stream_that_failed_says_so_at_every_event() -> None:
    sim = Simulated()
    stream = sim.stream(1)
    event = sim.record(stream)
    sim.fail(stream, "an illegal memory access")
    sim.run()
    for _ in range(2):
        with pytest.raises(DeviceError, match="device cuda:1 failed: an illegal memory access"):
            event.query()
    with pytest.raises(DeviceError):
        sim.finish(event)


def test_memory_is_given_back() -> None:
    sim = Simulated(devices=1)
    tensors = [sim.allocate(100, sim.default[0]), sim.pinned(100)]
    assert sim.used_bytes == 256
    del tensors
    assert sim.used_bytes == 0
    with pytest.raises(RuntimeError, match="simulated memory is out"):
        sim.allocate(1 << 40, sim.default[0])
