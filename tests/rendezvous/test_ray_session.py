"""The thread of a Ray board: begun by opening, ended by closing, whatever Ray does."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.errors import ClosedError
from aiocomm.rendezvous.ray import RayBoard

from .boards import WAIT, board_threads

pytestmark = pytest.mark.ray("kept_board")


@pytest.mark.asyncio
async def test_several_open_at_once_with_one_thread() -> None:
    threads = board_threads()
    board = RayBoard(timeout=WAIT)
    await asyncio.gather(*(board.aopen() for _ in range(5)))
    waiting = [asyncio.create_task(board.get(f"k{i}", WAIT)) for i in range(100)]
    await board.delete("never there")
    assert board_threads() == [*threads, "aiocomm-ray-board"]
    await asyncio.gather(*(board.aclose() for _ in range(5)))
    assert board_threads() == threads
    for task in waiting:
        with pytest.raises(ClosedError):
            await task


@pytest.mark.asyncio
async def test_an_opening_that_is_cancelled_leaves_nothing() -> None:
    threads = board_threads()
    for turns in range(20):
        opening = asyncio.create_task(RayBoard(timeout=WAIT).aopen())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    assert board_threads() == threads


@pytest.mark.asyncio
async def test_it_opens_while_an_earlier_session_ends() -> None:
    board = RayBoard(timeout=WAIT)
    for _ in range(5):
        await board.aopen()
        closing = asyncio.create_task(board.aclose())
        await asyncio.sleep(0)
        async with board:
            await closing
            assert await board.delete("never there") is False
