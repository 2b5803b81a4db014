"""Starts the two processes, shows how far they are, and brings their books back.

The parent moves no message: it reads notes from a datagram socket, on which the workers never wait,
and hands them to a display. Knows nothing of what a display looks like.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from ..launch import run_local
from .records import Direction, Role
from .worker import work

if TYPE_CHECKING:
    from .records import Books, Settings

END = b"end"


class Display(Protocol):
    """Whoever shows progress; called from one thread."""

    def update(self, direction: Direction, messages: int, nbytes: int) -> None:
        """So many messages and payload bytes of that direction have arrived so far."""


def run(settings: Settings, display: Display, *, timeout: float | None = None) -> list[Books]:
    """Run the demo; the books of trainer and rollout.

    Args:
        settings: of the run.
        display: told of each message that arrives, in a thread.
        timeout: seconds for everything, the start of the processes included.

    Raises:
        TimeoutError: it took longer.
        PeerLostError: a process died.
        Exception: whatever one of the processes raised.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        theirs.setblocking(False)
        reader = threading.Thread(target=_read, args=(ours, display), name="demo-progress")
        reader.start()
        try:
            return run_local(work, len(Role), settings, theirs, timeout=timeout)
        finally:
            theirs.setblocking(True)
            theirs.send(END)
            reader.join()


def _read(notes: socket.socket, display: Display) -> None:
    while (packet := notes.recv(4096)) != END:
        note = json.loads(packet)
        display.update(Direction(note["direction"]), note["messages"], note["nbytes"])
