"""The heart: one timer for all, that stops with the last link."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiocomm.options import Options
from aiocomm.transport.heart import Heart

FAST = Options(heartbeat_interval=0.01, peer_timeout=1.0)


class Beaten:
    def __init__(self, heart: Heart, until: int) -> None:
        self.beats: list[tuple[float, float]] = []
        self.done = asyncio.Event()
        self._heart = heart
        self._until = until

    def beat(self, interval: float, timeout: float) -> None:
        self.beats.append((interval, timeout))
        if len(self.beats) == self._until:
            self._heart.remove(self)
            self.done.set()


@pytest.mark.asyncio
async def test_every_link_is_beaten_until_it_leaves() -> None:
    heart = Heart(FAST)
    short, long = Beaten(heart, 2), Beaten(heart, 4)
    heart.add(short)
    heart.add(long)
    await long.done.wait()
    assert short.beats == [(0.01, 1.0)] * 2
    assert long.beats == [(0.01, 1.0)] * 4
    assert repr(heart) == "<Heart of 0 links, every 0.01 s>"


@pytest.mark.asyncio
async def test_one_timer_for_all_links_and_none_without() -> None:
    heart = Heart(FAST)
    links = [Beaten(heart, 1000) for _ in range(50)]
    for link in links:
        heart.add(link)
    timer = heart._timer
    assert timer is not None
    for link in links[1:]:
        heart.remove(link)
    assert heart._timer is timer
    heart.remove(links[0])
    heart.remove(links[0])
    assert heart._timer is None
    assert timer.cancelled()


@pytest.mark.asyncio
async def test_a_link_that_one_beat_took_away_is_not_beaten_by_the_same_tick() -> None:
    heart = Heart(FAST)
    second = Beaten(heart, 1000)

    class First(Beaten):
        def beat(self, interval: float, timeout: float) -> None:
            heart.remove(second)
            super().beat(interval, timeout)

    first = First(heart, 2)
    heart.add(first)
    heart.add(second)
    await first.done.wait()
    assert second.beats == []


@pytest.mark.asyncio
async def test_a_stalled_loop_is_one_tick_and_not_many() -> None:
    heart = Heart(FAST)
    link = Beaten(heart, 3)
    heart.add(link)
    started = time.monotonic()
    while time.monotonic() - started < 0.2:
        pass  # the stall: 20 intervals
    assert link.beats == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(link.beats) <= 1
    await link.done.wait()


def test_a_short_patience_quickens_the_heart() -> None:
    assert Heart(Options(heartbeat_interval=1.0, peer_timeout=0.4)).interval == 0.1
    assert Heart(Options()).interval == 1.0
