"""The work of a function that was chained to another work with ``then``.

A plain function runs in the completion callback of its predecessor, without a task. What it returns
decides how it goes on: a value completes the work; an awaitable runs as a task; an ``AsyncWork`` is
followed to the last work of its chain. One failure is reported once, however many branches it
reaches: a branch that passes a failure on leaves the duty to report it with the work where it
arose, holds that work, and relieves it when the failure is retrieved here. Rejected: counting the
failure as retrieved when a branch takes it and reporting in each branch, which reports it once for
each branch. May not know what completes the first work of a chain.

What a function has queued on a device belongs to its result: in a process that uses CUDA an event
is recorded behind it, in the stream that is current when it is over, and the work completes
when that is done. Who awaits it may use the data in any stream. Rejected: to look for CUDA tensors
in the result (a function may write to tensors that it does not return).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..device import here
from ..errors import DeviceError, UsageError, WrongLoopError
from ..transport.completion import poller_of
from .base import AsyncWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping

T = TypeVar("T")

_future_add = asyncio.Future.add_done_callback

_tasks: set[asyncio.Task[Any]] = set()  # a loop holds its tasks weakly


class AsyncFuncWork(AsyncWork[T]):
    """Completes with what its function returns, or with the last work of what it returns.

    Made by ``then``. Cancelling it before its function has begun means that the function never
    runs; the predecessor goes on, but for a send or receive of a group that nobody else waits for.
    While a coroutine runs, or a returned work is followed, that one is cancelled, and this work
    ends as it ends. What it queued on a device in its current stream is done when it completes;
    for other streams the function has to make that one wait.

    Args:
        predecessor: whose result the function takes.
        func: called as ``func(result, *args, **kwargs)``.
        args: positional.
        kwargs: by name.
    """

    _call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]] | None  # until it begins
    _root: AsyncWork[Any] | None = None  # the work that the function returned
    _task: asyncio.Task[Any] | None = None
    _claimed: bool = False  # the predecessor counts on this one to take its result

    def __init__(
        self,
        predecessor: AsyncWork[Any],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(loop=predecessor._loop)
        self._awaiting = predecessor
        self._call = (func, args, kwargs)
        self._name = getattr(func, "__qualname__", "") or type(func).__name__

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result.

        Raises:
            WrongLoopError: the running loop is not the work's.
            UsageError: awaited by its own function.

        Cancellation: cancels the work; see the class.
        """
        if self._task is not None and self._task is asyncio.current_task():
            raise UsageError(f"{self!r} is awaited by its own function, which would never end")
        if self._origin is not None:
            self._relieve()
        return super().__await__()

    __iter__ = __await__

    def result(self) -> T:
        """The result; raises what the work failed with."""
        if self._origin is not None:
            self._relieve()
        return super().result()

    def exception(self) -> BaseException | None:
        """What the work failed with, or None."""
        if self._origin is not None:
            self._relieve()
        return super().exception()

    def _join(self, predecessor: AsyncWork[Any]) -> None:
        """Wait for the predecessor, on the loop."""
        if self._call is None:
            return  # cancelled already
        self._claimed = True
        predecessor._claim()
        _future_add(predecessor, self._begin)

    # --- the predecessor is done ---

    def _begin(self, predecessor: AsyncWork[Any]) -> None:
        if self._call is None:
            return  # cancelled before its turn
        func, args, kwargs = self._call
        self._call = self._awaiting = None
        try:
            if predecessor._exception is not None or predecessor.cancelled():
                self._inherit(predecessor)
                return
            value = func(predecessor.result(), *args, **kwargs)
        except (KeyboardInterrupt, SystemExit) as error:
            self._fail(error)
            raise
        except BaseException as error:
            self._fail_with(error)
        else:
            self._take(value)
        finally:
            # The traceback of an error holds this frame; it shall not hold the work.
            del self, predecessor

    def _take(self, value: Any) -> None:
        if isinstance(value, AsyncWork):
            self._follow(value)
        elif hasattr(type(value), "__await__"):  # inspect.isawaitable costs six times as much
            self._run(value)
        else:
            self._settle(value)

    def _settle(self, value: Any) -> None:
        """Complete, once the device has done what the function queued."""
        if not here.in_use():
            self._finish(value)
            return
        try:
            event = here.mark()
            over = event.query()
        except DeviceError as error:
            self._fail_with(error)
            return
        if over:
            self._finish(value)
        else:
            device = poller_of(self._loop).watch(event, keep=value)
            device.add_done_callback(partial(self._settled, value))

    def _settled(self, value: Any, device: asyncio.Future[None]) -> None:
        if (error := device.exception()) is not None:
            self._fail_with(error)
        else:
            self._finish(value)

    # --- its function returned something to await ---

    def _run(self, awaitable: Awaitable[Any]) -> None:
        coroutine = awaitable if asyncio.iscoroutine(awaitable) else _wait_for(awaitable)
        if self.done():  # it cancelled itself
            coroutine.close()
            return
        task = self._loop.create_task(coroutine)
        _tasks.add(task)
        task.add_done_callback(self._ran)
        if self.done():  # the same, within an eager task
            task.cancel()
        else:
            self._task = task

    def _ran(self, task: asyncio.Task[Any]) -> None:
        _tasks.discard(task)
        self._task = None
        if task.cancelled():
            self._cancel_self(getattr(task, "_cancel_message", None))
        elif (error := task.exception()) is not None:
            self._fail_with(error)
        elif isinstance(value := task.result(), AsyncWork):
            self._follow(value)
        else:
            self._settle(value)

    # --- its function returned a work ---

    def _follow(self, root: AsyncWork[Any]) -> None:
        if self.done():
            return
        if root._loop is not self._loop:
            self._fail(WrongLoopError(f"{self!r} returned {root!r}, which is of another loop"))
        elif (last := self._last_of(root)) is None:
            self._fail(
                UsageError(
                    f"{self!r} returned {root!r}, whose chain waits for the former: they would "
                    "wait for each other for ever; return a result instead"
                )
            )
        else:
            self._root, self._awaiting = root, last
            last.add_done_callback(self._followed)

    def _last_of(self, root: AsyncWork[Any]) -> AsyncWork[Any] | None:
        """The last work of the chain; None when it cannot complete before this work has."""
        last = root
        while last is not self and (following := last._next) is not None:
            last = following
        waited_for: AsyncWork[Any] | None = last
        while waited_for is not None:
            if waited_for is self:
                return None
            waited_for = waited_for._awaiting
        return last

    def _followed(self, last: AsyncWork[Any]) -> None:
        root = self._root
        if self.done() or root is None:
            return
        self._root = self._awaiting = None
        if root.get_last_work() is not last:  # the chain has grown
            self._follow(root)
        elif last._exception is not None or last.cancelled():
            self._inherit(last)
        else:
            try:
                self._finish(last.result())
            except asyncio.CancelledError as error:
                self._fail(error)

    # --- ends ---

    def _inherit(self, source: AsyncWork[Any]) -> None:
        """End as the source did."""
        error = source._exception
        if error is None:
            self._cancel_self(getattr(source, "_cancel_message", None))
            return
        if source._traceback is not None:
            error.__traceback__ = source._traceback
        self._fail(error, quiet=True)
        self._origin = source if source._origin is None else source._origin

    def _relieve(self) -> None:
        """The failure was retrieved here: nobody needs to report it."""
        if self._origin is not None:
            self._origin._log_traceback = False
            self._origin = None

    def _fail_with(self, error: BaseException) -> None:
        if self.done() and not isinstance(error, asyncio.CancelledError):
            self._loop.call_exception_handler(
                {
                    "message": f"the function of {self!r} failed after the work had been cancelled",
                    "exception": error,
                    "future": self,
                }
            )
        self._fail(error)

    def _cancel(self, msg: Any | None = None) -> bool:
        if self._task is not None:
            return self._task.cancel(msg)
        if self._root is not None and self._awaiting is not None and self._awaiting.cancel(msg):
            return True  # ends when that one has
        return self._cancel_self(msg)

    def _cancel_self(self, msg: Any | None) -> bool:
        awaited, alone = self._awaiting, self._falls_with_its_branch
        if awaited is not None:
            awaited.remove_done_callback(self._begin)
            awaited.remove_done_callback(self._followed)
        unbegun = self._call is not None
        self._call = self._root = self._awaiting = None
        cancelled = super()._cancel(msg)
        if awaited is not None and unbegun and self._claimed:
            awaited._unclaim()
        if awaited is not None and alone and not awaited._callbacks:
            awaited.cancel(msg)  # nobody else waits for it
        return cancelled

    @property
    def _falls_with_its_branch(self) -> bool:
        awaited = self._awaiting
        return self._call is not None and awaited is not None and awaited._falls_with_its_branch

    @property
    def _whereabouts(self) -> str:
        waited_for: AsyncWork[Any] = self
        while (behind := waited_for._awaiting) is not None:
            waited_for = behind
        return "" if waited_for is self else waited_for._whereabouts

    def _state_text(self) -> str:
        return f"{self._name} {super()._state_text()}"


async def _wait_for(awaitable: Awaitable[T]) -> T:
    return await awaitable


AsyncWork._branch = AsyncFuncWork
