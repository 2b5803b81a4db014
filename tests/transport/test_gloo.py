"""The Gloo route: bytes arrive in order, buffers are held and freed, and severing ends it all."""

from __future__ import annotations

import asyncio
import gc
import resource
import struct
import threading
import time
import weakref

import pytest
import torch

from aiocomm.errors import ProtocolError, RouteError, UsageError
from aiocomm.transport import gloo, gloo_pair, pair_route, transfer
from aiocomm.transport.completion import Completions

from ..processes import Stage, run_workers
from .gloo_ends import MIB, like, noise, opened, same, staged, until


class TestTransfers:
    @pytest.mark.asyncio
    async def test_blocks_of_any_size_arrive(self):
        blocks = noise(1, 0, 63, 4096, MIB + 1, 0)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send_blocks(blocks), receiver.receive(buffers))
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("size", [999, 1000, 1001, 2000, 100_003])
    async def test_chunks_meet_at_their_boundaries(self, size, monkeypatch):
        monkeypatch.setattr(transfer, "CHUNK", 1000)
        blocks = noise(size, 1, size)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send_blocks(blocks), receiver.receive(buffers))
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    async def test_one_real_chunk_and_a_bit(self):
        blocks = noise(transfer.CHUNK + 1)
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            await asyncio.gather(sender.send_blocks(blocks), receiver.receive(buffers))
        assert same(blocks, buffers)

    @pytest.mark.asyncio
    async def test_order_of_calls_is_order_on_the_wire(self):
        messages = [noise(size, size + 1) for size in range(1, 200)]
        buffers = [like(message) for message in messages]
        async with opened() as (sender, receiver):
            sent = [sender.send_blocks(message) for message in messages]
            received = [receiver.receive(buffer) for buffer in buffers]
            await asyncio.gather(*sent, *received)
        assert all(map(same, messages, buffers))

    @pytest.mark.asyncio
    async def test_nothing_but_empty_blocks_is_done_in_its_turn(self):
        async with opened() as (sender, receiver):
            first, empty = sender.send_blocks(noise(MIB)), sender.send_blocks(noise(0, 0))
            none, last = sender.send_blocks([]), sender.send_blocks(noise(3))
            for sizes in ([MIB], [0, 0], [], [3]):
                await receiver.discard_blocks(sizes)
            await asyncio.gather(first, empty, none, last)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("sizes", [[5000], [1, 0, 3000, 7], [4000] * 50])
    async def test_discarded_bytes_leave_the_next_message_intact(self, sizes, monkeypatch):
        monkeypatch.setattr(transfer, "CHUNK", 1000)
        kept = noise(2500)
        buffers = like(kept)
        async with opened() as (sender, receiver):
            sent = [sender.send_blocks(noise(*sizes)), sender.send_blocks(kept)]
            await asyncio.gather(receiver.discard_blocks(sizes), receiver.receive(buffers), *sent)
        assert same(kept, buffers)

    @pytest.mark.asyncio
    async def test_the_window_bounds_what_is_in_flight(self, monkeypatch):
        monkeypatch.setattr(transfer, "CHUNK", 1000)
        most = 0
        ahead: list[int] = []
        broadcast = gloo_pair.GlooPair.broadcast

        def counting(pair, chunk):
            nonlocal most
            # Before this one. What the sender has heard to be done is no measure: news come late.
            if pair is receiver._pair:
                most = max(most, receiver._chunks + 1)
            else:
                ahead.append(sender._issued + 1 - receiver._issued)
            return broadcast(pair, chunk)

        async with opened() as (sender, receiver):
            monkeypatch.setattr(gloo_pair.GlooPair, "broadcast", counting)
            sent = sender.send_blocks(noise(100_000))
            assert ahead == []  # the receiver has said nothing yet
            drained = receiver.discard_blocks([100_000])
            assert receiver._chunks == gloo.WINDOW_CHUNKS
            await asyncio.gather(sent, drained)
        assert most == gloo.WINDOW_CHUNKS
        assert len(ahead) == 100
        assert max(ahead) <= 0

    @pytest.mark.asyncio
    async def test_a_peer_cannot_say_what_makes_no_sense(self):
        async with opened() as (sender, receiver):
            key = f"{sender.label}/ready"
            sender.deliver(key, struct.pack("!Q", 1))
            for value in (b"", bytes(9), struct.pack("!Q", 0)):
                with pytest.raises(ProtocolError):
                    sender.deliver(key, value)
            with pytest.raises(ProtocolError):
                receiver.deliver(key, struct.pack("!Q", 1))

    @pytest.mark.asyncio
    async def test_only_its_own_direction(self):
        async with opened() as (sender, receiver):
            with pytest.raises(UsageError):
                receiver.send_blocks(noise(1))
            with pytest.raises(UsageError):
                sender.receive(noise(1))
            with pytest.raises(UsageError):
                sender.discard_blocks([1])

    def test_discarding_takes_bounded_memory(self, loop_name):
        grown = run_workers(discard_much, 2, loop=loop_name)[1]
        assert grown < 128 * MIB  # of 640 MiB


async def discard_much(stage: Stage) -> int:
    count, size = 10, transfer.CHUNK
    async with staged(stage, "a>b", stage.rank == 0) as route:
        if stage.rank == 0:
            await route.send_blocks([torch.ones(size, dtype=torch.uint8)] * count)
            return 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await route.discard_blocks([size] * count)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


class TestPace:
    @pytest.mark.asyncio
    async def test_what_arrived_is_told_though_a_later_one_stalls(self):
        async with opened() as (sender, receiver):
            received = [receiver.receive([block]) for block in noise(1000, MIB)]
            # One grant for both, of which the sender takes one: the second stalls.
            await asyncio.wait_for(asyncio.gather(sender.send_blocks(noise(1000)), received[0]), 10)
            assert not received[1].done()
        with pytest.raises(RouteError):  # severed here, or broken by the end of the sender
            await received[1]

    @pytest.mark.asyncio
    async def test_the_loop_is_woken_once_for_several_small_ones(self, monkeypatch):
        announced = 0
        announce = Completions._announce

        def counting(completions, each):
            nonlocal announced
            announced += not each.announced
            announce(completions, each)

        monkeypatch.setattr(Completions, "_announce", counting)
        monkeypatch.setattr(gloo, "ANNOUNCE_LATE", 60.0)
        async with opened() as (sender, receiver):
            received = [receiver.receive(noise(MIB)) for _ in range(16)]
            await asyncio.gather(*(sender.send_blocks(noise(MIB)) for _ in range(16)), *received)
        # Of 32; those that one of the two threads overtook come on top.
        assert announced < 24


class TestOwnership:
    @pytest.mark.asyncio
    async def test_cancelling_the_future_does_not_stop_the_transfer(self):
        blocks = noise(MIB)
        expected = [block.clone() for block in blocks]
        buffers = like(blocks)
        async with opened() as (sender, receiver):
            sender.send_blocks(blocks).cancel()
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
            await asyncio.gather(
                sender.send_blocks(noise(MIB)), sender.send_blocks(wanted), received
            )
        assert same(wanted, buffers)

    @pytest.mark.asyncio
    async def test_idle_route_holds_no_buffer(self):
        async with opened() as (sender, receiver):
            blocks, buffers = noise(MIB, 5), noise(MIB, 5)
            refs = [weakref.ref(each) for each in (*blocks, *buffers)]
            await asyncio.gather(sender.send_blocks(blocks), receiver.receive(buffers))
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


class TestSever:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("sending", [True, False])
    async def test_unmatched_operations_fail_soon(self, sending, monkeypatch):
        monkeypatch.setattr(pair_route, "SEVER_GRACE", 30.0)  # which they do not take
        async with opened() as both:
            route = both[0] if sending else both[1]
            start = route.send_blocks if sending else route.receive
            pending = [start(noise(MIB)) for _ in range(gloo.WINDOW_CHUNKS + 3)]
            started = time.monotonic()
            route.sever()
            route.sever()
            results = await asyncio.gather(*pending, return_exceptions=True)
            assert all(isinstance(result, RouteError) for result in results)
            assert time.monotonic() - started < pair_route.SEVER_GRACE
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
            await sender.send_blocks(blocks)
            if end == "sever":
                sender.sever()
            await sender.aclose()
            await received
        assert same(blocks, buffers)

    @pytest.mark.tight
    @pytest.mark.asyncio
    async def test_nothing_is_left(self):
        async with opened() as (sender, receiver):
            pending = sender.send_blocks(noise(MIB))
            await receiver.discard_blocks([MIB])
            await pending
            pending = sender.send_blocks(noise(MIB))
            assert "pending=1" in repr(sender)
        with pytest.raises(RouteError):
            await pending
        assert "closed" in repr(sender)
        await sender.aclose()
