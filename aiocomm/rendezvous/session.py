"""One opened TCP board: two threads, two connections, and who waits for which key.

It may not know event loops: it speaks in ``concurrent.futures``. The command thread does every
call that is answered at once, in order; the watcher thread exists while somebody waits, and blocks
in torch's store (without the interpreter lock) until it is told to look.

How a write tells those who wait for its key stands in ``board``.

Rejected: a thread per waiting ``get``; one event counter for all (each write wakes every process,
and a writer that dies between counting and telling leaves the others deaf); waits with short
time-outs (each prints a warning and may leave the client out of step with the server).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import secrets
import threading
import weakref
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import DistStoreError

from ..errors import AiocommError, ClosedError, RendezvousError, RendezvousTimeout
from . import board
from .connect import Client, Connection, Place, Site, establish

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
logger = logging.getLogger(__name__)

WAIT_SLICE = timedelta(days=20)
"""One wait of the watcher; more would overflow the 32-bit milliseconds of poll(2)."""

LINGER = 0.05
"""Seconds for which an idle watcher thread is kept: gets come in bursts. Not longer, because torch
writes a C++ stack to stderr when the server closes, in good order, while a client blocks in it."""

PREDECESSOR_TIMEOUT = 10.0
"""Seconds to wait for an earlier session of this process, which may hold the port, to end."""

JOIN_TIMEOUT = 1.0
"""Seconds that a thread gets to end by itself before its connection is severed."""


class Session:
    """The connected life of a board; a new one is made each time the board is opened.

    Args:
        site: where the board is.
        after: end of an earlier session of this process, which may still hold the port.
    """

    def __init__(self, site: Site, after: Future[None] | None) -> None:
        self.site = site
        self.opened: Future[Place] = Future()
        self.ended: Future[None] = Future()
        self._after = after
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pending: dict[str, list[Future[bytes]]] = {}
        self._reason: str | None = None
        self._connection: Connection | None = None
        self._watching: Connection | None = None
        self._watcher: _Watcher | None = None
        self._name = secrets.token_hex(8)
        self._tokens = 0
        # Daemons: a server that hangs must not hold the interpreter at its end.
        self._thread = threading.Thread(target=self._run, name="aiocomm-board", daemon=True)
        _sessions.add(self)
        self._thread.start()

    @property
    def serving(self) -> bool:
        """Whether this session serves the board now."""
        connection = self._connection
        return connection is not None and connection.serving

    # From any thread

    def write(self, key: str, value: bytes) -> Future[None]:
        """Write; the future completes when the server has it."""
        return self._submit(lambda store: self._write(store, key, value))

    def delete(self, key: str) -> Future[bool]:
        """Delete; the future says whether the key existed."""
        return self._submit(lambda store: store.delete_key(board.value_of(key)))

    def look(self, key: str) -> Future[bytes | None]:
        """Read without waiting; None if there is no such key."""
        return self._submit(lambda store: board.read(store, board.value_of(key)))

    def get(self, key: str) -> Future[bytes]:
        """Read, waiting for the key; give it back with ``forget`` however it ends."""
        future: Future[bytes] = Future()
        self._submit(lambda store: self._get(store, key, future), future)
        return future

    def forget(self, key: str, future: Future[bytes]) -> None:
        """Nobody waits for this future any more."""
        future.cancel()
        with self._lock:
            waiters = self._pending.get(key, [])
            if future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._pending[key]
            idle = not self._pending
        if idle and self._watcher is not None:
            self._commands.put(_nothing)  # lets the command thread see that nobody waits

    def close(self) -> None:
        """Begin to end; ``ended`` completes when both threads are done with the board."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
        self._fail_pending(self._refusal())
        self._commands.put(None)

    def sever(self) -> None:
        """Make calls that hang fail now."""
        for connection in self._connections():
            if not connection.sever():
                logger.warning("a connection to the board at %s cannot be severed", self.site)

    def join(self) -> None:
        """After ``ended``: see the last microseconds of the thread out, so that none is left."""
        self._thread.join(JOIN_TIMEOUT)

    def overdue(self, last: bool) -> None:
        """Closing takes too long: sever the connections, or at last leave the threads behind."""
        if last:
            logger.warning("the board at %s hangs: its threads are left behind", self.site)
        else:
            self.sever()

    # The command thread

    def _submit(
        self, call: Callable[[Client], T], waiter: Future[bytes] | None = None
    ) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            connection = self._connection
            if connection is None or self._stop.is_set() or self._reason is not None:
                refuse(self._refusal())
                return
            try:
                future.set_result(call(connection.store))
            except RuntimeError as error:
                self._break(error)
                refuse(self._refusal(error))

        def refuse(error: AiocommError) -> None:
            future.set_exception(error)
            if waiter is not None and not waiter.done():
                _fail(waiter, type(error)(error.message))

        with self._lock:
            refused = self._stop.is_set() or self._reason is not None
            if not refused:
                self._commands.put(run)
        if refused:
            raise self._refusal()
        return future

    def _run(self) -> None:
        try:
            if self._connect():
                self._serve_commands()
        finally:
            self._connection = self._watching = self._watcher = None
            self.ended.set_result(None)

    def _connect(self) -> bool:
        try:
            if self._after is not None:
                self._after.result(timeout=min(self.site.timeout, PREDECESSOR_TIMEOUT))
                self._after = None
            self._connection = establish(self.site, self._stop)
            # Now, while a server that hangs is still the caller's time-out and nobody else's.
            self._watching = self._connection.another()
        except AiocommError as error:
            self._reason = error.message
            self.opened.set_exception(error)
            return False
        except TimeoutError:
            self._reason = f"the earlier board at {self.site} does not end"
            self.opened.set_exception(RendezvousTimeout(self._reason))
            return False
        # Not the connection itself: a future holds its result, and so the socket.
        self.opened.set_result(self._connection.place())
        return True

    def _serve_commands(self) -> None:
        while True:
            idle = self._watcher is not None and not self._pending
            try:
                command = self._commands.get(timeout=LINGER if idle else None)
            except queue.Empty:
                self._stop_watcher()
                continue
            if command is None:
                break
            command()
            del command  # or it would hold the last value for as long as nothing happens (F20)
        self._stop_watcher()
        while not self._commands.empty():
            left = self._commands.get()
            if left is not None:
                left()

    def _stop_watcher(self) -> None:
        watcher, connection = self._watcher, self._connection
        if watcher is None or connection is None:
            return
        watcher.stopping.set()
        try:
            if self._reason is None:
                connection.store.set(board.wake_of(self._name), "")
            watcher.thread.join(JOIN_TIMEOUT)
            if self._reason is None and not watcher.thread.is_alive():
                connection.store.delete_key(board.wake_of(self._name))
                connection.store.delete_key(board.log_of(self._name))
        except RuntimeError as error:
            self._break(error)
        if watcher.thread.is_alive():
            if self._watching is not None:
                self._watching.sever()
            watcher.thread.join(JOIN_TIMEOUT)
            if watcher.thread.is_alive():
                logger.warning("the board at %s hangs: a thread is left behind", self.site)
        self._watcher = None

    def _write(self, store: Client, key: str, value: bytes) -> None:
        early = board.tokens(board.read(store, board.await_of(key)))
        watchers = board.hint(store, key, early)
        wakes = [board.wake_of(name) for name in watchers]
        store.multi_set([board.value_of(key), *wakes], [value, *[b""] * len(wakes)])
        # The answer to this is also the proof that the server has the value.
        late = board.tokens(board.take(store, board.await_of(key))) - early
        for name in board.hint(store, key, late):
            store.set(board.wake_of(name), "")

    def _get(self, store: Client, key: str, future: Future[bytes]) -> None:
        if future.cancelled():
            return
        value = board.read(store, board.value_of(key))
        if value is not None:
            _settle(future, value)
            return
        with self._lock:
            if future.cancelled():
                return
            refused = self._stop.is_set() or self._reason is not None
            if not refused:
                waiters = self._pending.setdefault(key, [])
                waiters.append(future)
                first = len(waiters) == 1
        if refused:
            _fail(future, self._refusal())
            return
        if self._watcher is None:
            self._watcher = _Watcher(self, self._name)
        if first:  # else an earlier waiter's token is still good
            self._register(store, key)
        value = board.read(store, board.value_of(key))
        if value is not None:
            self._resolve(key, value)

    # The watcher thread

    def watch(self, watcher: _Watcher) -> None:
        """Body of the watcher thread."""
        connection = self._watching
        assert connection is not None
        wake = board.wake_of(watcher.name)
        hot: set[str] = set()
        try:
            while not watcher.stopping.is_set():
                try:
                    connection.store.wait([wake], WAIT_SLICE)
                except DistStoreError:
                    # The slice is over, after which a client may be out of step (F24).
                    connection = self._watching = connection.another()
                    continue
                if not watcher.stopping.is_set():
                    connection.store.delete_key(wake)  # before looking: later news sets it again
                    hot = self._look_around(connection.store, watcher.name, hot)
        except (RuntimeError, RendezvousError) as error:
            if not watcher.stopping.is_set():
                self._break(error)

    def _look_around(self, store: Client, name: str, hot: set[str]) -> set[str]:
        """Look at every key that was written or may have been; returns those to look at again."""
        told = {key for key in board.take(store, board.log_of(name)).decode().split("\0") if key}
        unseen = set()
        for key in told | hot:
            if key not in self._pending:
                continue
            value = board.read(store, board.value_of(key))
            if value is None and key in told:
                # Told, but not there: not yet, or deleted again. The writer took the token.
                self._register(store, key)
                value = board.read(store, board.value_of(key))
            if value is None:
                unseen.add(key)
            else:
                self._resolve(key, value)
        return unseen

    # Both threads

    def _register(self, store: Client, key: str) -> None:
        with self._lock:
            self._tokens += 1
            token = f"{self._name}.{self._tokens};"
        store.append(board.await_of(key), token)

    def _resolve(self, key: str, value: bytes) -> None:
        with self._lock:
            waiters = self._pending.pop(key, [])
            idle = not self._pending
        for future in waiters:
            _settle(future, value)
        if idle:
            self._commands.put(_nothing)

    def _break(self, error: BaseException) -> None:
        with self._lock:
            if self._reason is None:
                text = str(error).partition("\n")[0]
                self._reason = f"the board at {self.site} is gone: {text}"
        self._fail_pending(self._refusal(error))

    def _refusal(self, error: BaseException | None = None) -> AiocommError:
        if self._stop.is_set():
            return ClosedError(f"the board at {self.site} was closed on this side")
        refusal = RendezvousError(self._reason or f"the board at {self.site} is gone")
        if error is not None:
            # Without its frames: they hold the store, and so a socket, for as long as the error.
            refusal.__cause__ = error.with_traceback(None)
        return refusal

    def _fail_pending(self, error: AiocommError) -> None:
        with self._lock:
            waiters = [future for each in self._pending.values() for future in each]
            self._pending.clear()
        for future in waiters:
            # One error each: a shared one would collect the tracebacks of all.
            _fail(future, type(error)(error.message))

    def _connections(self) -> list[Connection]:
        both = (self._connection, self._watching)
        return [connection for connection in both if connection is not None]


class _Watcher:
    """The watcher thread of a session and what it works on."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = name
        self.stopping = threading.Event()
        self.thread = threading.Thread(
            target=session.watch, args=(self,), name="aiocomm-board-watch", daemon=True
        )
        self.thread.start()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _at_exit() -> None:
    """End what was never closed: a thread in torch at the interpreter's end aborts the process."""
    # Clients first: they say goodbye to a server that may be another session of this process.
    for serving in (False, True):
        left = [session for session in list(_sessions) if session.serving is serving]
        for session in left:
            session.close()
        for session in left:
            if not wait([session.ended], timeout=JOIN_TIMEOUT).done:
                session.sever()
                wait([session.ended], timeout=JOIN_TIMEOUT)


# The sessions of the parent are not a forked child's to end.
os.register_at_fork(after_in_child=_sessions.clear)
atexit.register(_at_exit)


def _nothing() -> None:
    """A command that only makes the command thread look round."""


def _settle(future: Future[bytes], value: bytes) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def _fail(future: Future[bytes], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
