"""Helpers for tests of programs that use aiocomm.

Public, and free of pytest, so that users' tests may import it. It may not know how aiocomm's own
tests are run. Rejected: a mock that records calls; a board that really works shows more and is no
longer.
"""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import Future

from .errors import ClosedError, RendezvousTimeout, UsageError
from .rendezvous.base import Store, check_key, check_timeout, check_value
from .rendezvous.bridge import bridge

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """A board in memory, for workers that share one process, in one event loop or in several.

    Opening is counted as everywhere; what was written stays after the last close.

    Args:
        host: what the board says is this process' address.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[Future[bytes]]] = {}
        self._users = 0
        self._opened = False

    @property
    def host(self) -> str:
        """The address that was given to the constructor."""
        with self._lock:
            self._check_open()
        return self._host

    async def aopen(self) -> None:
        """See `Store.aopen`."""
        with self._lock:
            self._users += 1
            self._opened = True

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        with self._lock:
            self._users = max(0, self._users - 1)
            left: list[Future[bytes]] = []
            if not self._users:
                left = [waiter for each in self._waiters.values() for waiter in each]
                self._waiters.clear()
        for waiter in left:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(ClosedError(f"{self!r} was closed on this side"))

    async def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        check_key(key)
        check_timeout(timeout)
        waiter: Future[bytes] = Future()
        with self._lock:
            self._check_open()
            if key in self._values:
                return self._values[key]
            if timeout > 0:
                self._waiters.setdefault(key, []).append(waiter)
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout) as scope:
                return await bridge(waiter)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RendezvousTimeout(
                f"waited {timeout:g} s in vain for board key {key!r} at {self!r}"
            ) from error
        finally:
            self._forget(key, waiter)

    async def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        check_key(key)
        check_value(key, value)
        with self._lock:
            self._check_open()
            self._values[key] = value
            waiters = self._waiters.pop(key, [])
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(value)

    async def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        check_key(key)
        with self._lock:
            self._check_open()
            return self._values.pop(key, None) is not None

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self._values)} keys, {'open' if self._users else 'closed'}>"

    def _forget(self, key: str, waiter: Future[bytes]) -> None:
        waiter.cancel()
        with self._lock:
            waiters = self._waiters.get(key, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[key]

    def _check_open(self) -> None:
        if self._users:
            return
        if self._opened:
            raise ClosedError(f"{self!r} was closed on this side")
        raise UsageError(f"{self!r} is not open: use it inside 'async with board', or aopen() it")
