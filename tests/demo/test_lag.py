"""The watch sees a loop that is held up, and counts a stall for each tick that it cost."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiocomm.demo.lag import LagWatch

pytestmark = pytest.mark.asyncio


async def test_a_stall_is_seen_with_every_tick_that_it_cost() -> None:
    async with LagWatch(interval=0.01) as watch:
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251  (what is measured)
        await asyncio.sleep(0.02)
        lag = watch.lag()
    assert lag.largest >= 0.18
    assert lag.ticks >= 18
    assert lag.p50 > 0.02  # most ticks fell into the stall
    assert lag.p50 <= lag.p99 <= lag.largest


async def test_a_stall_that_has_not_ended_counts() -> None:
    async with LagWatch(interval=0.001) as watch:
        time.sleep(0.05)  # noqa: ASYNC251
        assert watch.lag().largest >= 0.04


async def test_it_stops() -> None:
    async with LagWatch(interval=0.001) as watch:
        await asyncio.sleep(0.01)
    ticks = watch.lag().ticks
    await asyncio.sleep(0.01)
    assert watch.lag().ticks == ticks
