"""Which routes are proposed, and what is made of a name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiocomm.errors import ProtocolError
from aiocomm.options import Options
from aiocomm.transport.gloo import GlooRoute
from aiocomm.transport.select import ROUTES, candidates, make_route
from aiocomm.transport.shm.receive import ShmReceiver
from aiocomm.transport.shm.send import ShmSender
from aiocomm.transport.stream import StreamRoute

LINK: Any = SimpleNamespace(local_host="127.0.0.1")


def made(name: str, *, sending: bool = True) -> Any:
    return make_route(
        name,
        label="g/x/0",
        link=LINK,
        loop=asyncio.get_running_loop(),
        sending=sending,
        publish=lambda key, value: None,
        off_loop=None,
        shm_bytes=1 << 20,
        stall_timeout=5.0,
    )


def test_the_route_of_last_resort_comes_last() -> None:
    assert candidates(None, same_host=True) == ROUTES == ("shm", "gloo", "link")


def test_memory_is_not_shared_between_hosts() -> None:
    assert candidates(None, same_host=False) == ("gloo", "link")


@pytest.mark.parametrize("name", ROUTES)
def test_a_pinned_route_is_the_only_one(name: str) -> None:
    assert candidates(name, same_host=False) == (name,)
    assert Options(route=name).route == name


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("shm", (ShmReceiver, ShmSender)),
        ("gloo", (GlooRoute, GlooRoute)),
        ("link", (StreamRoute, StreamRoute)),
    ],
)
@pytest.mark.parametrize("sending", [True, False])
async def test_every_name_makes_its_route(
    name: str, ends: tuple[type, type], sending: bool
) -> None:
    route = made(name, sending=sending)
    assert type(route) is ends[sending]
    assert route.name == name
    await route.aclose()


@pytest.mark.asyncio
async def test_a_name_of_another_version_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError, match="route 'nccl' that is not known here"):
        made("nccl")
