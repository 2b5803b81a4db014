"""The thread that waits for all: when it leaves, and how a server that closes takes leave."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from aiocomm.errors import RendezvousError, RendezvousTimeout
from aiocomm.rendezvous import TCPBoard, board, session, watcher

from ..processes import Stage, Workers
from .boards import WAIT, arrived, board_threads, eventually

LOOPS = ["asyncio"]  # how a board is joined to a loop is tested on both, in test_base


@pytest.mark.asyncio
async def test_a_wait_goes_on_when_its_slice_is_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher, "WAIT_SLICE", timedelta(milliseconds=20))
    async with TCPBoard(port=0, serve=True) as board:
        waiting = asyncio.create_task(board.get("k", WAIT))
        await asyncio.sleep(0.2)  # ten slices
        assert not waiting.done()
        await board.set("k", b"v")
        assert await waiting == b"v"


@pytest.mark.asyncio
async def test_the_watcher_leaves_when_nobody_waits() -> None:
    async with TCPBoard(port=0, serve=True) as board:
        for _ in range(2):
            with pytest.raises(RendezvousTimeout):
                await board.get("k", 0.05)
            await eventually(lambda: "aiocomm-board-watch" not in board_threads())
        waiting = asyncio.create_task(board.get("k", WAIT))
        await board.set("k", b"v")
        assert await waiting == b"v"


# A server that closes in good order


async def _wait_through(stage: Stage, how: str) -> None:
    """A client of a server in another process that goes in good order."""
    port = await stage.wait("port")
    async with TCPBoard(port=port, timeout=WAIT) as board:
        waiting = []
        if how != "idle":
            waiting = [asyncio.create_task(board.get(f"k{number}", WAIT)) for number in range(3)]
            await arrived(board)
        stage.set("ready")
        for task in waiting:
            with pytest.raises(RendezvousError, match="its server closed it"):
                await task
        await stage.wait("gone")
        # More than once: the second call knows it from the first.
        for call in (lambda: board.set("k", b""), lambda: board.get("k", WAIT)):
            with pytest.raises(RendezvousError, match="gone: its server"):
                await call()


async def _serve_and_go(stage: Stage, how: str) -> None:
    session.GOODBYE_TIMEOUT = WAIT  # which it does not take
    board = TCPBoard(port=0, serve=True)
    await board.aopen()
    stage.set("port", board.port)
    await stage.wait("ready")
    if how != "end of the process":
        started = time.monotonic()
        await board.aclose()
        assert time.monotonic() - started < session.GOODBYE_TIMEOUT
        stage.set("gone")


@pytest.mark.parametrize("how", ["idle", "close", "end of the process"])
def test_a_server_that_closes_is_no_reason_to_write_to_stderr(loop_name: str, how: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        server = workers.start(_serve_and_go, how, strict=how != "end of the process")
        client = workers.start(_wait_through, how)
        if how == "end of the process":
            server.wait()
            workers.set("gone")
        workers.join()
        assert (server.stderr, client.stderr) == ("", "")


@pytest.mark.asyncio
async def test_who_left_before_the_server_is_not_waited_for() -> None:
    async with TCPBoard(port=0, serve=True) as server:
        raw = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        async with TCPBoard(port=server.port) as client:
            waiting = asyncio.create_task(client.get("k", WAIT))
            await arrived(client)
            assert board.tokens(board.read(raw, board.WATCHERS))
            waiting.cancel()
        assert board.read(raw, board.WATCHERS) in (None, b"")
        del raw


@pytest.mark.asyncio
async def test_a_client_that_died_does_not_hold_the_server_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "GOODBYE_TIMEOUT", 0.2)
    server = TCPBoard(port=0, serve=True)
    await server.aopen()
    raw = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    board.enter(raw, "somebody")
    del raw
    started = time.monotonic()
    await server.aclose()
    assert 0.2 <= time.monotonic() - started < WAIT
