"""The thread of a Ray board: begun by opening, ended by closing, whatever Ray does."""

from __future__ import annotations

import asyncio

import pytest
import ray

from aiocomm.errors import ClosedError
from aiocomm.rendezvous.ray import RayBoard

from .boards import WAIT, board_threads, run_python

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
        board = RayBoard(timeout=WAIT)
        opening = asyncio.create_task(board.aopen())
        for _ in range(turns):
            await asyncio.sleep(0)
        if opening.cancel():
            with pytest.raises(asyncio.CancelledError):
                await opening
        else:  # its threads were quicker than these turns
            await board.aclose()
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


AFTER_SHUTDOWN = """
import asyncio, os, sys
import ray
from aiocomm.errors import RendezvousError, WrongLoopError
from aiocomm.rendezvous.ray import RayBoard

def init():
    ray.init(address=ADDRESS, namespace="tests", log_to_driver=False, configure_logging=False)

async def main():
    board = RayBoard(timeout=30)
    await board.aopen()
    await board.set("mine", b"v")
    waiting = asyncio.create_task(board.get("never there", float("inf")))
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        try:
            board.host
        except WrongLoopError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    await asyncio.to_thread(ray.shutdown)
    for call in (waiting, board.set("k", b"")):
        try:
            await call
        except RendezvousError as error:
            assert "ray.shutdown()" in str(error), error
        else:
            raise AssertionError(call)
    await board.aclose()
    assert not ray.is_initialized()  # Ray would come back by itself if it were asked for anything
    init()
    await board.aopen()
    await board.set("again", b"v")
    print((await board.get("again", 30)).decode())
    await board.delete("again")

init()
asyncio.run(main())  # and ends with the board open
"""


def test_after_a_shutdown_of_ray_everything_fails_and_can_be_opened_again() -> None:
    address = ray.get_runtime_context().gcs_address
    assert run_python(AFTER_SHUTDOWN.replace("ADDRESS", repr(address))) == "v\n"
