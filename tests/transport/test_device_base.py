"""The contract of a device's route: what select makes for a device fulfils it, name by name."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from aiocomm.options import Options
from aiocomm.transport.device_base import DeviceReceivingRoute, DeviceSendingRoute
from aiocomm.transport.select import DEVICE_ROUTES, make_device_route

from ..simulated import simulated


@pytest.mark.parametrize("name", DEVICE_ROUTES)
@pytest.mark.parametrize("sending", [True, False])
@pytest.mark.asyncio
async def test_routes_have_what_the_contract_names(name: str, sending: bool) -> None:
    with simulated():
        route = make_device_route(
            name,
            label="g",
            loop=asyncio.get_running_loop(),
            sending=sending,
            publish=lambda key, value: None,
            off_loop=lambda call, *args: asyncio.get_running_loop().create_future(),
            index=1,
            options=Options(),
        )
        contract = DeviceSendingRoute if sending else DeviceReceivingRoute
        for wanted, member in inspect.getmembers(contract, inspect.isfunction):
            if wanted.startswith("_"):
                continue
            found = getattr(type(route), wanted)
            if inspect.isfunction(found):
                names = list(inspect.signature(found).parameters)
                assert names == list(inspect.signature(member).parameters)
                assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(member)
        assert route.name == name
        assert sending or route.index == 1  # type: ignore[union-attr]
        await route.aclose()
