"""Receipts wait for one another, but not for ever."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.packing import ALIGN
from aiocomm.transport.shm import receipts as receipts_module
from aiocomm.transport.shm.receipts import MOST, Receipts

pytestmark = pytest.mark.asyncio

RING = 16 * ALIGN


def receipts() -> tuple[Receipts, list[list[int]]]:
    said: list[list[int]] = []
    made = Receipts(asyncio.get_running_loop(), said.append)
    made.ring_bytes = RING
    return made, said


async def test_small_ones_are_said_together() -> None:
    made, said = receipts()
    for number in range(7):
        made.add(number, 1)  # which takes ALIGN bytes of the ring
    assert said == [[0, 1, 2, 3]]
    made.add(7, 1)
    assert said == [[0, 1, 2, 3], [4, 5, 6, 7]]
    made.close()


async def test_many_bytes_are_said_whatever_the_ring_is() -> None:
    made, said = receipts()
    made.ring_bytes = 100 * MOST
    made.add(0, MOST - ALIGN)
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


async def test_what_later_ones_wait_for_is_said_at_once() -> None:
    made, said = receipts()
    made.add(1, RING)
    made.add(2, 1)
    assert said == [[1]]
    made.add(0, 1)  # the sender's ring was full up to here
    assert said == [[1], [2, 0]]
    made.add_at_once(9)  # no piece of the ring
    made.add(3, 1)
    assert said == [[1], [2, 0], [9]]
    made.close()


async def test_the_last_ones_are_said_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "LATEST", 0.01)
    made, said = receipts()
    for first in (0, 2):
        made.add(first, 1)
        made.add(first + 1, 1)
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert said == [[first, first + 1]]
        said.clear()
    made.add(4, 1)
    made.add_at_once(5)
    made.add(6, 1)
    made.close()
    await asyncio.sleep(0.02)
    assert said == [[4, 5]]
