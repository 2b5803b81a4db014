"""Where the bytes of an arriving message are moved from and to; the ways as a whole are in
tests/system/test_device.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiocomm.entries import Incoming
from aiocomm.errors import DecodeError, ProtocolError
from aiocomm.options import Options
from aiocomm.payload import Kind, pack_tensor, spec_of
from aiocomm.runtime import Runtime
from aiocomm.scheduler.arrival import Arrival
from aiocomm.scheduler.envelope import BY_DEVICE, FAR
from aiocomm.scheduler.movers import STAGED, DeviceMover, HostMover
from aiocomm.scheduler.works import RecvWork

from ..simulated import Simulated, simulated

pytestmark = pytest.mark.asyncio

VALUES = torch.arange(8, dtype=torch.uint8)


class Route:
    """A route that is done at once with whatever it is asked, and remembers it."""

    name = "pigeon"
    index = 1

    def __init__(self, sim: Simulated | None = None, held: object = None) -> None:
        self.asked: list[Any] = []
        self._sim = sim
        self._held = held

    def _done(self, *what: Any) -> asyncio.Future[None]:
        self.asked.append(what)
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def hold(self, body: bytes, sizes: Any) -> Any:
        self.asked.append(("hold", body, sizes))
        return self._held

    def end(self, upcoming: Any) -> int | None:
        self.asked.append(("end", upcoming))
        return len(upcoming)

    def receive(self, *args: Any, after: Any = None) -> asyncio.Future[None]:
        return self._done("receive", *args)

    def fetch(self, *args: Any) -> tuple[list[torch.Tensor], asyncio.Future[None]]:
        values = VALUES.clone() if self._sim is None else self._sim.tensor(VALUES, 1)
        return [values], self._done("fetch", *args)

    def discard(self, *args: Any) -> asyncio.Future[None]:
        return self._done("discard", *args)


class Held:
    """A message in memory of a route."""

    def __init__(self) -> None:
        self.view = memoryview(bytes(VALUES.tolist()))
        self.released = 0

    def release(self) -> None:
        self.released += 1


def movers(**settings: Any) -> tuple[HostMover, DeviceMover]:
    runtime = Runtime(asyncio.get_running_loop(), Options(**{"device": 1, **settings}), "a:0")
    host = HostMover(runtime)
    return host, DeviceMover(runtime, host)


def message(body: Any = b"", *, bulk: bool = True, by_device: bool = False) -> Incoming:
    arrival = Arrival(Kind.TENSOR, pack_tensor(VALUES).meta, body, 8, (8,))
    arrival.far = FAR | BY_DEVICE * by_device
    return Incoming(arrival, 0, 8, 1, bulk)


def call(sim: Simulated, index: int) -> RecvWork:
    work = RecvWork(loop=asyncio.get_running_loop())
    work._buffer = work._bytes = sim.tensor(torch.zeros(8, dtype=torch.uint8), index)
    work._spec = spec_of(work._buffer)
    work._ready = sim.record(sim.default[index])
    return work


async def test_what_came_whole_still_has_to_move() -> None:
    _, device = movers()
    small = message(bytes(8), bulk=False)
    device.admit(small)
    assert (small.far, small.here, small.bulk) == (True, True, True)
    assert device.route_of(small) == "link"


async def test_what_is_in_this_process_stays_where_it_is() -> None:
    _, device = movers()
    local = message((VALUES,), bulk=False)
    device.admit(local)
    assert (local.far, local.here, local.bulk) == (True, False, False)
    assert device.route_of(local) == "memory"


@pytest.mark.parametrize("by_device", [True, False])
async def test_a_route_that_was_not_agreed_on_is_the_peers_fault(by_device: bool) -> None:
    host, device = movers()
    with pytest.raises(ProtocolError, match="no route was agreed on"):
        device.admit(message(by_device=by_device))
    host.route = device.route = Route()  # type: ignore[assignment]
    bulk = message(b"of the route", by_device=by_device)
    device.admit(bulk)
    assert not bulk.here
    assert device.route_of(bulk) == ("pigeon" if by_device else STAGED)
    assert bool(bulk.owner.body) is by_device, "the body is the route's own"


@pytest.mark.parametrize("into", [True, False])
async def test_what_the_hosts_route_holds_is_brought_to_the_device(into: bool) -> None:
    with simulated(auto=True) as sim:
        host, device = movers()
        held = Held()
        host.route = Route(held=held)  # type: ignore[assignment]
        bulk = message(b"piece")
        device.admit(bulk)
        assert bulk.here
        work = call(sim, 1) if into else None
        await device.take_in(bulk.owner, work)
        memory = work._bytes if work else bulk.owner.buffers[0]
        assert torch.equal(sim.read(memory), VALUES)
        assert held.released == 1
        assert device.route_of(bulk) == STAGED


@pytest.mark.parametrize("held", [True, False])
async def test_dropping_what_is_here_asks_nobody(held: bool) -> None:
    host, device = movers()
    route = host.route = Route(held=Held() if held else None)  # type: ignore[assignment]
    here = message(b"12345678", bulk=held)
    device.admit(here)
    await device.discard(here.owner)
    assert [what for what, *_ in route.asked] == (["hold"] if held else [])  # type: ignore[union-attr]


@pytest.mark.parametrize("by_device", [True, False])
async def test_dropping_what_is_not_here_asks_its_route(by_device: bool) -> None:
    host, device = movers()
    host.route = device.route = route = Route()  # type: ignore[assignment]
    bulk = message(by_device=by_device)
    device.admit(bulk)
    await device.discard(bulk.owner)
    assert route.asked == [("discard", b"", (8,)) if by_device else ("discard", (8,))]


async def test_a_buffer_on_the_devices_own_is_received_into() -> None:
    with simulated(auto=True) as sim:
        _, device = movers()
        route = device.route = Route(sim)  # type: ignore[assignment]
        work = call(sim, 1)
        await device.take_in(message(by_device=True).owner, work)
        assert route.asked == [("receive", b"", work._bytes)]  # type: ignore[union-attr]


async def test_a_buffer_on_another_device_gets_a_copy() -> None:
    with simulated(auto=True) as sim:
        _, device = movers()
        device.route = Route(sim)  # type: ignore[assignment]
        work = call(sim, 0)
        await device.take_in(message(by_device=True).owner, work)
        assert torch.equal(sim.read(work._bytes), VALUES)


@pytest.mark.parametrize("lies", ["in memory of its own", "in the sender's"])
async def test_copies_into_a_buffer_and_out_of_it(lies: str) -> None:
    with simulated(auto=True) as sim:
        _, device = movers()
        values = sim.tensor(VALUES, 1)
        arrival = message((values,) if lies == "in the sender's" else b"").owner
        arrival.buffers = () if lies == "in the sender's" else [values]
        work = call(sim, 1)
        await device.copy(arrival, work)
        assert torch.equal(sim.read(work._bytes), VALUES)
        assert torch.equal(sim.read(await device.clone(work._bytes)), VALUES)
        assert torch.equal(sim.read(device.clone_now(work._bytes)), VALUES)


@pytest.mark.parametrize("settings", [{}, {"device": 7}])
async def test_without_its_device_the_message_cannot_be_rebuilt(settings: Any) -> None:
    with simulated(devices=2 if settings else 0):
        host, device = movers(**settings)
        host.route = Route()  # type: ignore[assignment]
        arrival = message().owner
        await device.take_in(arrival, None)
        with pytest.raises(DecodeError, match=r"the message has CUDA tensors: .*device"):
            arrival.rebuild()


async def test_what_the_host_moves() -> None:
    host, _ = movers()
    assert host.end([]) is None
    host.route = route = Route()  # type: ignore[assignment]
    arrival = message().owner
    await host.take_in(arrival, None)
    assert arrival.buffers[0].tolist() == VALUES.tolist()
    work: Any = SimpleNamespace(_bytes=torch.zeros(8, dtype=torch.uint8))
    await host.take_in(arrival, work)
    await host.discard(arrival)
    assert [what for what, *_ in route.asked] == ["fetch", "receive", "discard"]
    arrival.held = held = Held()
    await host.discard(arrival)  # what is here needs no route
    assert (len(route.asked), held.released) == (3, 1)
    assert host.clone_now(VALUES).tolist() == VALUES.tolist()


async def test_behind_what_the_peers_device_holds_nothing_can_be_had() -> None:
    host, _ = movers()
    host.route = route = Route()  # type: ignore[assignment]
    first, whole, lost, late = message(), message(), message(by_device=True), message()
    whole.here = True
    assert host.end([first, whole, lost, late]) == 1
    assert route.asked == [("end", [(8,)])]
