"""A channel's client when works are cancelled, a side goes, or the group is not there yet."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from contextlib import suppress
from typing import Any

import pytest

import aiocomm
from aiocomm.channel.client import ChannelClient
from aiocomm.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelLostError,
    ClosedError,
    PayloadError,
)

from ..pairs import until
from .ends import NAME, channel

# --- cancellation ---


@pytest.mark.asyncio
async def test_a_put_that_waits_is_withdrawn() -> None:
    async with channel(maxsize=1) as ends:
        client = ends.client
        await client.put("a", 0, "k")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.put("b", 0, "k")
        late = client.put("c", 0, "k")
        assert [await client.get("k"), await client.get("k")] == ["a", "c"]
        await late
        assert ends.server.queue.qsize() == 0


@pytest.mark.asyncio
async def test_a_get_that_is_cancelled_leaves_its_item() -> None:
    async with channel() as ends:
        client = ends.client
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.get("k")
        await client.put("a", 0, "k")
        assert await client.get("k") == "a"


@pytest.mark.asyncio
async def test_a_delivered_item_that_nobody_took_goes_back() -> None:
    async with channel(clients=2) as ends:
        producer, consumer = ends.clients

        async def wait() -> Any:
            return await get

        get = consumer.get("k")
        get.add_done_callback(lambda _: task.cancel())  # before the task runs again
        task = asyncio.create_task(wait())
        await producer.put("a", 0, "k")
        await asyncio.wait([task])
        assert task.cancelled()
        await producer.put("b", 0, "k")
        assert [await producer.get("k"), await producer.get("k")] == ["a", "b"]


@pytest.mark.asyncio
async def test_a_get_that_is_dropped_gives_back() -> None:
    async with channel(clients=2) as ends:
        producer, consumer = ends.clients
        get: Any = consumer.get("k")
        await producer.put("a", 0, "k")
        await until(get.done)
        del get
        gc.collect()
        assert await producer.get("k") == "a"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.asyncio
async def test_cancelling_at_random_loses_nothing(seed: int) -> None:
    chance = random.Random(seed)
    came: list[int] = []

    async def turns(most: int) -> None:
        for _ in range(chance.randrange(most)):
            await asyncio.sleep(0)

    async def produce(producer: ChannelClient) -> None:
        for number in range(60):
            while (put := producer.put(number, 0, "k"))._packed is not None:
                await turns(60)
                if put._packed is None:
                    break  # it has left
                put.cancel()
            await put

    async def consume(consumer: ChannelClient) -> None:
        while True:
            get = consumer.get("k")
            task = asyncio.create_task(get.async_wait())
            await turns(40)
            task.cancel()
            with suppress(asyncio.CancelledError, ChannelClosed):
                came.append(await task)
            get.cancel()  # the task may not have come to it
            if not get.cancelled() and get.exception():
                return

    async with channel(maxsize=3, clients=3) as ends:
        producer, *consumers = ends.clients
        async with asyncio.TaskGroup() as tasks:
            for consumer in consumers:
                tasks.create_task(consume(consumer))
            await produce(producer)
            await producer.close(drop=False)
    assert sorted(came) == list(range(60))


# --- ends ---


@pytest.mark.asyncio
async def test_close_is_everybodys() -> None:
    async with channel(maxsize=1, clients=2) as ends:
        one, other = ends.clients
        await one.put("a", 0, "k")
        late, waiting = one.put("b", 0, "k"), one.get("l")
        await other.close(drop=False)
        for work in (late, waiting, other.put("c", 0, "k")):
            with pytest.raises(ChannelClosed, match="'jobs' is closed: create a new one"):
                await work
        assert await other.get("k") == "a"
        with pytest.raises(ChannelClosed):
            await other.get("k")
        await ends.server.ended.wait()
        await ends.server.aclose()
        await until(lambda: one._error)
        for work in (one.get("k"), one.put("d", 0, "k")):
            with pytest.raises(ChannelClosed):
                await work
        await one.close(drop=False)
        assert (await one.look(None)).queued == 0


@pytest.mark.asyncio
async def test_abort_drops_what_is_there() -> None:
    async with channel() as ends:
        await ends.client.put("a", 0, "k")
        await ends.client.close(drop=True)
        with pytest.raises(ChannelClosed):
            await ends.client.get("k")
        await ends.server.ended.wait()


@pytest.mark.asyncio
async def test_a_server_that_dies_fails_every_pending_work() -> None:
    async with channel(maxsize=1) as ends:
        client = ends.client
        await client.put("a", 0, "k")
        works = [
            client.put("b", 0, "k"),
            client.get("l"),
            client.get_batch("l", 9),
            client.look(None),
        ]
        works[-1].cancel()
        await client.look(None)  # all have left
        await ends.host.abort()  # a goodbye, which counts as closed
        for work in works[:3]:
            with pytest.raises(ChannelClosed):
                await work


@pytest.mark.asyncio
async def test_a_connection_that_breaks_is_a_channel_that_is_lost() -> None:
    async with channel() as ends:
        client = ends.client
        await client.put("a", 0, "k")
        get = client.get("l")
        await client.look(None)
        [member] = ends.server._members
        link = member.group._session._link
        assert link is not None
        link.abort()
        with pytest.raises(ChannelLostError, match="the actor of channel 'jobs' is gone") as caught:
            await get
        assert isinstance(caught.value.__cause__, aiocomm.errors.PeerLostError)
        with pytest.raises(ChannelLostError):
            await client.put("b", 0, "k")


@pytest.mark.asyncio
async def test_leaving_waits_for_what_was_put() -> None:
    async with channel(maxsize=1, clients=2) as ends:
        producer, consumer = ends.clients
        puts = [producer.put(number, 0, "k") for number in range(5)]
        waiting = producer.get("l")
        leaving = asyncio.create_task(producer.leave())
        assert [await consumer.get("k") for _ in range(5)] == list(range(5))
        await leaving
        assert all(put.done() for put in puts)
        with pytest.raises(ClosedError, match="handle of channel 'jobs' was closed"):
            await waiting
        with pytest.raises(ClosedError):
            producer.put(1, 0, "k")
        await producer.leave()


@pytest.mark.asyncio
async def test_leaving_does_not_wait_for_what_is_put_afterwards() -> None:
    async with channel(clients=2) as ends:
        producer, consumer = ends.clients

        async def produce() -> None:
            while True:
                await producer.put("more", 0, "k")

        producing = asyncio.create_task(produce())
        assert await consumer.get("k") == "more"
        await producer.leave()
        with pytest.raises(ClosedError, match="handle of channel 'jobs' was closed"):
            await producing


@pytest.mark.asyncio
async def test_what_leaves_with_its_consumer_goes_back() -> None:
    async with channel(clients=2) as ends:
        producer, consumer = ends.clients
        get = consumer.get("k")
        await producer.put("a", 0, "k")
        await until(get.done)
        await consumer.leave()
        assert await producer.get("k") == "a"
        assert get.result() == "a", "the handle has it, and the channel too: it was not taken"


@pytest.mark.asyncio
async def test_what_was_taken_is_not_given_again_by_leaving_at_once() -> None:
    async with channel(clients=2) as ends:
        producer, consumer = ends.clients
        await producer.put("a", 0, "k")
        assert await consumer.get("k") == "a"
        await consumer.leave()
        with pytest.raises(ChannelEmpty):
            await producer.get("k", nowait=True)


@pytest.mark.asyncio
async def test_gets_that_are_left_behind_are_no_news() -> None:
    async with channel() as ends:
        gets = [ends.client.get("k") for _ in range(3)]
        ends.client.end_gets()
        await ends.client.close(drop=False)
        assert all(get.done() for get in gets)
        del gets  # nobody retrieves their failures
        gc.collect()


# --- before the group is there ---


@pytest.mark.asyncio
async def test_calls_before_the_group_is_there_keep_their_order() -> None:
    async with channel(max_bytes=1000) as ends:
        early = ChannelClient(NAME, asyncio.get_running_loop())
        puts = [early.put(number, 0, "k") for number in range(3)]
        cancelled, large = early.put("never", 0, "k"), early.put(b"x" * 1000, 0, "k")
        get = early.get("k")
        assert early.pending
        cancelled.cancel()
        members = [ends.host.address, ends.runtimes[0].address]
        ends.server.join(ends.host.create_collective_group(members, "early"))
        early.joined(ends.runtimes[0].create_collective_group(members, "early"), 0, 1000)
        assert await get == 0
        await asyncio.gather(*puts)
        with pytest.raises(PayloadError, match="holds 1000"):
            await large
        assert [await early.get("k"), await early.get("k")] == [1, 2]
        await early.leave()


@pytest.mark.asyncio
async def test_a_channel_that_is_not_found_fails_what_waits_for_it() -> None:
    early = ChannelClient(NAME, asyncio.get_running_loop())
    works = [early.put(1, 0, "k"), early.get("k"), early.look(None)]
    early.fail(ChannelError("not found"))
    for work in works:
        with pytest.raises(ChannelError, match="not found"):
            await work
    assert "over" in repr(early)
    await early.leave()


# --- threads, and works that nobody keeps ---


@pytest.mark.asyncio
async def test_threads_without_a_loop_use_it_too() -> None:
    async with channel() as ends:
        client = ends.client

        def use() -> Any:
            client.put("from a thread", 0, "k").wait(20)
            return client.get("k").wait(20)

        assert await asyncio.to_thread(use) == "from a thread"
        before = threading.active_count()
        gets = [client.get("k") for _ in range(1000)]
        assert threading.active_count() == before
        for number in range(1000):
            client.put(number, 0, "k")  # nobody keeps the work (F41)
        assert await asyncio.gather(*gets) == list(range(1000))


@pytest.mark.asyncio
async def test_a_failure_that_nobody_awaits_is_reported_once(complaints: list[Any]) -> None:
    async with channel() as ends:
        await ends.client.close(drop=False)
        put: Any = ends.client.put("a", 0, "k")
        await until(put.done)
        del put
        gc.collect()
        assert [type(each["exception"]) for each in complaints] == [ChannelClosed]
        complaints.clear()
