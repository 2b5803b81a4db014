"""Channels for code without an event loop: the same calls, which block.

The handles of a process share one event loop in a thread of its own, which begins with the first
and ends with the last. What nobody let go of is let go of when the process ends, so that what was
put has left by then, if there is room soon. The loop's own thread calls in here too, from functions
of ``then``: what it reaches takes no lock that is held while somebody waits for the loop. May not
know how a channel works: every call is one of the handle behind it.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from anyio.from_thread import BlockingPortalProvider

from ..comm import CLOSE_GRACE
from ..errors import ChannelClosed, ClosedError, WrongLoopError
from ..loops import check_no_loop
from ..options import Options
from ..portal import loop_options, perform
from .handle import CONNECT_TIMEOUT, DEFAULT
from .handle import Channel as _AsyncChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from concurrent.futures import Future
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from ..handles import AsyncWork

log = logging.getLogger("aiocomm")

T = TypeVar("T")

INSTEAD = "use aiocomm.channel.Channel and await"


class Channel:
    """A named queue; see ``aiocomm.channel.Channel`` for what each call takes, does and raises.

    With ``async_op=False``, the default, a call blocks and returns the result. If it is not done
    after ``timeout`` seconds it is taken back and raises TimeoutError: then nothing was put or got.
    With ``async_op=True`` it returns the work at once. For any thread that runs no event loop.

    Made by ``create`` and ``connect``; let go of by ``leave`` or ``with``, at the latest when the
    process ends. Can be sent to another process, where its first call connects.

    Attributes:
        name: of the channel.
        namespace: of Ray, in which the name is known.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace
        self._lock = threading.Lock()  # while it connects, and while it is let go of
        self._channel: _AsyncChannel | None = None
        self._making: Future[_AsyncChannel] | None = None
        self._portal: BlockingPortal
        self._stack: contextlib.ExitStack
        self._process = 0
        self._left = False

    def __repr__(self) -> str:
        return f"<blocking {self._channel or _AsyncChannel(self.name, self.namespace)!r}>"

    def __reduce__(self) -> tuple[type[Channel], tuple[str, str]]:
        return Channel, (self.name, self.namespace)

    @classmethod
    def create(
        cls, name: str, maxsize: int = 0, max_bytes: int = 0, *, namespace: str | None = None
    ) -> Channel:
        """Create a channel, and connect to it; ends with this process, or when closed and empty.

        Takes and raises what ``aiocomm.channel.Channel.create`` does.

        Raises:
            WouldBlockError: this thread runs an event loop.
        """
        create = _AsyncChannel.create
        return cls._made(functools.partial(create, name, maxsize, max_bytes, namespace=namespace))

    @classmethod
    def connect(
        cls, name: str, *, namespace: str | None = None, timeout: float = CONNECT_TIMEOUT
    ) -> Channel:
        """Connect to a channel, waiting until it was created.

        Takes and raises what ``aiocomm.channel.Channel.connect`` does.

        Raises:
            WouldBlockError: this thread runs an event loop.
        """
        connect = _AsyncChannel.connect
        return cls._made(functools.partial(connect, name, namespace=namespace, timeout=timeout))

    # --- items ---

    @overload
    def put(
        self,
        item: object,
        weight: float = 0,
        key: str = DEFAULT,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None: ...
    @overload
    def put(
        self, item: object, weight: float = 0, key: str = DEFAULT, *, async_op: Literal[True]
    ) -> AsyncWork[None]: ...
    def put(
        self,
        item: object,
        weight: float = 0,
        key: str = DEFAULT,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> AsyncWork[None] | None:
        """Put an item into the channel, and wait until it is there.

        The time-out is for room: an item that has left by then is waited for all the same.
        """
        return self._do(lambda channel: channel.put(item, weight, key), async_op, timeout)

    def put_nowait(self, item: object, weight: float = 0, key: str = DEFAULT) -> None:
        """The same; ChannelFull where ``put`` would wait for room."""
        self._do(lambda channel: channel.put_nowait(item, weight, key))

    @overload
    def get(
        self,
        key: str = DEFAULT,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def get(self, key: str = DEFAULT, *, async_op: Literal[True]) -> AsyncWork[Any]: ...
    def get(
        self, key: str = DEFAULT, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Wait for the next item, and take it.

        The time-out includes the way to the channel and back: use ``get_nowait`` to ask just once.
        """
        return self._do(lambda channel: channel.get(key), async_op, timeout)

    def get_nowait(self, key: str = DEFAULT) -> Any:
        """The same; ChannelEmpty where ``get`` would wait for an item."""
        return self._do(lambda channel: channel.get_nowait(key))

    @overload
    def get_batch(
        self,
        batch_weight: float,
        key: str = DEFAULT,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[Any]: ...
    @overload
    def get_batch(
        self, batch_weight: float, key: str = DEFAULT, *, async_op: Literal[True]
    ) -> AsyncWork[list[Any]]: ...
    def get_batch(
        self,
        batch_weight: float,
        key: str = DEFAULT,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> AsyncWork[list[Any]] | list[Any]:
        """Wait for items whose weights reach ``batch_weight``, and take them."""
        return self._do(lambda channel: channel.get_batch(batch_weight, key), async_op, timeout)

    def __iter__(self) -> Iterator[Any]:
        """The items of the default key, until the channel is closed and empty."""
        while True:
            try:
                item = self.get()
            except ChannelClosed:
                return
            yield item

    # --- questions ---

    def qsize(self, key: str | None = None) -> int:
        """The number of items that nobody was given, under a key or in all."""
        return self._do(lambda channel: channel.qsize(key))

    def empty(self, key: str | None = None) -> bool:
        """Whether there is no item, under a key or at all."""
        return self._do(lambda channel: channel.empty(key))

    def full(self) -> bool:
        """Whether there is no room for one more item."""
        return self._do(lambda channel: channel.full())

    # --- ends ---

    def close(self) -> None:
        """Let nothing in any more, for whomever; what is there can still be got. Idempotent."""
        self._do(lambda channel: channel.close())

    def abort(self) -> None:
        """Close the channel and drop what is in it. Idempotent."""
        self._do(lambda channel: channel.abort())

    def leave(self) -> None:
        """Let go of this handle, as ``aclose`` of the other one; calls that wait fail. Idempotent.

        Waits until what was put is in the channel, however long there is no room. An interrupt
        ends the wait, and that of what was put if no other handle keeps the loop. The channel goes
        on, unless this handle created it: then it is closed.

        Raises:
            WouldBlockError: this thread runs an event loop.
        """
        check_no_loop(INSTEAD)
        self._leave(None)

    def __enter__(self) -> Self:
        if self._left:
            raise self._ended()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    # --- inside ---

    @classmethod
    def _made(cls, make: Callable[[], Coroutine[Any, Any, _AsyncChannel]]) -> Channel:
        channel = cls("", "")
        made = channel._open(make)
        channel.name, channel.namespace = made.name, made.namespace
        return channel

    def _open(
        self,
        make: Callable[[], Coroutine[Any, Any, _AsyncChannel]],
        timeout: float | None = None,
    ) -> _AsyncChannel:
        check_no_loop(INSTEAD)
        self._process = os.getpid()
        try:
            with contextlib.ExitStack() as stack:
                self._making = self._start(stack, make)
                made = self._channel = self._made_in(self._making, timeout)
                self._stack = stack.pop_all()
        except BaseException:
            self._process = 0
            raise
        finally:
            self._making = None
        atexit.register(self._end)
        return made

    def _start(
        self, stack: contextlib.ExitStack, make: Callable[[], Coroutine[Any, Any, _AsyncChannel]]
    ) -> Future[_AsyncChannel]:
        self._portal = stack.enter_context(_portals())
        try:
            return self._portal.start_task_soon(make)
        except RuntimeError:  # a function of ``then`` has ended the loop, with SystemExit say
            _portals.cache_clear()
            self._portal = stack.enter_context(_portals())
            return self._portal.start_task_soon(make)

    def _made_in(self, making: Future[_AsyncChannel], timeout: float | None) -> _AsyncChannel:
        if self._left:  # while it began
            making.cancel()
        try:
            return making.result(_limit(timeout))
        except concurrent.futures.CancelledError:
            raise self._ended() from None
        except TimeoutError:
            if making.cancel():
                raise TimeoutError(_LATE.format(self.name, timeout)) from None
            return making.result()
        except BaseException:
            making.cancel()  # where it was an interrupt
            raise

    def _leave(self, timeout: float | None) -> None:
        self._left = True  # calls are refused from here on, they do not wait for the rest
        if self._is_forked():  # the thread was never forked, and the lock perhaps while held
            return
        if (making := self._making) is not None:
            making.cancel()
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is None:
                return
            atexit.unregister(self._end)
            with self._stack:
                try:
                    leaving = self._portal.start_task_soon(channel.aclose)
                except RuntimeError:  # the loop has ended, and the channel's end here with it
                    return
                try:
                    leaving.result(timeout)
                except BaseException:
                    leaving.cancel()  # or whoever leaves last would wait for it
                    raise

    def _end(self) -> None:
        """Let go of it at the end of the process, which nobody may hold up for ever."""
        try:
            self._leave(max(CLOSE_GRACE, _last_moment() - time.monotonic()))
        except TimeoutError:
            log.warning("channel %r: what was put is dropped, it finds no room", self.name)

    def _is_forked(self) -> bool:
        return self._process not in (0, os.getpid())

    def _ended(self) -> ClosedError:
        return ClosedError(f"the handle of channel {self.name!r} was closed on this side")

    def _opened(self, timeout: float | None) -> _AsyncChannel:
        """The handle behind this one; the first call of one that was sent connects it."""
        if self._is_forked():
            raise WrongLoopError(
                f"the handle of channel {self.name!r} belongs to the process that this one was "
                "forked from: connect here"
            )
        if (channel := self._channel) is not None:
            return channel
        if self._left:
            raise self._ended()
        check_no_loop(INSTEAD)  # before the lock: see above
        if not self._lock.acquire(timeout=_limit(timeout)):
            raise TimeoutError(_LATE.format(self.name, timeout))
        try:
            if self._left:
                raise self._ended()
            if self._channel is not None:
                return self._channel
            connect = functools.partial(_AsyncChannel.connect, self.name)
            return self._open(functools.partial(connect, namespace=self.namespace), timeout)
        finally:
            self._lock.release()

    @overload
    def _do(self, begin: Callable[[_AsyncChannel], AsyncWork[T]]) -> T: ...
    @overload
    def _do(
        self,
        begin: Callable[[_AsyncChannel], AsyncWork[T]],
        async_op: bool,
        timeout: float | None,
    ) -> AsyncWork[T] | T: ...
    def _do(
        self,
        begin: Callable[[_AsyncChannel], AsyncWork[T]],
        async_op: bool = False,
        timeout: float | None = None,
    ) -> AsyncWork[T] | T:
        return perform(lambda: begin(self._opened(timeout)), async_op, timeout, instead=INSTEAD)


def _limit(timeout: float | None) -> float:
    return min(threading.TIMEOUT_MAX, threading.TIMEOUT_MAX if timeout is None else timeout)


_LATE = "channel {!r}: not connected within {} s"


@functools.cache
def _last_moment() -> float:
    """Of the process, which ends; counted from the first handle that it lets go of."""
    return time.monotonic() + Options().close_timeout


@functools.cache
def _portals() -> BlockingPortalProvider:
    """Of this process: a forked one has no thread of its parent's."""
    return BlockingPortalProvider(backend_options=loop_options())


os.register_at_fork(after_in_child=_portals.cache_clear)
