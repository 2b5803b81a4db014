"""A channel's client against a real server, over real groups of one process."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm.channel.client import ChannelClient
from aiocomm.errors import (
    ChannelEmpty,
    ChannelFull,
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
        batch = client.get_batch("k", 4)
        for number, weight in enumerate([1, 2.5, 2, 9]):
            await client.put(number, weight, "k")
        assert await batch == [0, 1, 2]
        assert await client.get_batch("k", 1) == [3]


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
        batch = client.get_batch("k", 5)
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
        assert producer._wire is not None
        sent = sum(count.nbytes for count in producer._wire.group.statistics().sent.values())
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
        (lambda c: c.get_batch("k", 0), UsageError, "batch_weight is 0"),
        (lambda c: c.get_batch("k", True), UsageError, "batch_weight True is bool"),
        (lambda c: c.get_batch("k", None), UsageError, "batch_weight None is NoneType"),
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


@pytest.mark.asyncio
async def test_a_batch_with_one_that_cannot_be_rebuilt_loses_no_other() -> None:
    async with channel(maxsize=3) as ends:
        client = ends.client
        for item in ("a", Unloadable(), "b"):
            await client.put(item, 1, "k")
        more = client.put("c", 1, "k")
        with pytest.raises(DecodeError, match="ValueError: not here"):
            await client.get_batch("k", 3)
        await more  # there is room for it: the one is gone
        assert await client.get_batch("k", 3) == ["a", "b", "c"]
        assert await client.look(None).then(lambda seen: seen.full) is False


class Key(enum.StrEnum):
    """A user's own; the server has no such class, and may not need it."""

    EASY = "easy"

    def __reduce_ex__(self, _: Any) -> Any:
        return _fail, ()


@pytest.mark.asyncio
async def test_keys_of_an_enum_are_their_text() -> None:
    async with channel(maxsize=1) as ends:
        await ends.client.put(1, 0, Key.EASY)
        assert await ends.client.look(Key.EASY).then(lambda seen: seen.queued) == 1
        assert await ends.client.get("easy") == 1


@pytest.mark.asyncio
async def test_works_say_which_channel_they_wait_for() -> None:
    client = ChannelClient(NAME, asyncio.get_running_loop())  # its channel is nowhere yet
    works = [client.put(1, 0, "k"), client.get("k"), client.get_batch("k", 2), client.look(None)]
    works.append(client.close(drop=False))
    assert [repr(work) for work in works] == [
        "<PutWork pending: a put into channel 'jobs', key 'k'>",
        "<GetWork pending: a get from channel 'jobs', key 'k'>",
        "<GetWork pending: a get_batch from channel 'jobs', key 'k'>",
        "<CallWork pending: a call of channel 'jobs'>",
        "<CallWork pending: a call of channel 'jobs'>",
    ]
    for work in works:
        work.cancel()
