"""One opened TCP board: two threads, two connections, and who waits for which key.

It may not know event loops: it speaks in ``concurrent.futures``. The command thread does every
call that is answered at once, in order; the watcher thread (``watcher``) exists while somebody
waits. How a write tells those who wait for its key stands in ``board``.

Rejected: a thread per waiting ``get``; one event counter for all (each write wakes every process,
and a writer that dies between counting and telling leaves the others deaf).
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
from typing import TYPE_CHECKING, TypeVar

from ..errors import AiocommError, ClosedError, RendezvousError, RendezvousTimeout
from . import board
from .connect import establish
from .watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connect import Client, Connection, Place, Site

T = TypeVar("T")
logger = logging.getLogger(__name__)

LINGER = 0.05
"""Seconds for which an idle watcher thread is kept: gets come in bursts."""

GOODBYE_TIMEOUT = 0.5
"""Seconds that a server that closes gives its clients to let go."""

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
        self._watcher: Watcher | None = None
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
            if connection.ended:
                self.broken(RendezvousError("its server has gone"))
                refuse(self._refusal())
                return
            try:
                future.set_result(call(connection.store))
            except RuntimeError as error:
                self.broken(error)
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
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        connection = self._connection
        if connection is None or not connection.serving or self._reason is not None:
            return
        try:
            board.say_goodbye(connection.store, GOODBYE_TIMEOUT)
        except RuntimeError as error:
            self.broken(error)

    def _stop_watcher(self) -> None:
        watcher, connection = self._watcher, self._connection
        if watcher is None or connection is None:
            return
        usable = self._reason is None and not connection.ended
        try:
            watcher.stop(connection.store if usable else None, JOIN_TIMEOUT)
        except RuntimeError as error:
            self.broken(error)
        if watcher.alive:
            watcher.connection.sever()
            watcher.join(JOIN_TIMEOUT)
            if watcher.alive:
                logger.warning("the board at %s hangs: a thread is left behind", self.site)
        self._watcher, self._watching = None, watcher.connection

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
        if self._watcher is None and self._watching is not None:
            self._watcher = Watcher(self, self._watching, self._name)
            self._watcher.start(store)
        if first:  # else an earlier waiter's token is still good
            self.register(store, key)
        value = board.read(store, board.value_of(key))
        if value is not None:
            self.resolve(key, value)

    # Both threads: what a watcher tells

    def awaits(self, key: str) -> bool:
        """See ``Waiters``."""
        return key in self._pending

    def register(self, store: Client, key: str) -> None:
        """See ``Waiters``."""
        with self._lock:
            self._tokens += 1
            token = f"{self._name}.{self._tokens};"
        store.append(board.await_of(key), token)

    def resolve(self, key: str, value: bytes) -> None:
        """See ``Waiters``."""
        with self._lock:
            waiters = self._pending.pop(key, [])
            idle = not self._pending
        for future in waiters:
            _settle(future, value)
        if idle:
            self._commands.put(_nothing)

    def broken(self, error: BaseException) -> None:
        """See ``Waiters``; every pending and coming call fails."""
        with self._lock:
            first = self._reason is None
            if first:
                text = str(error).partition("\n")[0]
                self._reason = f"the board at {self.site} is gone: {text}"
        if first and not isinstance(error, RendezvousError) and not self._stop.is_set():
            logger.warning("%s", self._reason)  # torch has written to stderr what it thinks of it
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
        watcher = self._watcher
        both = (self._connection, self._watching if watcher is None else watcher.connection)
        return [connection for connection in both if connection is not None]


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
