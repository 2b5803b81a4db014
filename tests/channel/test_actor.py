"""How a channel's actor is made, found and ended; what users see of it is in test_handle.py."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import uuid
from typing import Any

import pytest
import ray

from aiocomm.channel import actor
from aiocomm.channel.introductions import CLIENT, SERVER, new_address
from aiocomm.errors import ChannelExistsError, ClosedError, RendezvousTimeout
from aiocomm.rendezvous.bridge import in_thread
from aiocomm.rendezvous.ray_client import local_host

from ..pairs import until
from .peers import pid_of

on_ray = pytest.mark.ray

# The report of F31 asks for 50, which pass and take half a minute: each starts a process, and
# the race for the name, which Ray decides, is the same in all.
ROUNDS = 8


def name_is_free(name: str) -> bool:
    try:
        ray.get_actor(actor.PREFIX + name)
    except ValueError:
        return True
    return False


@on_ray
@pytest.mark.asyncio
async def test_it_is_found_joined_and_ended() -> None:
    name = uuid.uuid4().hex
    made = await actor.create(name, "tests", 3, 1000)
    with pytest.raises(ChannelExistsError):
        await actor.create(name, "tests", 0, 0)
    welcome = await actor.join(name, "tests", new_address(CLIENT), "group", 20)
    assert (welcome.maxsize, welcome.max_bytes) == (3, 1000)
    assert welcome.server.address.startswith(SERVER)
    assert any(kept is made for kept in actor._kept.values())
    actor.end(made)
    await until(lambda: name_is_free(name) and not actor._kept)
    with pytest.raises(RendezvousTimeout):
        await actor.join(name, "tests", new_address(CLIENT), "group", 0)


@on_ray
@pytest.mark.asyncio
async def test_this_node_has_a_numeric_address() -> None:
    ipaddress.ip_address(await in_thread(local_host))
    assert actor.own_namespace() == "tests"


@pytest.mark.ray("shared")
@pytest.mark.asyncio
async def test_an_actor_that_hangs_is_not_waited_for(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(ray.get_actor(actor.PREFIX + shared))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RendezvousTimeout, match=r"did not answer within 0.2 s"):
            await actor.join(shared, "tests", new_address(CLIENT), "group", 0.2)
        monkeypatch.setattr(actor, "ENDING", 0.2)
        with pytest.raises(ChannelExistsError):
            await actor.create(shared, "tests", 0, 0)
    finally:
        os.kill(pid, signal.SIGCONT)


@on_ray
@pytest.mark.asyncio
async def test_four_create_it_and_one_does_time_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Light:
        """Stands where a channel's actor is, without the second that importing torch takes."""

        def __init__(self, *_: Any) -> None:
            self.ended = asyncio.Event()

        async def serve(self) -> None:
            await self.ended.wait()

        async def lasts(self) -> bool:
            return True

    monkeypatch.setattr(actor, "_Actor", ray.remote(num_cpus=0)(Light))
    name = uuid.uuid4().hex
    for _ in range(ROUNDS):  # each over the remains of the one before (F31)
        tries = (actor.create(name, "tests", 0, 0) for _ in range(4))
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        [made] = [each for each in outcomes if not isinstance(each, BaseException)]
        assert [type(each) for each in outcomes if each is not made] == [ChannelExistsError] * 3
        assert ray.get_actor(actor.PREFIX + name) == made
        actor.end(made)
    await until(lambda: not actor._kept)


@on_ray
@pytest.mark.asyncio
async def test_in_another_cluster_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = asyncio.create_task(actor.join("nobody's", "tests", new_address(CLIENT), "g", 20))
    await asyncio.sleep(0)
    monkeypatch.setattr(actor, "connection", lambda: None)  # as after ray.shutdown
    with pytest.raises(ClosedError, match=r"ray.shutdown\(\) was called .* after ray.init\(\)"):
        await finding
    with pytest.raises(ClosedError):
        await actor.create("nobody's", "tests", 0, 0)


@on_ray
@pytest.mark.asyncio
async def test_one_that_has_ended_lets_nobody_in() -> None:
    ended = actor.ChannelActor("jobs", 0, 0)
    serving = asyncio.create_task(ended.serve())
    assert await ended.join(new_address(CLIENT), "group") is not None
    ended._server.ended.set()
    assert await ended.join(new_address(CLIENT), "another") is None
    await serving
    assert not await ended.lasts()
