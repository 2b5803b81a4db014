"""One process' end of a channel: calls become messages, and answers complete their works.

Knows the group with the server, and neither Ray nor how the two were brought together: until the
group is there the calls wait in line. Everything here runs on one loop; calls from threads without
a loop come in by the door of a ``Runtime``.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import _get_running_loop
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import (
    AiocommError,
    ChannelClosed,
    ChannelError,
    ChannelLostError,
    ClosedError,
    PayloadError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
)
from ..options import Options
from ..runtime import Runtime
from .checks import check_key, check_target, check_weight, closed, left, refusal
from .messages import (
    Ask,
    Cancel,
    Close,
    Done,
    Get,
    Granted,
    Items,
    Look,
    Put,
    Refused,
    Seen,
    Spoiled,
    Taken,
    Withdraw,
    as_packet,
    pack_item,
    size_of,
    unpack_item,
)
from .wire import Wire
from .works import CallWork, GetWork, PutWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..group import CollectiveGroup
    from ..handles import AsyncWork
    from ..payload import Packed
    from .messages import FromClient, Message

NEEDS_LOOP = (
    "connect it in an event loop that lives as long as the channel is used; code without one has "
    "aiocomm.channel.blocking.Channel.connect(name), whose calls block"
)
"""How to use a channel where no loop runs, in error texts."""


class ChannelClient:
    """What a channel's handle does its work with, in one event loop.

    Args:
        name: of the channel, in error texts.
        loop: the running loop it belongs to.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._loop = loop
        self._runtime = Runtime(loop, Options(), f"channel {name!r}", NEEDS_LOOP)
        self._wire: Wire | None = None
        self._bounded = False
        self._max_bytes = 0
        self._error: AiocommError | None = None  # why no call can be made any more
        self._waiting: list[Callable[[], None]] = []  # calls made before the group was there
        self._numbers = 0
        self._puts: dict[int, PutWork] = {}
        self._gets: dict[int, GetWork] = {}
        self._calls: dict[int, CallWork] = {}
        self._taken: list[int] = []
        self._idle: asyncio.Event | None = None  # somebody waits until no put is pending

    def __repr__(self) -> str:
        state = "connecting" if self._wire is None else "connected"
        if self._error is not None:
            state = "over"
        return (
            f"<ChannelClient {self.name!r} {state}: {len(self._puts)} puts and "
            f"{len(self._gets)} gets pending>"
        )

    @property
    def pending(self) -> bool:
        """Whether a call waits for the group to be there."""
        return bool(self._waiting)

    # --- calls ---

    def put(self, item: object, weight: float, key: str, *, nowait: bool = False) -> PutWork:
        """See ``Channel.put``."""
        key, weight = check_key(key), check_weight("weight", weight)
        packed = pack_item(item)
        self._check_size(packed)
        work = PutWork(loop=self._loop)
        work._client, work._packed, work._key, work._weight = self, packed, key, weight
        self._enter(partial(self._put, work, nowait), work)
        return work

    def get(self, key: str, *, nowait: bool = False) -> GetWork:
        """See ``Channel.get``."""
        return self._want(check_key(key), None, nowait)

    def get_batch(self, key: str, target: float) -> GetWork:
        """See ``Channel.get_batch``."""
        return self._want(check_key(key), check_target(target), False)

    def _want(self, key: str, target: float | None, nowait: bool) -> GetWork:
        work = GetWork(loop=self._loop)
        work._client, work._key, work._batch = self, key, target is not None
        self._enter(partial(self._get, work, key, target, nowait), work)
        return work

    def look(self, key: str | None) -> AsyncWork[Seen]:
        """How many items are queued, and whether there is room."""
        if key is not None:
            key = check_key(key)
        work = CallWork(loop=self._loop)
        work._client = self
        self._enter(partial(self._call, work, lambda number: Look(number, key)), work)
        return work

    def close(self, *, drop: bool) -> AsyncWork[None]:
        """See ``Channel.close`` and ``abort``."""
        work = CallWork(loop=self._loop)
        work._client = self
        self._enter(partial(self._call, work, lambda number: Close(number, drop)), work)
        return work

    # --- the group comes and goes ---

    def joined(self, group: CollectiveGroup, maxsize: int, max_bytes: int) -> None:
        """The group with the server, and the bounds of the channel; on the loop."""
        if self._error is not None:
            return
        self._wire = Wire(group, self._take, self._over)
        self._bounded = bool(maxsize or max_bytes)
        self._max_bytes = max_bytes
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        self._wire.listen()

    def fail(self, error: AiocommError) -> None:
        """The channel cannot be used from here any more: every pending work fails; on the loop."""
        if self._error is not None:
            return
        self._error = error
        if self._wire is not None:
            self._wire.stop()
        waiting, self._waiting = self._waiting, []
        for call in waiting:  # they see the error
            call()
        ended = isinstance(error, ChannelClosed)
        works: list[AsyncWork[Any]] = [*self._puts.values(), *self._gets.values()]
        works += self._calls.values()
        self._puts.clear()
        self._gets.clear()
        self._calls.clear()
        for work in works:
            if ended and isinstance(work, CallWork):
                work._finish(Seen(0, 0, False))
            else:
                work._fail(error.again(), quiet=isinstance(error, ClosedError))
        self._note_idle()

    def end_gets(self) -> None:
        """What waits for items here is over, quietly: this side leaves; on the loop."""
        gets, self._gets = self._gets, {}
        for get in gets.values():
            self._send(Cancel(get._number))
            get._fail(left(self.name), quiet=True)

    async def leave(self) -> None:
        """Wait until what was put is in the channel, and let go of it. Idempotent.

        Cancellation: the rest is dropped.
        """
        self._runtime.refuse(left(self.name))  # or who goes on putting would be waited for
        self.end_gets()
        gone = self._error is not None  # and nothing can leave any more
        try:
            while self._puts and self._error is None:
                self._idle = asyncio.Event()
                await self._idle.wait()
        finally:
            self._send_taken()
            self.fail(left(self.name))
            self._runtime.close()
        if self._wire is not None:
            group = self._wire.group
            await (group.abort() if gone else group.aclose())

    def check_loop(self) -> None:
        """WrongLoopError in another event loop than that of the handle."""
        self._runtime.check_loop()

    # --- what works say, on the loop ---

    def put_cancelled(self, work: PutWork) -> None:
        """Take it back, where it has not left."""
        packed, work._packed = work._packed, None
        if packed is not None and self._puts.pop(work._number, None) is not None:
            self._send(Withdraw(work._number))
            self._note_idle()

    def get_cancelled(self, work: GetWork) -> None:
        """Do not wait for it any more."""
        if self._gets.pop(work._number, None) is not None:
            self._send(Cancel(work._number))

    def taken(self, number: int) -> None:
        """What a get was given has been taken; said once for all of this turn of the loop.

        Called in whatever thread asks for the result.
        """
        if _get_running_loop() is not self._loop:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the channel
                self._loop.call_soon_threadsafe(self.taken, number)
            return
        if not self._taken:
            self._loop.call_soon(self._send_taken)
        self._taken.append(number)

    def give_back(self, number: int) -> None:
        """What a get was given goes back."""
        self._send(Cancel(number))

    def forgotten(self, number: int) -> None:
        """The same for a work that nobody holds; called in whatever thread dropped it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the channel
            self._loop.call_soon_threadsafe(self.give_back, number)

    # --- inside ---

    def _enter(self, call: Callable[[], None], work: AsyncWork[Any]) -> None:
        def entry() -> None:
            if self._wire is None and self._error is None:
                self._waiting.append(call)
            else:
                call()

        self._runtime.enter(entry, work._fail)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _check_size(self, packed: Packed) -> None:
        if self._max_bytes and (size := size_of(packed)) > self._max_bytes:
            raise PayloadError(
                f"the item takes {size} bytes and channel {self.name!r} holds {self._max_bytes}: "
                "put it in parts, or create the channel with more max_bytes"
            )

    def _put(self, work: PutWork, nowait: bool) -> None:
        packed = work._packed
        if packed is None or self._refuse(work):
            return
        try:
            self._check_size(packed)  # the bounds may not have been known at the call
        except PayloadError as error:
            work._fail(error)
            return
        work._number = self._number()
        self._puts[work._number] = work
        if self._bounded:
            size = size_of(packed)
            self._send(Ask(work._number, work._key, size, work._weight, nowait))
        else:
            self._send_item(work)

    def _send_item(self, work: PutWork) -> None:
        packed, work._packed = work._packed, None
        assert packed is not None
        self._send(Put(work._number, work._key, work._weight, as_packet(packed)))

    def _get(self, work: GetWork, key: str, target: float | None, nowait: bool) -> None:
        if work.done() or self._refuse(work):
            return
        work._number = self._number()
        self._gets[work._number] = work
        self._send(Get(work._number, key, target, nowait))

    def _call(self, work: CallWork, message: Callable[[int], Look | Close]) -> None:
        number = self._number()
        asked = message(number)
        if isinstance(self._error, ChannelClosed):
            work._finish(Seen(0, 0, False))  # nothing is there, and it is closed
        elif not self._refuse(work):
            self._calls[number] = work
            self._send(asked)

    def _refuse(self, work: AsyncWork[Any]) -> bool:
        if self._error is not None:
            work._fail(self._error.again())
        return self._error is not None

    def _send(self, message: FromClient) -> None:
        """Send it, behind the word of what was taken: the answer may depend on that."""
        if self._wire is None:
            return
        if self._taken:
            taken, self._taken = self._taken, []
            self._wire.send(Taken(taken), message)
        else:
            self._wire.send(message)

    def _send_taken(self) -> None:
        if self._taken and self._wire is not None:
            taken, self._taken = self._taken, []
            self._wire.send(Taken(taken))

    def _take(self, message: Message) -> None:
        if isinstance(message, Items):
            self._deliver(message)
        elif isinstance(message, Done):
            self._done(message.number)
        elif isinstance(message, Granted):
            if (put := self._puts.get(message.number)) is not None:
                self._send_item(put)
        elif isinstance(message, Refused):
            self._refused(message)
        elif isinstance(message, Seen):
            if (call := self._calls.pop(message.number, None)) is not None:
                call._finish(message)
        else:
            raise ProtocolError(f"a server does not say {type(message).__name__}")

    def _done(self, number: int) -> None:
        if (put := self._puts.pop(number, None)) is not None:
            put._finish(None)
            self._note_idle()
        elif (call := self._calls.pop(number, None)) is not None:
            call._finish(None)

    def _deliver(self, message: Items) -> None:
        work = self._gets.pop(message.number, None)
        if work is None:
            return  # cancelled, and the server has been told
        items: list[Any] = []
        try:
            for packet in message.packets:
                items.append(unpack_item(packet))  # noqa: PERF401  (how many were rebuilt counts)
        except AiocommError as error:  # nobody else could rebuild it either: it is not put back
            self._send(Spoiled(message.number, len(items)))
            work._fail(error)
            return
        work._owes = True
        work._delivered = message.number
        work.set_result(items if work._batch else items[0])

    def _refused(self, message: Refused) -> None:
        number = message.number
        work = self._puts.pop(number, None) or self._gets.pop(number, None)
        if work is not None:
            work._fail(refusal(self.name, message.reason))
        self._note_idle()

    def _note_idle(self) -> None:
        if self._idle is not None and not self._puts:
            self._idle.set()

    def _over(self, error: Exception) -> None:
        """The group has ended, or broke."""
        if isinstance(error, PeerClosedError):
            self.fail(closed(self.name))
        elif isinstance(error, PeerLostError):
            lost = ChannelLostError(
                f"the actor of channel {self.name!r} is gone, and the items that nobody had taken "
                "with it: create the channel again"
            )
            lost.__cause__ = error
            self.fail(lost)
        else:
            failed = ChannelError(f"channel {self.name!r} broke: {error}")
            failed.__cause__ = error
            self.fail(failed)
