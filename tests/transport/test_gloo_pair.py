"""Where Gloo blocks: setting a pair up, peers that stop or die, and what ends each wait."""

from __future__ import annotations

import asyncio
import itertools
import signal
import struct
import time

import pytest
import torch

from aiocomm.errors import RouteError
from aiocomm.transport import gloo_pair
from aiocomm.transport.gloo import GlooRoute

from ..processes import Stage, Workers, run_workers
from .gloo_ends import MIB, like, make, make_both, noise, opened, same, staged, until


class TestOpen:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("sending", [True, False])
    async def test_peer_that_publishes_and_never_connects(self, sending):
        # Closing must end a constructor that waits in Gloo, not only one that waits in the store.
        records: dict[bool, tuple[str, bytes]] = {}
        donors = make_both()
        for donor in donors:
            donor._publish = lambda *pair, donor=donor: records.__setitem__(donor.sending, pair)
        attempts = [asyncio.create_task(donor.open()) for donor in donors]
        await until(lambda: len(records) == 2)
        for donor in donors:
            donor.sever()
        await asyncio.wait(attempts)
        assert all(isinstance(attempt.exception(), RouteError) for attempt in attempts)
        for donor in donors:
            await donor.aclose()

        # A peer whose address is higher is the one that dials.
        key, record = records[not sending]
        at = 16 + struct.unpack_from("=Q", record)[0] + 2
        record = record[:at] + struct.pack("!H", 65535) + record[at + 2 :]
        route = make("a>b", sending)
        route.deliver(key, record)
        opening = asyncio.create_task(route.open())
        await until(lambda: route._pair.store.own_values)
        started = time.monotonic()
        route.sever()
        with pytest.raises(RouteError):
            await opening
        await route.aclose()
        assert time.monotonic() - started < gloo_pair.GIVE_UP  # not given up: ended

    @pytest.mark.asyncio
    async def test_garbage_for_an_address(self):
        route = make("a>b", True, timeout=10.0)
        route.deliver("a>b/0/1", b"\xff" * 300)
        with pytest.raises(RouteError, match="could not be set up"):
            await route.open()
        await route.aclose()

    @pytest.mark.asyncio
    async def test_address_that_cannot_be_bound(self):
        loop = asyncio.get_running_loop()
        route = GlooRoute(
            "a>b", sending=True, local_host="192.0.2.1", loop=loop, publish=lambda *_: None
        )
        with pytest.raises(RouteError, match="could not be set up") as caught:
            await route.open()
        assert isinstance(caught.value.__cause__, RuntimeError)
        await route.aclose()

    @pytest.mark.asyncio
    async def test_named_interface_wins(self, monkeypatch):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
        route = make("a>b", True)
        with pytest.raises(RouteError, match="could not be set up"):
            await route.open()
        await route.aclose()
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send_blocks(noise(3)), receiver.discard_blocks([3]))

    @pytest.mark.asyncio
    async def test_many_at_once(self):
        both = [make_both(f"route {number}") for number in range(32)]
        await asyncio.gather(*(route.open() for pair in both for route in pair))
        messages = [noise(1000) for _ in both]
        buffers = [like(message) for message in messages]
        sent = [pair[0].send_blocks(message) for pair, message in zip(both, messages, strict=True)]
        received = [pair[1].receive(buffer) for pair, buffer in zip(both, buffers, strict=True)]
        await asyncio.gather(*sent, *received)
        assert all(map(same, messages, buffers))
        await asyncio.gather(*(route.aclose() for pair in both for route in pair))

    def test_ring_of_three_processes(self, loop_name):
        assert run_workers(ring, 3, loop=loop_name) == [2, 0, 1]


async def ring(stage: Stage) -> int:
    following = (stage.rank + 1) % 3
    before = (stage.rank + 2) % 3
    async with (
        asyncio.timeout(30),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(ring_send(stage, f"{stage.rank}>{following}"))
        received = group.create_task(ring_receive(stage, f"{before}>{stage.rank}"))
    return received.result()


async def ring_send(stage: Stage, label: str) -> None:
    async with staged(stage, label, True) as route:
        await route.send_blocks([torch.full((1000,), stage.rank, dtype=torch.uint8)])


async def ring_receive(stage: Stage, label: str) -> int:
    buffer = torch.zeros(1000, dtype=torch.uint8)
    async with staged(stage, label, False) as route:
        await route.receive([buffer])
    return int(buffer.unique())


STALL = 1.5  # seconds
SIZE = 64 * MIB  # far more than any kernel buffers


class TestPeerProcess:
    LOOPS = ("uvloop",)  # Gloo knows no loop

    @pytest.mark.parametrize("sending", [True, False])
    @pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
    def test_pending_transfers_fail_soon_when_severed(self, loop_name, sending, number):
        # Who is gone, or hangs, is told by the link, which severs the route then.
        with Workers(2, loop=loop_name) as workers:
            survivor = workers.start(sever_in_the_middle, sending, strict=False)
            peer = workers.start(stream_for_ever, not sending, strict=False)
            workers.wait("under way")
            peer.signal(number)
            workers.set("signalled")
            assert survivor.result() is None

    @pytest.mark.parametrize("how", ["loop ends", "never closed", "while opening"])
    def test_process_that_leaves_without_closing_ends(self, loop_name, how):
        with Workers(2, loop=loop_name) as workers:
            leaver = workers.start(leave, how, strict=False)
            peer = workers.start(outlive, how, strict=False)
            assert leaver.wait() == 0
            assert leaver.stderr == ""
            workers.set("gone")
            peer.result()


async def stream_for_ever(stage: Stage, sending: bool) -> None:
    async with staged(stage, "a>b", sending) as route:
        buffer = torch.ones(SIZE, dtype=torch.uint8)
        while True:
            await (route.send_blocks([buffer]) if sending else route.receive([buffer]))


async def sever_in_the_middle(stage: Stage, sending: bool) -> None:
    buffer = torch.ones(SIZE, dtype=torch.uint8)
    # Gloo's own time-out, until which it may hold the broken chunk, is not what ends them here.
    async with staged(stage, "a>b", sending, stall_timeout=600.0) as route:
        start = route.send_blocks if sending else route.receive
        await start([buffer])
        pending = [start([buffer]) for _ in range(400)]
        stage.set("under way")
        await stage.wait("signalled")
        route.sever()
        await asyncio.wait(pending)
        assert all(isinstance(p.exception(), RouteError) for p in pending if p.exception())
        assert pending[-1].exception() is not None


_kept: list[object] = []


async def leave(stage: Stage, how: str) -> None:
    numbers = itertools.count()
    route = make("a>b", True, lambda *pair: stage.set(f"a>b/True/{next(numbers)}", pair))
    opening = asyncio.create_task(route.open())
    if how == "while opening":
        await stage.wait("never mind")
        _kept.append((route, opening))
        return
    route.deliver(*await stage.wait("a>b/False/0"))
    await opening
    route.deliver(*await stage.wait("a>b/False/1"))  # ready
    pending = route.send_blocks([torch.frombuffer(bytearray(SIZE), dtype=torch.uint8)])
    if how == "never closed":
        _kept.append((route, pending))


async def outlive(stage: Stage, how: str) -> None:
    if how == "while opening":
        await stage.wait("a>b/True/0")
        stage.set("never mind")
        return
    async with staged(stage, "a>b", False, stall_timeout=STALL) as route:
        received = route.receive([torch.zeros(SIZE, dtype=torch.uint8)])
        await stage.wait("gone")
        await asyncio.wait([received])
        received.exception()
