"""The thread of a session that blocks in torch's store until it is told to look at some keys.

Blocking; knows the protocol of ``board`` and whom to tell, but neither futures nor who waits. A
watcher enters itself in a list on the board, so that a server that closes in good order can wake
it and wait until it has left: torch writes a C++ stack to stderr when a server goes while a client
is blocked in it. Rejected: waits with short time-outs (each prints a warning and may leave the
client out of step with the server), and silencing stderr (it belongs to the program).
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torch.distributed import DistStoreError

from ..errors import RendezvousError
from . import board

if TYPE_CHECKING:
    from .connect import Client, Connection

WAIT_SLICE = timedelta(days=20)
"""One wait; more would overflow the 32-bit milliseconds of poll(2)."""


class Waiters(Protocol):
    """Whom a watcher works for; called on its thread."""

    def awaits(self, key: str) -> bool:
        """Whether somebody waits for the key."""

    def register(self, store: Client, key: str) -> None:
        """Put a new token on the board for the key."""

    def resolve(self, key: str, value: bytes) -> None:
        """The key has this value."""

    def broken(self, error: BaseException) -> None:
        """The connection is of no use any more."""


class Watcher:
    """One run of the thread.

    Args:
        waiters: whom to tell.
        connection: for this thread alone, until it ends.
        name: by which writers reach it; unique.
    """

    def __init__(self, waiters: Waiters, connection: Connection, name: str) -> None:
        self._waiters = waiters
        self._connection = connection
        self._name = name
        self._stopping = threading.Event()
        # A daemon: a server that hangs must not hold the interpreter at its end.
        self._thread = threading.Thread(target=self._run, name="aiocomm-board-watch", daemon=True)

    def start(self, store: Client) -> None:
        """Begin; ``store`` is of the calling thread."""
        board.enter(store, self._name)
        self._thread.start()

    def stop(self, store: Client | None, timeout: float) -> None:
        """Tell it to end, and wait; ``store`` is of the calling thread, None if it is broken."""
        self._stopping.set()
        if store is not None:
            store.set(board.wake_of(self._name), "")
        self.join(timeout)
        if store is not None and not self.alive:
            board.leave(store, self._name)
            store.delete_key(board.wake_of(self._name))
            store.delete_key(board.log_of(self._name))

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, so many seconds."""
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def connection(self) -> Connection:
        """The one it uses now."""
        return self._connection

    def _run(self) -> None:
        wake = board.wake_of(self._name)
        hot: set[str] = set()
        try:
            while not self._stopping.is_set():
                store = self._connection.store
                try:
                    store.wait([wake], WAIT_SLICE)
                except DistStoreError:
                    # The slice is over, after which a client may be out of step (F24).
                    self._connection = self._connection.another()
                    continue
                if not self._stopping.is_set():
                    store.delete_key(wake)  # before looking: later news sets it again
                    hot = self._look_around(store, hot)
        except (RuntimeError, RendezvousError) as error:
            if not self._stopping.is_set():
                self._waiters.broken(error)

    def _look_around(self, store: Client, hot: set[str]) -> set[str]:
        """Look at every key that was written or may have been; returns those to look at again."""
        news = board.take_log(store, self._name)
        if board.GOODBYE in news:
            self._waiters.broken(RendezvousError("its server closed it"))
            board.leave(store, self._name)  # the last word: the server waits for it
            self._stopping.set()
            return set()
        unseen = set()
        for key in news | hot:
            if not self._waiters.awaits(key):
                continue
            value = board.read(store, board.value_of(key))
            if value is None and key in news:
                # Told, but not there: not yet, or deleted again. The writer took the token.
                self._waiters.register(store, key)
                value = board.read(store, board.value_of(key))
            if value is None:
                unseen.add(key)
            else:
                self._waiters.resolve(key, value)
        return unseen
