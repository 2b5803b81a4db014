"""The handle of one operation: an asyncio future that other threads may use too.

A work *is* an ``asyncio.Future`` (the one written in C), so ``asyncio.wait``, ``gather``,
``shield`` and ``timeout`` take it as it is and awaiting it costs no task. What a plain future lacks
is added: ``then``; use from threads without a loop; errors instead of hanging; and completion that
is silent when somebody cancelled first. A work may not know what completes it: the owner calls
``_finish`` or ``_fail`` on the loop and overrides ``_on_cancel``. Rejected: wrapping a future (an
object and a callback more for each message, and ``asyncio.wait`` does not take it), and a task for
each operation (ten times the cost). ``then`` reaches ``AsyncFuncWork``, which builds on this file,
through the class attribute ``_branch``, which func.py sets: the package imports both.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from ..errors import ClosedError, UsageError, WouldBlockError, WrongLoopError
from .waiting import block_until_done

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from contextvars import Context
    from types import TracebackType

    from .func import AsyncFuncWork

T = TypeVar("T")
R = TypeVar("R")

# Called without super(), which costs 0.1 us a call; these are on the path of every message.
_future_await = asyncio.Future.__await__
_future_add = asyncio.Future.add_done_callback
_future_cancel = asyncio.Future.cancel
_future_result = asyncio.Future.result


class AsyncWork(asyncio.Future[T]):
    """An operation that was begun and will complete with a result or an exception.

    ``await`` it in its loop, ``wait()`` for it in a thread without a loop, chain with ``then``.
    Every method may be called from any thread; what a thread asks for is carried out on the loop.
    An exception that nobody retrieves is given to the loop's exception handler, once, when the work
    is dropped.

    Args:
        loop: the loop it belongs to; default: the running one.
    """

    _branch: ClassVar[type[AsyncFuncWork[Any]]]

    _next: AsyncFuncWork[Any] | None = None
    _awaiting: AsyncWork[Any] | None = None  # what it cannot complete before
    _origin: AsyncWork[Any] | None = None  # whose failure this is, and who reports it
    _traceback: TracebackType | None = None  # of the failure, before any awaiter added to it

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result.

        Raises:
            WrongLoopError: the running loop is not the work's.

        Cancellation: cancels the work, as with any asyncio future; ``asyncio.shield`` prevents it.
        """
        if _get_running_loop() is not self._loop:
            raise WrongLoopError(_WRONG_LOOP)
        if self._traceback is not None:
            try:
                self.result()
            except BaseException:
                del self  # as in ``result``
                raise
        return _future_await(self)

    __iter__ = __await__

    async def async_wait(self) -> T:
        """The same as ``await work``, as a coroutine.

        Cancellation: cancels the work.
        """
        try:
            return await self
        finally:
            del self  # as in ``result``

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the work is done; its result.

        Returns at once, in any thread, when the work is done already.

        Args:
            timeout: seconds; None waits for ever. The work goes on after a time-out.

        Raises:
            WouldBlockError: this thread runs an event loop (the work's or another) and the work is
                not done.
            TimeoutError: not done in time.
            ClosedError: the work's loop is closed, or was closed meanwhile.
            asyncio.CancelledError: the work was cancelled.
            Exception: what the work failed with.
        """
        if not self.done():
            if (running := _get_running_loop()) is not None:
                raise WouldBlockError(_WOULD_BLOCK if running is self._loop else _BLOCKS_OTHER)
            if not block_until_done(self, self._loop, timeout):
                raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")
            if not self.done():
                raise ClosedError(f"the event loop was closed, and {self!r} can never complete")
        try:
            return self.result()
        finally:
            del self  # as in ``result``

    def result(self) -> T:
        """The result; raises what the work failed with.

        Raises:
            asyncio.InvalidStateError: not done yet.
            asyncio.CancelledError: the work was cancelled.
            Exception: what the work failed with, with the traceback that it had then: asyncio's
                own futures forget it when they are asked a second time.
        """
        if self._traceback is not None and (error := self._exception) is not None:
            self._log_traceback = False
            try:
                raise error.with_traceback(self._traceback)
            finally:
                del self, error  # the traceback holds this frame; it shall not hold the work
        try:
            return _future_result(self)
        except BaseException:
            del self  # as above
            raise

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the work; from another thread, ask the loop to.

        Returns:
            False when there is nothing to cancel: it is done, or its loop is closed. True
            otherwise; in another thread the work may still complete before the request arrives.
        """
        if self.done():
            return False
        if _get_running_loop() is self._loop:
            return self._cancel(msg)
        try:
            self._loop.call_soon_threadsafe(self._cancel, msg)
        except RuntimeError:
            if self._loop.is_closed():
                return False
            raise
        return True

    def add_done_callback(
        self, fn: Callable[[AsyncWork[T]], object], /, *, context: Context | None = None
    ) -> None:
        """Call ``fn(work)`` on the loop once the work is done.

        Raises:
            WrongLoopError: this thread runs another loop.
            ClosedError: the loop is closed.
        """
        running = _get_running_loop()
        if running is self._loop:
            _future_add(self, fn, context=context)
        elif running is None:
            add = partial(_future_add, self, fn, context=context or copy_context())
            self._post(add)
        else:
            raise WrongLoopError(_WRONG_LOOP)

    @overload
    def then(
        self, func: Callable[..., Coroutine[Any, Any, AsyncWork[R]]], /, *args: Any, **kwargs: Any
    ) -> AsyncFuncWork[R]: ...
    @overload
    def then(
        self, func: Callable[..., Awaitable[R]], /, *args: Any, **kwargs: Any
    ) -> AsyncFuncWork[R]: ...
    @overload
    def then(self, func: Callable[..., R], /, *args: Any, **kwargs: Any) -> AsyncFuncWork[R]: ...
    def then(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AsyncFuncWork[Any]:
        """Call ``func(result, *args, **kwargs)`` on the loop once this work has its result.

        Each call makes a branch of its own. ``func`` may be a coroutine function, or return
        anything awaitable; if what it returns in the end is an ``AsyncWork``, the branch completes
        with the last work of that one's chain. If this work fails or is cancelled, ``func`` is not
        called and the branch fails or is cancelled alike. Cancelling the branch leaves this work as
        it is, but for the works of a group: a send or receive that nobody else waits for is
        cancelled with it. May be called from any thread, before completion or after it.

        Returns:
            The work of ``func``: completes with what ``func`` returns.

        Raises:
            UsageError: ``func`` cannot be called.
            ClosedError: the loop is closed.
        """
        if not callable(func):
            raise UsageError(f"then() needs something that can be called, not {func!r}")
        branch = self._branch(self, func, args, kwargs)
        if _get_running_loop() is self._loop:
            branch._join(self)
        else:
            self._post(partial(branch._join, self))
        self._next = branch
        return branch

    def get_next_work(self) -> AsyncFuncWork[Any] | None:
        """The work of the most recent ``then`` of this one, or None."""
        return self._next

    def get_last_work(self) -> AsyncWork[Any]:
        """The end of the chain: the next work of the next work and so on; itself without any."""
        last: AsyncWork[Any] = self
        while (following := last._next) is not None:
            last = following
        return last

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state_text()}>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{self!r} cannot leave its process: await it, and return or send its result"
        )

    # --- for the owner, on the loop ---

    def _finish(self, value: T) -> None:
        """Complete; silent when done or cancelled already."""
        if not self.done():
            self.set_result(value)

    def _fail(self, error: BaseException, *, quiet: bool = False) -> None:
        """Fail; silent when done or cancelled already.

        Args:
            error: an ``asyncio.CancelledError`` cancels the work instead.
            quiet: not reported if nobody retrieves it.
        """
        if self.done():
            return
        if isinstance(error, asyncio.CancelledError):
            _future_cancel(self, *error.args[:1])
            return
        if isinstance(error, StopIteration):  # cannot be raised through an await
            cause, error = error, RuntimeError(f"the function of {self!r} raised StopIteration")
            error.__cause__ = cause
        self._traceback = error.__traceback__
        self.set_exception(error)
        if quiet:
            self._log_traceback = False

    @property
    def _whereabouts(self) -> str:
        """What it is that waits, for texts: of which group or channel; empty where none is known.

        Called in any thread.
        """
        return ""

    @property
    def _falls_with_its_branch(self) -> bool:
        """Whether it is cancelled with its last branch when nobody else waits for it.

        A receive is: left behind, it would take a message that then reaches nobody.
        """
        return False

    def _claim(self) -> None:
        """Called on the loop: a branch is there to take the result."""

    def _unclaim(self) -> None:
        """Called on the loop: that branch was cancelled and has not taken it."""

    def _on_cancel(self) -> None:
        """Called on the loop after the work was cancelled."""

    def _withdraw(self) -> bool:
        """Called on the loop: take it back, if it is not done and can be undone; whether it was."""
        return self._cancel()

    def _abandon(self) -> None:
        """Called on the loop: nobody waits any more, nor takes what has come already."""
        self._cancel()

    def _cancel(self, msg: Any | None = None) -> bool:
        if not _future_cancel(self, msg):
            return False
        self._on_cancel()
        return True

    # --- inside ---

    def _post(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError as error:
            if not self._loop.is_closed():
                raise
            raise ClosedError(f"the event loop of {self!r} is closed") from error

    def _state_text(self) -> str:
        if not self.done():
            where = self._whereabouts
            return f"pending: {where}" if where else "pending"
        if self.cancelled():
            return "cancelled"
        if (error := self._exception) is not None:
            return f"failed: {error!r}"
        return "done"


_WRONG_LOOP = (
    "this work belongs to another event loop: await it there, or wait() for it in a thread without "
    "a loop (asyncio.to_thread(work.wait))"
)
_WOULD_BLOCK = "wait() would stop the event loop that is to complete the work: use 'await work'"
_BLOCKS_OTHER = (
    "wait() would stop the event loop of this thread: use 'await asyncio.to_thread(work.wait)'"
)
