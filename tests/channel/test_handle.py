"""Channels as users have them: on a real Ray, between the driver and actors."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import uuid
from typing import Any

import pytest
import ray
import torch

import aiocomm
from aiocomm.channel import AsyncChannelWork, Channel
from aiocomm.channel import actor as actor_module
from aiocomm.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelExistsError,
    ChannelFull,
    ChannelLostError,
    ClosedError,
    RendezvousTimeout,
    UsageError,
    WrongLoopError,
)

from .. import loops
from ..pairs import until
from ..sources import ROOT
from .peers import Peer

on_ray = pytest.mark.ray("peers")


@pytest.fixture
def name() -> str:
    """A name of the test's own."""
    return f"test {uuid.uuid4().hex[:8]}"


def its_actor(channel: Channel) -> Any:
    return ray.get_actor(actor_module.PREFIX + channel.name)


@on_ray
@pytest.mark.asyncio
async def test_items_go_from_anywhere_to_anywhere(peers: list[Any], name: str) -> None:
    async with await Channel.create(name) as channel:
        items = ["text", torch.arange(3), {"w": [torch.ones(400_000)]}, None]
        await AsyncChannelWork(peers[0].put.remote(channel, items))
        assert (await channel.qsize(), await channel.empty(), await channel.full()) == (4, False, 0)
        assert await channel.get() == "text"
        rest = await AsyncChannelWork(peers[1].get.remote(channel, 3))
        assert rest[0].tolist() == [0, 1, 2]
        assert rest[1]["w"][0].sum() == 400_000
        assert rest[2] is None
        assert await channel.empty("default")

        await channel.put("a", weight=2)
        await channel.put("b", key="other")
        await channel.put("c", 2)
        assert await channel.get_batch(3) == ["a", "c"]
        assert await channel.get(key="other") == "b"
        with pytest.raises(ChannelEmpty):
            await channel.get_nowait()
        await channel.put_nowait("d")
        assert await channel.get_nowait().then(str.upper) == "D"

        back = peers[0].iterate.remote(channel)
        for number in range(3):
            await channel.put(number)
        await channel.close()
        assert await AsyncChannelWork(back) == [0, 1, 2]
        with pytest.raises(ChannelClosed, match=name):
            await channel.put(3)


@on_ray
@pytest.mark.asyncio
async def test_bounds_push_back_on_other_processes(peers: list[Any], name: str) -> None:
    async with await Channel.create(name, maxsize=2, max_bytes=10 << 20) as channel:
        putting = AsyncChannelWork(peers[0].put.remote(channel, [torch.ones(1 << 20)] * 5))
        while await channel.qsize() < 2:
            await asyncio.sleep(0)
        assert await channel.full()
        with pytest.raises(ChannelFull):
            await channel.put_nowait(1)
        assert not putting.done()
        for _ in range(5):
            assert (await channel.get()).all()
        await putting


@on_ray
def test_fifty_producers_and_fifty_consumers(peers: list[Any], name: str) -> None:
    total, each = 10_000, 10_000 // 50

    async def main() -> list[int]:
        async with await Channel.create(name, maxsize=100) as channel:
            ranges = [range(start, start + each) for start in range(0, total, each)]
            others = [
                AsyncChannelWork(peer.many.remote(channel, 20, ranges[20 * part :][:20]))
                for part, peer in enumerate(peers)
            ]
            here = asyncio.create_task(Peer().many(pickle.loads(pickle.dumps(channel)), 10, []))
            async with asyncio.TaskGroup() as tasks:
                for items in ranges[40:]:
                    tasks.create_task(put_all(channel, items))
            while any(
                [work for work in others if work.done()]
            ):  # nobody ends before the channel is closed
                raise AssertionError
            counted = 0
            while counted != total:
                counted = await AsyncChannelWork(its_actor(channel).lasts.remote()) and total
            await until_put(channel, total)
            await channel.close()
            return [*await here, *(item for work in others for item in await work)]

    with asyncio.Runner(loop_factory=loops.FACTORIES["uvloop"]) as runner:
        came = runner.run(main())
    assert sorted(came) == list(range(total))
