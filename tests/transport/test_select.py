"""Which routes are proposed, and what is made of a name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiocomm import options
from aiocomm.errors import ProtocolError, RouteError
from aiocomm.options import Options
from aiocomm.transport.cuda_ipc.receive import CudaIpcReceiver
from aiocomm.transport.cuda_ipc.send import CudaIpcSender
from aiocomm.transport.gloo import GlooRoute
from aiocomm.transport.nccl import NcclRoute
from aiocomm.transport.select import (
    DEVICE_ROUTES,
    ROUTES,
    candidates,
    device_candidates,
    eager_limit,
    is_device_route,
    make_device_route,
    make_route,
)
from aiocomm.transport.shm.receive import ShmReceiver
from aiocomm.transport.shm.send import ShmSender
from aiocomm.transport.stream import StreamRoute

from ..simulated import simulated

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
def test_less_rides_in_the_envelope_where_memory_is_shared(name: str) -> None:
    assert eager_limit(64 << 10, name) == ((16 << 10) if name == "shm" else 64 << 10)
    assert eager_limit(100, name) == 100


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
    with simulated(), pytest.raises(ProtocolError, match="route 'pigeon' that is not known here"):
        made_for_a_device("pigeon")


# --- for memory of a device ---


def made_for_a_device(name: str, index: int | None = None, **settings: Any) -> Any:
    return make_device_route(
        name,
        label="g/x/0",
        loop=asyncio.get_running_loop(),
        sending=index is not None,
        publish=lambda key, value: None,
        off_loop=lambda call, *args: asyncio.get_running_loop().create_future(),
        index=index,
        options=Options(**settings),
    )


def test_the_routes_of_a_device() -> None:
    assert device_candidates(None) == DEVICE_ROUTES
    assert device_candidates("nccl") == ("nccl",)
    assert device_candidates("staged") == (), "by way of the host, which is no route of its own"
    assert is_device_route("nccl")
    assert not is_device_route("gloo")


@pytest.mark.asyncio
async def test_a_route_is_on_the_senders_device_and_on_the_one_that_receives() -> None:
    with simulated(devices=3) as sim:
        assert made_for_a_device("nccl", 2).index == 2
        assert made_for_a_device("nccl", device=1).index == 1
        with sim.using(sim.stream(2)):
            assert made_for_a_device("nccl").index == 2


@pytest.mark.asyncio
async def test_every_name_makes_its_route_for_a_device() -> None:
    with simulated():
        assert [type(made_for_a_device(name, 0)) for name in DEVICE_ROUTES] == [
            NcclRoute,
            CudaIpcSender,
        ]
        assert [type(made_for_a_device(name)) for name in DEVICE_ROUTES] == [
            NcclRoute,
            CudaIpcReceiver,
        ]
    assert set(DEVICE_ROUTES) == set(options.DEVICE_ROUTES) - {"staged"}


@pytest.mark.asyncio
async def test_a_device_that_is_not_there() -> None:
    with simulated(devices=2), pytest.raises(RouteError, match="device is 2, and there are 2"):
        made_for_a_device("nccl", device=2)
    with simulated(devices=0), pytest.raises(RouteError, match="no CUDA device on this side"):
        made_for_a_device("nccl")
