"""The Gloo route by itself: two ends in one process, or in two that are stopped and killed.

Between processes the stage plays the link: what a route publishes is shown to everybody under the
route's label. The checks for threads and sockets left behind are those of conftest and the workers.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import signal
import struct
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from aiocomm.errors import ProtocolError, RouteError, UsageError
from aiocomm.transport import gloo, gloo_pair
from aiocomm.transport.gloo import GlooRoute
from aiocomm.transport.gloo_store import MAX_KEYS, MAX_VALUE, LinkStore, PairRecord

from ..processes import Stage, Workers, run_workers

MIB = 1024 * 1024
HOST = "127.0.0.1"


def make(label: str, sending: bool, publish=lambda key, value: None, **kwargs) -> GlooRoute:
    loop = asyncio.get_running_loop()
    return GlooRoute(label, sending=sending, local_host=HOST, loop=loop, publish=publish, **kwargs)


def make_both(label: str = "a>b", **kwargs) -> tuple[GlooRoute, GlooRoute]:
    sender = make(label, True, lambda key, value: receiver.deliver(key, value), **kwargs)
    receiver = make(label, False, sender.deliver, **kwargs)
    return sender, receiver


@asynccontextmanager
async def opened(label: str = "a>b") -> AsyncIterator[tuple[GlooRoute, GlooRoute]]:
    sender, receiver = make_both(label)
    try:
        await asyncio.gather(sender.open(), receiver.open())
        yield sender, receiver
    finally:
        await sender.aclose()
        await receiver.aclose()


@asynccontextmanager
async def staged(stage: Stage, label: str, sending: bool, **kwargs) -> AsyncIterator[GlooRoute]:
    """One end in a worker; the other end is in another."""
    numbers = itertools.count()

    def publish(key: str, value: bytes) -> None:
        stage.set(f"{label}/{sending}/{next(numbers)}", (key, value))

    async def link() -> None:
        for number in itertools.count():
            route.deliver(*await stage.wait(f"{label}/{not sending}/{number}"))

    route = make(label, sending, publish, **kwargs)
    incoming = asyncio.create_task(link())
    try:
        await route.open()
        yield route
    finally:
        incoming.cancel()
        await asyncio.wait([incoming])
        await route.aclose()


def noise(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


def like(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(block) for block in blocks]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


class TestTransfers:
    @pytest.mark.asyncio
    async def test_blocks_of_any_size_arrive(self):
        blocks = noise(1, 0, 63, 4096, MIB + 1, 0)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send(blocks), receiver.receive(buffers))
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("size", [999, 1000, 1001, 2000, 100_003])
    async def test_chunks_meet_at_their_boundaries(self, size, monkeypatch):
        monkeypatch.setattr(gloo, "CHUNK", 1000)
        blocks = noise(size, 1, size)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send(blocks), receiver.receive(buffers))
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    async def test_one_real_chunk_and_a_bit(self):
        blocks = noise(gloo.CHUNK + 1)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send(blocks), receiver.receive(buffers))
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    async def test_order_of_calls_is_order_on_the_wire(self):
        messages = [noise(size, size + 1) for size in range(1, 200)]
        buffers = [like(message) for message in messages]
        async with opened() as (sender, receiver):
            sent = [sender.send(message) for message in messages]
            received = [receiver.receive(buffer) for buffer in buffers]
            await asyncio.gather(*sent, *received)
        assert all(map(same, messages, buffers))

    @pytest.mark.asyncio
    async def test_nothing_but_empty_blocks_is_done_in_its_turn(self):
        async with opened() as (sender, receiver):
            first, empty = sender.send(noise(MIB)), sender.send(noise(0, 0))
            none, last = sender.send([]), sender.send(noise(3))
            for sizes in ([MIB], [0, 0], [], [3]):
                await receiver.discard(sizes)
            await asyncio.gather(first, empty, none, last)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("sizes", [[5000], [1, 0, 3000, 7], [4000] * 50])
    async def test_discarded_bytes_leave_the_next_message_intact(self, sizes, monkeypatch):
        monkeypatch.setattr(gloo, "CHUNK", 1000)
        kept = noise(2500)
        buffers = like(kept)
        async with opened() as (sender, receiver):
            sent = [sender.send(noise(*sizes)), sender.send(kept)]
            await asyncio.gather(receiver.discard(sizes), receiver.receive(buffers), *sent)
        assert same(kept, buffers)

    @pytest.mark.asyncio
    async def test_the_window_bounds_what_is_in_flight(self, monkeypatch):
        monkeypatch.setattr(gloo, "CHUNK", 1000)
        in_flight = most = 0
        broadcast = gloo_pair.GlooPair.broadcast

        def counting(pair, chunk):
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            return broadcast(pair, chunk)

        def count_down(route, transfer, length, done):
            nonlocal in_flight
            in_flight -= 1
            chunk_done(route, transfer, length, done)

        chunk_done = GlooRoute._chunk_done
        async with opened() as (sender, receiver):
            drained = receiver.discard([100_000])
            monkeypatch.setattr(gloo_pair.GlooPair, "broadcast", counting)
            monkeypatch.setattr(GlooRoute, "_chunk_done", count_down)
            sent = sender.send(noise(100_000))
            assert in_flight == gloo.WINDOW_CHUNKS
            await asyncio.gather(sent, drained)
        # The receiver's chunks beyond its first window are counted too.
        assert gloo.WINDOW_CHUNKS <= most <= 2 * gloo.WINDOW_CHUNKS

    @pytest.mark.asyncio
    async def test_only_its_own_direction(self):
        async with opened() as (sender, receiver):
            with pytest.raises(UsageError):
                receiver.send(noise(1))
            with pytest.raises(UsageError):
                sender.receive(noise(1))
            with pytest.raises(UsageError):
                sender.discard([1])

    def test_discarding_takes_bounded_memory(self, loop_name):
        grown = run_workers(discard_much, 2, loop=loop_name)[1]
        assert grown < 128 * MIB  # of 640 MiB


async def discard_much(stage: Stage) -> int:
    count, size = 10, gloo.CHUNK
    async with staged(stage, "a>b", stage.rank == 0) as route:
        if stage.rank == 0:
            await route.send([torch.ones(size, dtype=torch.uint8)] * count)
            return 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await route.discard([size] * count)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


class TestOwnership:
    @pytest.mark.asyncio
    async def test_cancelling_the_future_does_not_stop_the_transfer(self):
        blocks = noise(MIB)
        expected = [block.clone() for block in blocks]
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            sender.send(blocks).cancel()
            gone = weakref.ref(blocks[0])
            del blocks
            gc.collect()
            assert gone() is not None
            await receiver.receive(buffers)
        assert same(expected, buffers)

    @pytest.mark.asyncio
    async def test_cancelled_receive_still_takes_its_message(self):
        async with opened() as (sender, receiver):
            receiver.receive(noise(MIB)).cancel()
            buffers = like(noise(10))
            received = receiver.receive(buffers)
            wanted = noise(10)
            await asyncio.gather(sender.send(noise(MIB)), sender.send(wanted), received)
        assert same(wanted, buffers)

    @pytest.mark.asyncio
    async def test_idle_route_holds_no_buffer(self):
        async with opened() as (sender, receiver):
            blocks, buffers = noise(MIB, 5), noise(MIB, 5)
            refs = [weakref.ref(each) for each in (*blocks, *buffers)]
            await asyncio.gather(sender.send(blocks), receiver.receive(buffers))
            del blocks, buffers
            await until(lambda: not any(ref() is not None for ref in refs))

    @pytest.mark.asyncio
    async def test_severed_buffers_are_held_until_gloo_lets_go(self):
        released = threading.Event()
        async with opened() as (_, receiver):
            block = torch.frombuffer(Watched(MIB, released), dtype=torch.uint8)
            failed = receiver.receive([block])
            del block
            gc.collect()
            assert not released.is_set()
            receiver.sever()
            with pytest.raises(RouteError):
                await failed
            await receiver.aclose()
            del failed
            await until(released.is_set)


class Watched(bytearray):
    """A buffer that tells when it is freed."""

    def __new__(cls, size: int, released: threading.Event):
        made = super().__new__(cls, size)
        weakref.finalize(made, released.set)
        return made

    def __init__(self, size: int, released: threading.Event) -> None:
        super().__init__(size)


async def until(condition) -> None:
    """Wait for what happens in a thread of Gloo; nothing signals it."""
    async with asyncio.timeout(10):
        while not condition():
            gc.collect()
            await asyncio.sleep(0)


class TestOpen:
    @pytest.mark.asyncio
    async def test_peer_that_never_comes(self):
        route = make("a>b", True, timeout=0.1)
        with pytest.raises(RouteError, match=r"in 0\.1 s"):
            await route.open()
        with pytest.raises(RouteError):
            await route.open()
        await route.aclose()

    @pytest.mark.asyncio
    async def test_cancelling_it_ends_the_thread(self):
        published = asyncio.Event()
        route = make("a>b", False, lambda key, value: published.set())
        opening = asyncio.create_task(route.open())
        await published.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await route.aclose()
        with pytest.raises(RouteError, match="severed"):
            await route.receive(noise(1))

    @pytest.mark.asyncio
    async def test_severing_fails_every_waiter(self):
        published = asyncio.Event()
        route = make("a>b", True, lambda key, value: published.set())
        waiters = [asyncio.create_task(route.open()) for _ in range(2)]
        await published.wait()
        route.sever()
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert all(isinstance(result, RouteError) for result in results)
        assert "severed" in str(results[0])
        await route.aclose()

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
    async def test_link_that_fails_under_it(self):
        def publish(key, value):
            raise ConnectionResetError("the link is down")

        route = make("a>b", True, publish)
        with pytest.raises(RouteError, match="the link is down") as caught:
            await route.open()
        assert caught.value.__cause__ is not None
        await route.aclose()

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
            await asyncio.gather(sender.send(noise(3)), receiver.discard([3]))

    @pytest.mark.asyncio
    async def test_many_at_once(self):
        both = [make_both(f"route {number}") for number in range(32)]
        await asyncio.gather(*(route.open() for pair in both for route in pair))
        messages = [noise(1000) for _ in both]
        buffers = [like(message) for message in messages]
        sent = [pair[0].send(message) for pair, message in zip(both, messages, strict=True)]
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
        await route.send([torch.full((1000,), stage.rank, dtype=torch.uint8)])


async def ring_receive(stage: Stage, label: str) -> int:
    buffer = torch.zeros(1000, dtype=torch.uint8)
    async with staged(stage, label, False) as route:
        await route.receive([buffer])
    return int(buffer.unique())


class TestSever:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("sending", [True, False])
    async def test_unmatched_operations_fail_soon(self, sending):
        async with opened() as both:
            route = both[0] if sending else both[1]
            start = route.send if sending else route.receive
            pending = [start(noise(MIB)) for _ in range(gloo.WINDOW_CHUNKS + 3)]
            started = time.monotonic()
            route.sever()
            route.sever()
            results = await asyncio.gather(*pending, return_exceptions=True)
            assert all(isinstance(result, RouteError) for result in results)
            assert time.monotonic() - started < gloo.SEVER_GRACE
            with pytest.raises(RouteError, match="severed"):
                await start(noise(1))
            await route.aclose()

    @pytest.mark.asyncio
    async def test_the_other_end_notices(self):
        async with opened() as (sender, receiver):
            pending = receiver.receive(noise(MIB))
            sender.sever()
            with pytest.raises(RouteError, match="broke") as caught:
                await pending
            assert isinstance(caught.value.__cause__, RuntimeError)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("end", ["sever", "aclose"])
    async def test_what_is_done_still_arrives(self, end):
        # Small enough for the kernel's buffers: the send is done before the peer has the bytes.
        blocks = noise(200_000)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            received = receiver.receive(buffers)
            await sender.send(blocks)
            if end == "sever":
                sender.sever()
            await sender.aclose()
            await received
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    async def test_before_opening(self):
        route = make("a>b", True)
        route.sever()
        with pytest.raises(RouteError, match="severed"):
            await route.open()
        await route.aclose()
        await make("a>b", True).aclose()

    @pytest.mark.asyncio
    async def test_not_open_yet(self):
        route = make("a>b", True)
        with pytest.raises(RouteError, match="not open"):
            await route.send(noise(1))

    @pytest.mark.tight
    @pytest.mark.asyncio
    async def test_nothing_is_left(self):
        async with opened() as (sender, receiver):
            pending = sender.send(noise(MIB))
            await receiver.discard([MIB])
            await pending
            pending = sender.send(noise(MIB))
            assert "pending=1" in repr(sender)
        with pytest.raises(RouteError):
            await pending
        assert "closed" in repr(sender)
        await sender.aclose()


STALL = 2.5  # seconds
SIZE = 256 * MIB  # far more than any kernel buffers


class TestPeerProcess:
    @pytest.mark.parametrize("sending", [True, False])
    @pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
    def test_pending_transfers_fail_soon_when_severed(self, loop_name, sending, number):
        # Who is gone, or hangs, is told by the link, which severs the route then.
        with Workers(2, loop=loop_name, timeout=20) as workers:
            survivor = workers.start(sever_in_the_middle, sending)
            peer = workers.start(stream_for_ever, not sending, strict=False)
            workers.wait("under way")
            peer.signal(number)
            workers.set("signalled")
            assert survivor.result() < 2.0

    @pytest.mark.parametrize("how", ["loop ends", "never closed", "while opening"])
    def test_process_that_leaves_without_closing_ends(self, loop_name, how):
        with Workers(2, loop=loop_name, timeout=20) as workers:
            leaver = workers.start(leave, how, strict=False)
            peer = workers.start(outlive, how, strict=False)
            assert leaver.wait() == 0
            # asyncio's debug mode may call the making of a large buffer slow.
            lines = [line for line in leaver.stderr.splitlines() if "Executing" not in line]
            assert lines == []
            workers.set("gone")
            peer.result()


async def stream_for_ever(stage: Stage, sending: bool) -> None:
    async with staged(stage, "a>b", sending) as route:
        buffer = torch.ones(SIZE, dtype=torch.uint8)
        while True:
            await (route.send([buffer]) if sending else route.receive([buffer]))


async def sever_in_the_middle(stage: Stage, sending: bool) -> float:
    buffer = torch.ones(SIZE, dtype=torch.uint8)
    # Gloo may hold the broken chunk until its time-out; the worker is checked for leftovers after.
    async with staged(stage, "a>b", sending, stall_timeout=STALL) as route:
        start = route.send if sending else route.receive
        await start([buffer])
        pending = [start([buffer]) for _ in range(100)]
        stage.set("under way")
        await stage.wait("signalled")
        started = time.monotonic()
        route.sever()
        await asyncio.wait(pending)
        took = time.monotonic() - started
        assert all(isinstance(p.exception(), RouteError) for p in pending if p.exception())
        assert pending[-1].exception() is not None
    return took


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
    pending = route.send([torch.frombuffer(bytearray(SIZE), dtype=torch.uint8)])
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


class TestLinkStore:
    def test_own_and_foreign_keys(self):
        published = []
        store = LinkStore(lambda *pair: published.append(pair), timeout=0.0)
        store.set("mine", "text")
        store.deliver("theirs", b"1")
        assert published == [("mine", b"text")]
        assert (store.get("mine"), store.get("theirs")) == (b"text", b"1")
        assert store.check(["mine", "theirs"])
        assert not store.check(["mine", "nobody's"])
        with pytest.raises(TimeoutError):
            store.wait(["nobody's"])
        assert isinstance(store.failure, TimeoutError)

    def test_waits_end_when_a_key_comes_and_when_it_is_given_up(self):
        store = LinkStore(lambda *_: None, timeout=60.0)
        outcomes: list[object] = []

        def wait(key: str) -> None:
            try:
                outcomes.append(store.get(key))
            except Exception as error:
                outcomes.append(error)

        for key, end in (("a", lambda: store.deliver("a", b"1")), ("b", None)):
            thread = threading.Thread(target=wait, args=(key,))
            thread.start()
            if end is not None:
                end()
            else:
                store.abort(RouteError("enough"))
            thread.join(10)
        assert outcomes[0] == b"1"
        assert str(outcomes[1].__cause__) == "enough"

    def test_a_peer_cannot_fill_it(self):
        store = LinkStore(lambda *_: None, timeout=1.0)
        with pytest.raises(ProtocolError):
            store.deliver("large", bytes(MAX_VALUE + 1))
        for number in range(MAX_KEYS):
            store.deliver(str(number), b"")
        store.deliver("0", b"again")
        with pytest.raises(ProtocolError):
            store.deliver("one more", b"")

    @pytest.mark.parametrize("blob", [b"", bytes(40), b"\xff" * 170, bytes(170), bytes(1000)])
    def test_unknown_layout_is_said(self, blob):
        with pytest.raises(RouteError, match="Gloo address"):
            PairRecord.parse(blob)
