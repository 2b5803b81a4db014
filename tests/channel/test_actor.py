"""How a channel's actor is made, found and ended; what users see of it is in test_handle.py."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import uuid
from typing import Any

import pytest
import ray

from aiocomm.channel import actor
from aiocomm.channel.introductions import CLIENT, SERVER, new_address
from aiocomm.errors import ChannelExistsError, RendezvousTimeout

from ..pairs import until

on_ray = pytest.mark.ray


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
    ipaddress.ip_address(await actor.in_thread(actor.local_host))
    assert actor.own_namespace() == "tests"


@pytest.mark.asyncio
async def test_calls_that_block_have_a_thread_of_their_own() -> None:
    gate = threading.Event()
    calls = [actor.in_thread(gate.wait) for _ in range(50)]
    dropped = actor.in_thread(gate.wait)
    dropped.cancel()
    assert not any(call.done() for call in calls)
    gate.set()
    assert all(await asyncio.gather(*calls))

    def fail() -> Any:
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        await actor.in_thread(fail)
