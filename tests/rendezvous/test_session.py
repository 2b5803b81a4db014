"""A session's end: servers that die, hang or close, and processes that fork or leave."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from aiocomm.errors import RendezvousError, RendezvousTimeout
from aiocomm.rendezvous import TCPBoard, connect, threaded

from ..processes import Stage, Workers
from .boards import WAIT, arrived, board_threads, descriptor, eventually

LOOPS = ["uvloop"]  # how a board is joined to a loop is tested on both, in test_base

# Death


def _serve(stage: Stage) -> None:
    with TCPBoard(port=0, serve=True) as board:
        stage.set("port", board.port)
        stage.wait_blocking("never")


@pytest.mark.asyncio
async def test_the_death_of_the_server_is_known(caplog: pytest.LogCaptureFixture) -> None:
    with Workers(1) as workers:
        server = workers.start(_serve)
        async with TCPBoard(port=await asyncio.to_thread(workers.wait, "port")) as board:
            # Nothing but the death ends them: the watcher's own wait is one of days.
            waiting = [asyncio.create_task(board.get(f"k{i}", math.inf)) for i in range(8)]
            await arrived(board)
            server.kill()
            for task in waiting:
                with pytest.raises(RendezvousError, match="gone") as caught:
                    await task
                assert not isinstance(caught.value, RendezvousTimeout)
            for call in (lambda: board.get("k", math.inf), lambda: board.set("k", b"")):
                with pytest.raises(RendezvousError, match="gone"):
                    await call()
    assert board_threads() == []
    ours = [record for record in caplog.records if record.name.startswith("aiocomm")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert "is gone" in ours[0].getMessage()


@pytest.mark.asyncio
async def test_a_death_that_nobody_waited_through_is_known_to_the_next_call() -> None:
    with Workers(1) as workers:
        server = workers.start(_serve)
        port = await asyncio.to_thread(workers.wait, "port")
        async with TCPBoard(port=port) as board:
            server.kill()
            await asyncio.to_thread(server.wait)
            native = descriptor(board)
            with pytest.raises(RendezvousError, match="gone") as caught:
                await board.set("k", b"")
        # The error, whoever keeps it, does not keep the socket.
        with pytest.raises(OSError):
            native.borrow().close()
        assert "its server has gone" in caught.value.message


@pytest.mark.asyncio
async def test_a_server_that_hangs_holds_neither_get_nor_set_nor_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threaded, "CLOSE_TIMEOUT", 0.5)
    with Workers(1) as workers:
        server = workers.start(_serve)
        port = await asyncio.to_thread(workers.wait, "port")
        board = TCPBoard(port=port, timeout=WAIT)
        async with board:
            waiting = asyncio.create_task(board.get("k", 0.3))
            await arrived(board)
            server.stop()
            monkeypatch.setattr(board, "_timeout", 0.5)
            began = time.monotonic()
            with pytest.raises(RendezvousTimeout, match=r"0\.3 s .*'k'"):
                await waiting
            with pytest.raises(RendezvousTimeout, match=r"writing 'k' .* 0\.5 s"):
                await board.set("k", b"")
            assert time.monotonic() - began < WAIT
            began = time.monotonic()
        assert time.monotonic() - began < WAIT
        await eventually(lambda: not board_threads())


@pytest.mark.asyncio
async def test_what_listens_but_does_not_answer_is_a_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "_ANSWER", timedelta(seconds=1))
    monkeypatch.setattr(threaded, "CLOSE_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(RendezvousTimeout, match="is no board"):
            await TCPBoard(port=silent.getsockname()[1], serve=False, timeout=0.2).aopen()
        assert "left behind" in caplog.text
    await eventually(lambda: not board_threads())


@pytest.mark.asyncio
async def test_when_the_server_closes_the_board_is_gone() -> None:
    async with TCPBoard(port=0, serve=True) as server, TCPBoard(port=server.port) as client:
        await client.set("k", b"")
        await server.aclose()
        with pytest.raises(RendezvousError, match="gone"):
            await client.get("k", WAIT)


# Processes


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT * 2,
        check=False,
    )


def test_a_forked_child_gets_an_error_and_ends_and_the_parent_goes_on() -> None:
    done = _run(
        """
import asyncio, os, sys
from aiocomm.errors import WrongLoopError
from aiocomm.rendezvous import TCPBoard

async def use(board):
    await board.set("k", b"v")
    return await board.get("k", 5)

board = TCPBoard(port=0, serve=True)
board.open()
pid = os.fork()
if pid == 0:
    refused = 0
    for call in (board.open, board.close, lambda: asyncio.run(use(board)), lambda: board.host):
        try:
            call()
        except WrongLoopError:
            refused += 1
    sys.exit(refused)  # through the interpreter's end, where a store is destroyed
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), asyncio.run(use(board)))
board.close()
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("4 b'v'\n", "", 0)


def test_a_board_that_was_never_closed_does_not_hold_the_process() -> None:
    done = _run(
        """
import asyncio, threading
from aiocomm.errors import ClosedError
from aiocomm.rendezvous import TCPBoard

async def main():
    server = TCPBoard(port=0, serve=True)
    await server.aopen()
    client = TCPBoard(port=server.port)
    await client.aopen()
    task = asyncio.create_task(client.get("k", 30))
    await asyncio.sleep(0)
    await client.set("other", b"")

def work():
    async def use():
        async with TCPBoard(port=0, serve=True) as board:
            while True:
                await board.set("k", b"v")
                started.set()
    try:
        asyncio.run(use())
    except ClosedError:
        pass

asyncio.run(main())
started = threading.Event()
for _ in range(3):  # inside torch for most of the time, at the end of the interpreter too
    threading.Thread(target=work, daemon=True).start()
started.wait()
print("end")
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


@pytest.mark.asyncio
async def test_a_thread_of_the_board_logs_nothing_in_good_order(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="aiocomm"):
        async with TCPBoard(port=0, serve=True) as server, TCPBoard(port=server.port) as client:
            with pytest.raises(RendezvousTimeout):
                await client.get("k", 0.05)
            await server.set("k", b"v")
            assert await client.get("k", WAIT) == b"v"
    assert caplog.records == []
    assert capfd.readouterr().err == ""
