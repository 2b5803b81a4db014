"""The adapter for CUDA on a real chip: streams, events, memory, and what other processes see."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from aiocomm.device.cuda import CudaAccelerator
from aiocomm.errors import RouteError
from aiocomm.transport.completion import poller_of

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio]

CYCLES = 5_000_000  # some ms


def accelerator() -> CudaAccelerator:
    torch.cuda.set_device(0)
    return CudaAccelerator()


async def test_a_stream_waits_for_an_event_and_the_host_does_not() -> None:
    device = accelerator()
    first, second = device.stream(0), device.stream(0, high_priority=True)
    source = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    target = device.zeros(source.numel(), second)
    with device.using(first):
        torch.cuda._sleep(CYCLES)
        source.fill_(7)
    event = device.record(first)
    assert not event.query()
    device.wait(second, event)
    device.copy(target, source, second)
    await poller_of(asyncio.get_running_loop()).watch(device.record(second), keep=(source, target))
    assert event.query()
    assert target.min().item() == 7


async def test_no_two_streams_are_one_and_torch_takes_them_as_its_own() -> None:
    device = accelerator()
    streams = [device.stream(0) for _ in range(70)]  # torch has 32 of a kind
    assert len({stream.key for stream in streams}) == 70
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    for stream in streams:
        device.wait(stream, device.record(device.current_stream(0)))
        with device.using(stream):
            tensor.add_(1)
        device.wait(device.current_stream(0), device.record(stream))
        device.lend(tensor, stream)
    assert tensor.float().mean().item() == 70


async def test_an_event_may_be_asked_for_in_any_thread() -> None:
    # F48: an event used in a thread whose current device is another one, or none.
    device = accelerator()
    event = device.record(device.stream(torch.cuda.device_count() - 1))
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(event.query()))
    thread.start()
    thread.join()
    device.finish(event)
    assert event.query()
    assert len(found) == 1


async def test_pieces_are_joined_and_pinned_memory_is_pinned() -> None:
    device = accelerator()
    stream = device.stream(0)
    pieces = [torch.full((n,), n, dtype=torch.uint8, device="cuda") for n in range(1, 5)]
    device.wait(stream, device.record(device.current_stream(0)))
    whole = device.join(pieces, stream)
    host = device.pinned(whole.numel())
    assert host.is_pinned()
    device.copy(host, whole, stream)
    device.finish(device.record(stream))
    assert host.tolist() == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]


async def test_memory_is_exported_by_its_allocation_and_from_any_thread() -> None:
    device = accelerator()
    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    handle, offset = device.export(memory)
    again, further = device.export(memory[12345:])
    assert (again, further) == (handle, offset + 12345)
    assert len(handle) == 64
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(device.export(memory)))
    thread.start()
    thread.join()
    assert found == [(handle, offset)]


async def test_what_cannot_be_shared_says_why() -> None:
    device = accelerator()
    with pytest.raises(RouteError, match="cannot be mapped here: cuIpcOpenMemHandle"):
        device.open_memory(bytes(64), 0)
    with pytest.raises(RouteError, match="an event of the peer cannot be opened"):
        device.open_event(bytes(64), device.stream(0))


async def test_identity_and_shared_events() -> None:
    device = accelerator()
    identity = device.identity(0)
    assert len(identity.uuid) >= 32
    assert identity.model
    event = device.shared_event(0)
    assert len(event.handle) == 64
    stream = device.stream(0)
    for _ in range(3):
        with device.using(stream):
            torch.cuda._sleep(CYCLES)
        recorded = event.record(stream)
        assert not recorded.query()
        device.finish(recorded)
        assert recorded.query()
