"""Receipts wait for one another, but not for ever."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.transport.shm import receipts as receipts_module
from aiocomm.transport.shm.receipts import MOST, WITHHELD, Receipts

pytestmark = pytest.mark.asyncio

RING = 1000


def receipts() -> tuple[Receipts, list[list[int]]]:
    said: list[list[int]] = []
    made = Receipts(asyncio.get_running_loop(), said.append)
    made.ring_bytes = RING
    return made, said


async def test_small_ones_are_said_together() -> None:
    made, said = receipts()
    for number in range(7):
        made.add(number, RING // WITHHELD // 3 + 1)
    assert said == [[0, 1, 2], [3, 4, 5]]
    made.close()


async def test_many_bytes_are_said_whatever_the_ring_is() -> None:
    made, said = receipts()
    made.ring_bytes = 100 * MOST
    made.add(0, MOST - 1)
    assert said == []
    made.add(1, 1)
    assert said == [[0, 1]]


async def test_a_large_one_and_one_that_is_waited_for_are_said_at_once() -> None:
    made, said = receipts()
    made.add(0, RING)
    made.add(1, 1)
    made.add_at_once(2)
    made.add_at_once(3, 4)
    assert said == [[0], [1, 2], [3, 4]]
    made.close()


async def test_the_last_ones_are_said_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "LATEST", 0.01)
    made, said = receipts()
    for _ in range(2):
        made.add(0, 1)
        made.add(1, 1)
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert said == [[0, 1]]
        said.clear()
    made.add(2, 1)
    made.add_at_once(3)
    made.add(4, 1)
    made.close()
    await asyncio.sleep(0.02)
    assert said == [[2, 3]]
