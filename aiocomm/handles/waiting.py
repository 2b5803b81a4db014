"""How a thread blocks until a future of a loop is done, and learns that the loop has gone instead.

A thread that waits must not hang when the loop closes, and nothing announces that a loop closes.
But a loop lets go of what it holds: it finishes its asynchronous generators (``asyncio.run`` does
that before it joins the threads of the default executor, which may be the very ones that wait), and
``close()`` clears its timers. So one generator for each loop, held by nothing but a timer of that
loop, has in its frame a token whose end wakes every waiting thread. Bells are ``SimpleQueue``s,
because those may be put to from ``__del__``. Rejected: polling ``loop.is_closed()``, replacing
``loop.close``. Knows nothing of works.
"""

from __future__ import annotations

import contextlib
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable

_NEVER = 100 * 365 * 86400.0  # seconds


def block_until_done(
    future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop, timeout: float | None
) -> bool:
    """Block this thread, which runs no loop, until the future is done or its loop is gone.

    Args:
        timeout: seconds, or None.

    Returns:
        False after a time-out. True otherwise: look whether the future is done.

    Raises:
        ClosedError: the loop was closed before.
    """
    bell = _Bell(future)
    try:
        loop.call_soon_threadsafe(bell.hang_up, loop, _Token(bell.ring))
    except RuntimeError as error:
        if not loop.is_closed():
            raise
        raise ClosedError("the event loop of the work is closed: it can never complete") from error
    if loop.is_closed():
        bell.ring()  # asyncio may take the call just after it has thrown away all others
    if bell.wait(timeout):
        return True
    with contextlib.suppress(RuntimeError):  # closed in this moment: nothing to take down
        loop.call_soon_threadsafe(bell.take_down)
    return future.done()


class _Bell:
    """What one blocked thread listens to."""

    __slots__ = ("_future", "_guard", "_queue")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        self._future = future
        self._guard: _Guard | None = None

    def ring(self, _: object = None) -> None:
        self._queue.put(None)

    def wait(self, timeout: float | None) -> bool:
        try:
            limit = None if timeout is None else min(max(0.0, timeout), _NEVER)
            self._queue.get(timeout=limit)
        except Empty:
            return False
        return True

    # on the loop

    def hang_up(self, loop: asyncio.AbstractEventLoop, token: _Token) -> None:
        token.let_go = None  # it stood for the loop until this call ran
        self._guard = _guard_of(loop)
        if self._guard.gone:
            self.ring()
            return
        self._guard.bells.add(self)
        self._future.add_done_callback(self._done)

    def take_down(self) -> None:
        self._future.remove_done_callback(self._done)
        if self._guard is not None:
            self._guard.bells.discard(self)

    def _done(self, _: asyncio.Future[Any]) -> None:
        if self._guard is not None:
            self._guard.bells.discard(self)
        self.ring()


class _Token:
    """Calls ``let_go`` when whoever held it lets go of it."""

    __slots__ = ("let_go",)

    def __init__(self, let_go: Callable[[], object]) -> None:
        self.let_go: Callable[[], object] | None = let_go

    def __del__(self) -> None:
        if self.let_go is not None:
            self.let_go()


class _Guard:
    """The bells of all threads that wait for works of one loop."""

    __slots__ = ("bells", "gone")

    def __init__(self) -> None:
        self.bells: set[_Bell] = set()
        self.gone = False

    def ring_all(self) -> None:
        self.gone = True
        while self.bells:
            self.bells.pop().ring()


_guards: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Guard]
_guards = weakref.WeakKeyDictionary()


def _guard_of(loop: asyncio.AbstractEventLoop) -> _Guard:
    guard = _guards.get(loop)
    if guard is None:
        guard = _guards[loop] = _Guard()
        stand_in = _while_open(_Token(guard.ring_all))
        with contextlib.suppress(StopIteration):
            stand_in.__anext__().send(None)  # runs to its yield, which makes it known to the loop
        loop.call_later(_NEVER, _hold, stand_in)
    return guard


async def _while_open(token: _Token) -> AsyncGenerator[None, None]:
    yield


def _hold(_: object) -> None:
    """Never runs within a century: a timer that only holds its argument."""
