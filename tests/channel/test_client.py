"""A channel's client against a real server, over real groups of one process."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm.channel.client import ChannelClient
from aiocomm.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelLostError,
    ClosedError,
    DecodeError,
    PayloadError,
    UsageError,
)

from ..pairs import until
from .ends import NAME, channel

ways = pytest.mark.parametrize("way", ["memory", "unix", "tcp"])


@dataclass
class Trajectory:
    step: int
    rewards: torch.Tensor


class Unloadable:
    """Pickles, and fails where it is loaded."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ValueError("not here")


# --- items ---


@ways
@pytest.mark.asyncio
async def test_items_arrive_as_they_were_put(way: str) -> None:
    items: list[Any] = [
        1,
        "text",
        None,
        {"deep": [torch.arange(3), (torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16))]},
        torch.arange(5),
        torch.tensor(1.5),
        torch.arange(300_000),
        [torch.ones(70_000), torch.ones(3)],
        {str(size): torch.full((size,), size) for size in range(200)},
        b"b" * 200_000,
        Trajectory(3, torch.ones(40_000)),
    ]
    async with channel(way=way, clients=2) as ends:
        producer, consumer = ends.clients
        for item in items:
            producer.put(item, 0, "k")
        for item in items:
            assert_same(await consumer.get("k"), item)


def assert_same(came: Any, put: Any) -> None:
    assert type(came) is type(put)
    if isinstance(put, torch.Tensor):
        assert came.dtype == put.dtype
        assert torch.equal(came, put)
    elif isinstance(put, (list, tuple)):
        assert len(came) == len(put)
        for one, other in zip(came, put, strict=True):
            assert_same(one, other)
    elif isinstance(put, dict):
        assert list(came) == list(put)
        assert_same(list(came.values()), list(put.values()))
    elif isinstance(put, Trajectory):
        assert_same((came.step, came.rewards), (put.step, put.rewards))
    else:
        assert came == put


@pytest.mark.asyncio
async def test_the_memory_of_an_item_is_the_producers_again() -> None:
    async with channel() as ends:
        for size in (10, 100_000, 1_000_000):
            tensor = torch.zeros(size)
            await ends.client.put(tensor, 0, "k")
            tensor.fill_(1)
            came = await ends.client.get("k")
            assert not came.any()
            came.fill_(2)  # and what came is the consumer's


@pytest.mark.asyncio
async def test_aliased_memory_is_copied_into_the_channel() -> None:
    async with channel() as ends:
        tensor = aiocomm.empty_shared((500_000,), torch.float32, aliased=True)
        await ends.client.put(tensor, 0, "k")
        tensor.fill_(1)
        assert not (await ends.client.get("k")).any()


@pytest.mark.asyncio
async def test_order_is_that_of_the_calls() -> None:
    async with channel(maxsize=2, clients=2) as ends:
        producer, consumer = ends.clients
        gets = [consumer.get("k") for _ in range(20)]
        puts = [producer.put(torch.full((1 + 9000 * (n % 3),), n), 0, "k") for n in range(20)]
        came = [int((await get)[0]) for get in gets]
        assert came == list(range(20))
        await asyncio.gather(*puts)


@pytest.mark.asyncio
async def test_a_batch_is_a_list() -> None:
    async with channel() as ends:
        client = ends.client
        batch = client.get("k", 4)
        for number, weight in enumerate([1, 2.5, 2, 9]):
            await client.put(number, weight, "k")
        assert await batch == [0, 1, 2]
        assert await client.get("k", 1) == [3]


@pytest.mark.asyncio
async def test_nowait_fails_where_it_would_wait() -> None:
    async with channel(maxsize=1) as ends:
        client = ends.client
        with pytest.raises(ChannelEmpty, match=f"{NAME!r} has no such item: get"):
            await client.get("k", nowait=True)
        await client.put("a", 0, "k", nowait=True)
        with pytest.raises(ChannelFull, match=f"{NAME!r} is full: put"):
            await client.put("b", 0, "k", nowait=True)
        assert await client.get("k", nowait=True) == "a"
        assert await client.look(None).then(lambda seen: (seen.queued, seen.full)) == (0, False)


@pytest.mark.asyncio
async def test_a_batch_that_cannot_be_is_refused() -> None:
    async with channel(maxsize=1) as ends:
        client = ends.client
        batch = client.get("k", 5)
        await client.put("a", 1, "k")
        second = client.put("b", 1, "k")
        with pytest.raises(ChannelFull, match="does not weigh enough"):
            await batch
        assert await client.get("k") == "a"
        await second


# --- bounds ---


@pytest.mark.asyncio
async def test_no_payload_leaves_before_there_is_room() -> None:
    async with channel(max_bytes=1 << 20, clients=2) as ends:
        producer, consumer = ends.clients
        puts = [producer.put(torch.zeros(200_000), 0, "k") for _ in range(4)]  # 0.8 MB each
        await until(puts[0].done)
        assert await consumer.look(None).then(lambda seen: seen.queued) == 1
        assert ends.server.queue.nbytes <= 1 << 20
        assert producer._group is not None
        sent = sum(count.nbytes for count in producer._group.statistics().sent.values())
        assert sent < 1_700_000 // 2, "one item and a few words"
        for put in puts:
            await consumer.get("k")
            await put


@pytest.mark.asyncio
async def test_an_item_without_any_room_is_refused_at_the_call() -> None:
    async with channel(max_bytes=1000) as ends:
        with pytest.raises(PayloadError, match=r"holds 1000: put it in parts, or create .* more"):
            ends.client.put(b"x" * 1000, 0, "k")
        await ends.client.put(b"x" * 900, 0, "k")  # the next call works
        assert len(await ends.client.get("k")) == 900


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.put(lambda: 0, 0, "k"), PayloadError, "cannot be pickled"),
        (lambda c: c.put(torch.ones(2, 2).T, 0, "k"), PayloadError, "not contiguous"),
        (lambda c: c.put(1, -1, "k"), UsageError, "weight -1 is not usable: give 0 or more"),
        (lambda c: c.put(1, float("nan"), "k"), UsageError, "weight nan is not usable"),
        (lambda c: c.put(1, "2", "k"), UsageError, "weight '2' is str: give a number"),
        (lambda c: c.put(1, 0, 7), UsageError, "key 7 is int: give a string"),
        (lambda c: c.get(None), UsageError, "key None is NoneType"),
        (lambda c: c.get("k", 0), UsageError, "batch_weight is 0"),
        (lambda c: c.get("k", True), UsageError, "batch_weight True is bool"),
        (lambda c: c.look(7), UsageError, "key 7 is int"),
    ],
)
@pytest.mark.asyncio
async def test_bad_input_is_refused_at_the_call(call: Any, error: Any, text: str) -> None:
    async with channel() as ends:
        with pytest.raises(error, match=text):
            call(ends.client)
        await ends.client.put(1, 0, "k")
        assert await ends.client.get("k") == 1


@pytest.mark.asyncio
async def test_what_cannot_be_rebuilt_fails_its_get_and_no_other() -> None:
    async with channel(maxsize=2) as ends:
        await ends.client.put(Unloadable(), 0, "k")
        await ends.client.put("fine", 0, "k")
        with pytest.raises(DecodeError, match="ValueError: not here"):
            await ends.client.get("k")
        assert await ends.client.get("k") == "fine"
        await ends.client.put("room again", 0, "k")


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
        works = [client.put("b", 0, "k"), client.get("l"), client.get("l", 9), client.look(None)]
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
