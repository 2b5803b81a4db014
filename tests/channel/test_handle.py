"""Channels as users have them: on a real Ray, between the driver and actors."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
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
from aiocomm.testing import MemoryStore

from .. import loops
from ..actors import WAIT
from ..pairs import until
from ..sources import ROOT
from . import leaver
from .peers import Peer, pid_of

on_ray = pytest.mark.ray("peers", "shared")


def its_actor(channel: Channel) -> Any:
    return ray.get_actor(actor_module.PREFIX + channel.name)


def actors_named() -> set[str]:
    """The names of the channels that have an actor in this namespace."""
    return {each.removeprefix(actor_module.PREFIX) for each in ray.util.list_named_actors()}


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
        while await channel.qsize() < 2:  # noqa: ASYNC110
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
    ranges = [range(start, start + 200) for start in range(0, 10_000, 200)]

    async def main() -> list[int]:
        async with await Channel.create(name, maxsize=100) as channel:
            getting = [AsyncChannelWork(peer.consume.remote(channel, 25)) for peer in peers]
            putting = [
                AsyncChannelWork(peer.produce.remote(channel, ranges[25 * part :][:25]))
                for part, peer in enumerate(peers)
            ]
            await asyncio.gather(*putting)
            await channel.close()
            came = await asyncio.gather(*getting)
            assert all(came), "each of them had some"
            return [*came[0], *came[1]]

    with asyncio.Runner(loop_factory=loops.FACTORIES["uvloop"]) as runner:
        assert sorted(runner.run(main())) == list(range(10_000))


# --- names ---


@on_ray
@pytest.mark.asyncio
async def test_a_name_is_one_channels_at_a_time(peers: list[Any], name: str) -> None:
    async with await Channel.create(name) as channel:
        with pytest.raises(ChannelExistsError, match=f"{name!r} in namespace 'tests': connect"):
            await Channel.create(name)
        await channel.put("a")
        await channel.close()
        with pytest.raises(ChannelExistsError):  # it has an item still
            await Channel.create(name)
        assert await channel.get() == "a"
    async with await Channel.create(name) as channel:  # at once
        assert await channel.empty()


@on_ray
@pytest.mark.asyncio
async def test_who_connects_first_waits(
    peers: list[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = AsyncChannelWork(peers[0].connect.remote(name))
    monkeypatch.setattr(actor_module, "FIRST_PAUSE", 2 * WAIT)  # so it looks once
    with pytest.raises(RendezvousTimeout, match=f"nobody created channel {name!r} in namespace"):
        await Channel.connect(name, timeout=WAIT)
    async with await Channel.create(name) as channel:
        await channel.put("late")
        assert await came == "late"


@on_ray
@pytest.mark.asyncio
async def test_equal_names_in_two_namespaces_are_two_channels(peers: list[Any], name: str) -> None:
    pair = await asyncio.gather(Channel.create(name), Channel.create(name, namespace="elsewhere"))
    async with pair[0] as here, pair[1] as there:
        await here.put("here")
        await there.put("there")
        assert await AsyncChannelWork(peers[0].connect.remote(name)) == "here"
        assert await AsyncChannelWork(peers[1].connect.remote(name, "elsewhere")) == "there"


@on_ray
@pytest.mark.asyncio
async def test_bad_arguments_are_refused(name: str) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"name": ""}, "channel name ''"),
        ({"name": 7}, "channel name 7"),
        ({"name": "\ud800"}, "channel name"),  # half a character
        ({"maxsize": -1}, "maxsize"),
        ({"max_bytes": 1.5}, "max_bytes"),
        ({"namespace": 7}, "namespace 7"),
    ]
    for arguments, text in bad:
        with pytest.raises(UsageError, match=text):
            await Channel.create(**{"name": name, **arguments})
    with pytest.raises(UsageError, match="channel name"):
        await Channel.connect(" ")
    for timeout in (None, float("nan"), -1, "20"):
        with pytest.raises(UsageError, match="time-out"):
            await Channel.connect(name, timeout=timeout)  # type: ignore[arg-type]


# --- death ---


@on_ray
@pytest.mark.asyncio
async def test_an_actor_that_is_killed_fails_what_waits_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = actor_module.join

    async def join_as_it_dies(*args: Any) -> Any:
        welcome = await join(*args)
        pid = pid_of(its_actor(channel))
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(select.select, [process], [], [])  # until it has ended
        os.close(process)
        return welcome

    async with await Channel.create(name, maxsize=1) as channel:
        await channel.put(1)
        works = [channel.put(2), channel.get("other"), channel.get_batch(3, "other")]
        await channel.qsize()
        monkeypatch.setattr(actor_module, "join", join_as_it_dies)
        async with asyncio.timeout(WAIT):
            with pytest.raises(ChannelLostError, match="ended while this process connected"):
                await Channel.connect(name)
            for work in works:
                with pytest.raises(ChannelLostError, match=f"the actor of channel {name!r} is gon"):
                    await work
        with pytest.raises(ChannelLostError):
            await channel.get()


@on_ray
@pytest.mark.asyncio
async def test_killed_clients_take_nothing_along(name: str) -> None:
    victim: Any = ray.remote(num_cpus=0)(Peer).remote()  # consumer and producer, by two handles
    async with await Channel.create(name, max_bytes=4 << 20) as channel:
        holding = AsyncChannelWork(victim.hold.remote(channel, 3))
        await channel.put("first")
        assert await holding == 1
        await channel.put("second")
        large = [torch.full((3 << 20,), 7, dtype=torch.uint8)] * 2
        await AsyncChannelWork(victim.begin_to_put.remote(channel, large))
        os.kill(await AsyncChannelWork(victim.pid.remote()), signal.SIGKILL)
        async with asyncio.timeout(WAIT):
            assert [await channel.get(), await channel.get()] == ["first", "second"]
            channel.put(torch.zeros(3 << 20, dtype=torch.uint8))  # there is room, soon
            while (item := await channel.get()).any():
                assert item.tolist() == large[0].tolist(), "no half item"
            assert await channel.empty()


@on_ray
@pytest.mark.asyncio
async def test_a_thousand_waiting_gets_leave_the_actor_free(peers: list[Any], shared: str) -> None:
    async with await Channel.connect(shared) as channel:
        gets = [channel.get() for _ in range(1001)]
        await channel.qsize()
        assert await AsyncChannelWork(its_actor(channel).lasts.remote())
        await AsyncChannelWork(peers[0].put.remote(channel, ["a"]))
        assert await gets[0] == "a"
        assert sum(get.done() for get in gets) == 1  # F33


# --- handles ---


@on_ray
@pytest.mark.asyncio
async def test_a_handle_that_was_closed_says_so(shared: str) -> None:
    async with await Channel.connect(shared) as channel:
        other = await Channel.connect(shared)
        await other.put("a")
        await other.aclose()
        await other.aclose()
        with pytest.raises(ClosedError, match=f"handle of channel {shared!r} was closed"):
            other.put("b")
        unused = pickle.loads(pickle.dumps(channel))
        assert "not connected" in repr(unused)
        await unused.aclose()
        with pytest.raises(ClosedError):
            unused.get()
        assert await channel.get() == "a"


@on_ray
@pytest.mark.asyncio
async def test_creating_that_is_cancelled_leaves_nothing(name: str) -> None:
    for begun in (False, True):
        creating = asyncio.create_task(Channel.create(name))
        if begun:  # the actor has its name, and imports torch
            await until(lambda: name in actors_named())
        creating.cancel()
        await asyncio.wait([creating])
        assert creating.cancelled()
    connecting = asyncio.create_task(Channel.connect(name))
    await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.wait([connecting])
    assert connecting.cancelled()


@on_ray
def test_a_loop_that_ends_with_a_handle_open(shared: str, loop_name: str) -> None:
    complaints: list[Any] = []

    async def leave_open() -> tuple[Channel, Any]:
        channel = await Channel.connect(shared)
        await channel.put("kept")
        return channel, channel.get("other")

    async def look_again() -> Any:
        async with await Channel.connect(shared) as channel:
            return await channel.get()

    def run(main: Any) -> Any:
        with asyncio.Runner(loop_factory=lambda: loops.make(loop_name, complaints)) as runner:
            return runner.run(main())

    channel, get = run(leave_open)
    assert run(look_again) == "kept"
    assert complaints == []
    with pytest.raises(WrongLoopError):
        asyncio.run(put_to(channel))
    get.cancel()


async def put_to(channel: Channel) -> None:
    channel.put(1)


@on_ray
@pytest.mark.asyncio
async def test_it_works_beside_a_runtime_of_the_users_own(shared: str) -> None:
    async with aiocomm.open("mine:0", store=MemoryStore()) as mine:
        async with await Channel.connect(shared) as channel:
            await channel.put(1)
            assert aiocomm.current() is mine
            assert await channel.get() == 1
        assert aiocomm.current() is mine


@on_ray
@pytest.mark.asyncio
async def test_a_place_forgets_the_channels_that_were_left(shared: str) -> None:
    async with await Channel.connect(shared) as channel:
        assert channel._place is not None
        records = channel._place.store._records
        before = len(records)
        for _ in range(3):
            await (await Channel.connect(shared)).aclose()
        assert len(records) == before


@on_ray
def test_when_ray_is_shut_down_nobody_waits_for_ever(shared: str) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", leaver.__name__, address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "ClosedError True",
        "ChannelLostError False",
        "ClosedError True",
        "ClosedError True",
        "started another one: False",
        "lives on",
    ], done.stderr


WITHOUT_INIT = """
import asyncio, aiocomm, ray
from aiocomm.channel import Channel
async def main():
    for call in (Channel.create("x"), Channel.connect("x")):
        try:
            await call
        except aiocomm.errors.UsageError as error:
            print(error)
    lazy = Channel("x", "somewhere")
    try:
        await lazy.get()
    except aiocomm.errors.UsageError as error:
        print(error)
    await lazy.aclose()
    assert not ray.is_initialized()
asyncio.run(main())
"""


def test_without_init_it_says_so_and_starts_no_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_INIT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("call ray.init()") == 3
    assert done.stderr == ""
