"""Channels for code without an event loop: the same calls, which block.

Every call is one of the handle behind it, of which ``threaded.py`` takes care.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from ..errors import ChannelClosed
from ..loops import check_no_loop
from ..portal import perform
from .handle import CONNECT_TIMEOUT, DEFAULT
from .handle import Channel as _AsyncChannel
from .threaded import INSTEAD, ThreadedHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import TracebackType

    from ..handles import AsyncWork

T = TypeVar("T")


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
        connect = partial(_AsyncChannel.connect, name, namespace=namespace)
        self._behind = ThreadedHandle(name, connect)

    def __repr__(self) -> str:
        return f"<blocking {self._behind!r}>"

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
        return cls._made(name, partial(create, name, maxsize, max_bytes, namespace=namespace))

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
        return cls._made(name, partial(connect, name, namespace=namespace, timeout=timeout))

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
        self._behind.leave()

    def __enter__(self) -> Self:
        self._behind.check()
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
    def _made(cls, name: str, make: Callable[[], Coroutine[Any, Any, _AsyncChannel]]) -> Channel:
        behind = ThreadedHandle(name, make)
        made = behind.get()
        channel = cls(made.name, made.namespace)
        channel._behind = behind
        return channel

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
        return perform(lambda: begin(self._behind.get(timeout)), async_op, timeout, instead=INSTEAD)
