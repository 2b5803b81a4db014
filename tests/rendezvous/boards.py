"""What the tests of boards share: ports, and ways to wait for a board's threads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from aiocomm.rendezvous import TCPBoard, connect

from ..sources import ROOT

WAIT = 30.0  # seconds; guards against hanging, nothing waits that long


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets: bound here, but not listened on, so that a board still can."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def board_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if "aiocomm" in thread.name)


async def arrived(board: TCPBoard) -> None:
    """Wait until the calls made by now have reached the board, which takes them in order."""
    await asyncio.sleep(0)
    await board.set("other", b"")


def descriptor(board: TCPBoard) -> connect.Descriptor:
    assert board._session is not None
    assert board._session._connection is not None
    native = board._session._connection.native
    assert native is not None
    native.borrow().close()
    return native


def run_python(program: str) -> str:
    """What a program writes to stdout; it must end well and write nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def wipe() -> None:
    """Empty the Ray board that ``kept_board`` keeps, so that the next test need not make one."""
    import ray

    actor: Any = ray.get_actor("aiocomm")
    ray.get(actor.__ray_call__.remote(lambda self: self._entries.clear()))


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what nothing signals: the end of a thread, or a key of the board's own."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
