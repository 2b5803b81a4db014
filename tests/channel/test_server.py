"""A channel's server: what one client does, or fails to do, to the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiocomm.channel.messages import Ask, Get, Packet, Put, Seen, Taken, write
from aiocomm.errors import ChannelEmpty, PeerLostError

from ..pairs import until
from .ends import Ends, channel


def members(ends: Ends) -> list[Any]:
    return list(ends.server._members)


@pytest.mark.parametrize("count", [1001])
@pytest.mark.asyncio
async def test_a_thousand_waiting_gets_are_no_tasks(count: int) -> None:
    async with channel(clients=2) as ends:
        producer, consumer = ends.clients
        await producer.look(None)
        tasks = len(asyncio.all_tasks())
        gets = [consumer.get("k") for _ in range(count)]
        await consumer.look(None)
        assert len(asyncio.all_tasks()) <= tasks
        await producer.put("a", 0, "k")
        assert await gets[0] == "a"
        assert not any(get.done() for get in gets[1:])
        for get in gets[1:]:
            get.cancel()


@pytest.mark.asyncio
async def test_a_consumer_that_does_not_read_holds_up_nobody() -> None:
    async with channel(clients=3) as ends:
        producer, slow, quick = ends.clients
        await slow.look(None)
        assert slow._wire is not None
        slow._wire.listen = lambda: None  # type: ignore[method-assign]
        for number in range(40):
            producer.put(torch.full((300_000,), number), 0, "slow")
        gets = [slow.get("slow") for _ in range(40)]
        await producer.put("a", 0, "k")
        assert await quick.get("k") == "a"
        assert not any(get.done() for get in gets[1:])


@pytest.mark.asyncio
async def test_what_a_dead_consumer_held_goes_back_in_its_place() -> None:
    async with channel(clients=3) as ends:
        producer, victim, other = ends.clients
        gets = [victim.get("k") for _ in range(2)]
        for number in range(3):
            await producer.put(number, 0, "k")
        await until(gets[1].done)
        await ends.runtimes[1].abort()
        await until(lambda: len(ends.server._members) == 2)
        assert [await other.get("k") for _ in range(3)] == [0, 1, 2]


@pytest.mark.asyncio
async def test_a_dead_producer_leaves_no_half_item() -> None:
    async with channel(max_bytes=1 << 20, clients=3) as ends:
        victim, producer, consumer = ends.clients
        victim._send_item = lambda work: None  # type: ignore[method-assign]
        victim.put(torch.zeros(200_000), 0, "k").add_done_callback(lambda put: put.exception())
        await until(lambda: ends.server.queue.count)
        put = producer.put(torch.ones(200_000), 0, "k")
        await producer.look(None)
        assert not put.done(), "there is no room beside what the victim was granted"
        await ends.runtimes[0].abort()
        await put
        assert (await consumer.get("k")).all()
        with pytest.raises(ChannelEmpty):
            await consumer.get("k", nowait=True)


@pytest.mark.parametrize(
    "message",
    [
        ("no", "message"),
        "no list",
        7,
        (99, 1),
        (0, 1),
        write(Taken([5])),
        write(Seen(1, 0, False)),
        write(Put(1, "k", 0, Packet(b"", b""))),
        write(Ask(1, "k", 5000, 0, False)),
        [write(Ask(1, "k", 10, 0, False)), write(Put(1, "k", 0, Packet(b"x" * 11, b"")))],
        [write(Get(1, "k", None, False)), write(Get(1, "k", None, False))],
    ],
    ids=str,
)
@pytest.mark.asyncio
async def test_a_client_that_breaks_the_protocol_is_sent_away(message: Any) -> None:
    async with channel(max_bytes=1000, clients=2) as ends:
        bad, good = ends.clients
        await bad.look(None)
        assert bad._wire is not None
        whole = message if isinstance(message, list | str) else [message]
        bad._wire.group.send(whole).add_done_callback(lambda work: work.exception())
        await until(lambda: bad._error)
        await good.put("a", 0, "k")
        assert await good.get("k") == "a"
        assert ends.server.queue.count <= 1


@pytest.mark.asyncio
async def test_a_client_that_never_comes_is_forgotten() -> None:
    async with channel() as ends:
        group = ends.host.create_collective_group([ends.host.address, "nobody:0"])
        ends.server.join(group)
        group._session._lose(PeerLostError("it did not come"))
        await until(lambda: len(ends.server._members) == 1)
        await ends.client.put("a", 0, "k")


@pytest.mark.asyncio
async def test_it_ends_once_it_is_closed_and_empty() -> None:
    async with channel() as ends:
        await ends.client.put("a", 0, "k")
        await ends.client.close(drop=False)
        assert not ends.server.ended.is_set()
        assert await ends.client.get("k") == "a"
        await ends.server.ended.wait()
