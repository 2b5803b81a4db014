"""How messages on a device leave: by a route of the device's once it is open, or by the host."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiocomm.device import here
from aiocomm.errors import RouteError
from aiocomm.options import Options
from aiocomm.payload import Packed, pack, pack_tensor
from aiocomm.runtime import Runtime
from aiocomm.scheduler.device_sending import DeviceSending, ready_of
from aiocomm.scheduler.works import SendWork

from ..simulated import Simulated, simulated
from .lanes import CONTEXT

pytestmark = pytest.mark.asyncio


class Opening:
    """What opens the route, as often as it is asked to."""

    def __init__(self, error: RouteError | None = None, **settings: Any) -> None:
        self.asked: list[int] = []
        self.route: Any = SimpleNamespace(name="nccl")
        self._error = error
        runtime = Runtime(asyncio.get_running_loop(), Options(**settings), "a:0")
        self.sending = DeviceSending(runtime, self.open, CONTEXT)

    async def open(self, index: int) -> Any:
        self.asked.append(index)
        if self._error is not None:
            raise self._error
        return self.route


def packed_on(sim: Simulated, index: int = 0, *, tensor: bool = False) -> Packed:
    values = sim.tensor(torch.arange(4, dtype=torch.uint8), index)
    packed = pack_tensor(values) if tensor else pack([values, values[:2]])
    assert packed.device is not None
    packed.device.ready = here.mark(packed.device.index)
    return packed


async def test_that_none_is_wanted_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with simulated(auto=True) as sim:
        opening = Opening(device_route="staged")
        assert await opening.sending.open(packed_on(sim)) is None
        assert (opening.asked, opening.sending.name) == ([], "staged")
    assert caplog.records == []


async def test_the_route_is_opened_for_the_device_of_the_first_message() -> None:
    with simulated(auto=True) as sim:
        opening = Opening()
        assert opening.sending.name is None
        for index in (1, 0):
            assert await opening.sending.open(packed_on(sim, index)) is opening.route
        assert opening.asked == [1]
        assert opening.sending.name == "nccl"


async def test_where_none_can_be_opened_one_warning_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with simulated(auto=True) as sim, caplog.at_level(logging.WARNING):
        opening = Opening(RouteError("no such luck", group="g"))
        for _ in range(3):
            assert await opening.sending.open(packed_on(sim)) is None
        assert opening.asked == [0]
        assert opening.sending.name == "staged"
    (record,) = caplog.records
    assert record.getMessage().endswith("by way of pinned memory of the host: no such luck")


async def test_small_messages_set_out_before_their_turn() -> None:
    with simulated(auto=True) as sim:
        opening = Opening()
        work = SendWork(loop=asyncio.get_running_loop())
        opening.sending.begin(work, packed_on(sim))
        assert work._host is not None
        (buffer,) = await work._host
        assert buffer.tolist() == [0, 1, 2, 3]


async def test_within_a_process_objects_are_handed_over_and_tensors_copied() -> None:
    with simulated(auto=True) as sim:
        opening = Opening()
        packed = packed_on(sim)
        (same,) = await opening.sending.hand_over(packed)
        assert same.data_ptr() == packed.buffers[0].data_ptr()
        packed = packed_on(sim, tensor=True)
        (copy,) = await opening.sending.hand_over(packed)
        assert copy.data_ptr() != packed.buffers[0].data_ptr()
        assert sim.read(copy).tolist() == [0, 1, 2, 3]
        assert ready_of(packed).query()


async def test_a_route_that_does_not_reach_a_message_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with simulated(auto=True) as sim:
        opening = Opening()
        packed = pack(sim.tensor(torch.zeros(4)))
        await opening.sending.open(packed)
        with caplog.at_level(logging.WARNING):
            for reason in ("expandable segments", "another reason"):
                opening.sending.refused(RouteError(reason))
        (record,) = caplog.records
        assert "the route nccl does not reach" in record.getMessage()
        assert "expandable segments" in record.getMessage()
        assert await opening.sending.open(packed) is opening.route, "others still go by it"
