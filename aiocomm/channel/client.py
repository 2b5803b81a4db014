"""One process' end of a channel: calls become messages, and answers complete their works.

Knows the group with the server, and neither Ray nor how the two were brought together: until the
group is there the calls wait in line. Everything here runs on one loop; calls from threads without
a loop come in by the door of a ``Runtime``. No task: the next receive is posted when a message was
dealt with, and a message that is there already needs no turn of the loop. What goes out is not
waited for, since the group keeps its order, and its failure shows in the receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from asyncio import _get_running_loop
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import (
    AiocommError,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelLostError,
    ClosedError,
    PayloadError,
    PeerClosedError,
    PeerLostError,
    ProtocolError,
    UsageError,
)
from ..options import Options
from ..runtime import Runtime
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
    Taken,
    Withdraw,
    as_packet,
    pack_item,
    read,
    size_of,
    unpack_item,
    write,
)
from .queue import Reason
from .works import CallWork, GetWork, PutWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..group import CollectiveGroup
    from ..handles import AsyncWork
    from ..payload import Packed
    from .messages import FromClient


class ChannelClient:
    """What a channel's handle does its work with, in one event loop.

    Args:
        name: of the channel, in error texts.
        loop: the running loop it belongs to.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._loop = loop
        self._runtime = Runtime(loop, Options(), f"channel {name!r}")
        self._group: CollectiveGroup | None = None
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
        state = "connecting" if self._group is None else "connected"
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
        _check_key(key)
        weight = _check_weight("weight", weight)
        packed = pack_item(item)
        self._check_size(packed)
        work = PutWork(loop=self._loop)
        work._client, work._packed, work._key, work._weight = self, packed, key, weight
        self._enter(partial(self._put, work, nowait), work)
        return work

    def get(self, key: str, target: float | None = None, *, nowait: bool = False) -> GetWork:
        """See ``Channel.get`` and ``get_batch``, which brings a target."""
        _check_key(key)
        if target is not None:
            target = _check_weight("batch_weight", target)
            if not target:
                raise UsageError("batch_weight is 0: give the weight that a batch is to reach")
        work = GetWork(loop=self._loop)
        work._client, work._batch = self, target is not None
        self._enter(partial(self._get, work, key, target, nowait), work)
        return work

    def look(self, key: str | None) -> AsyncWork[Seen]:
        """How many items are queued, and whether there is room."""
        if key is not None:
            _check_key(key)
        work = CallWork(loop=self._loop)
        self._enter(partial(self._call, work, lambda number: Look(number, key)), work)
        return work

    def close(self, *, drop: bool) -> AsyncWork[None]:
        """See ``Channel.close`` and ``abort``."""
        work = CallWork(loop=self._loop)
        self._enter(partial(self._call, work, lambda number: Close(number, drop)), work)
        return work

    # --- the group comes and goes ---

    def joined(self, group: CollectiveGroup, maxsize: int, max_bytes: int) -> None:
        """The group with the server, and the bounds of the channel; on the loop."""
        if self._error is not None:
            return
        self._group = group
        self._bounded = bool(maxsize or max_bytes)
        self._max_bytes = max_bytes
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        self._listen()

    def fail(self, error: AiocommError) -> None:
        """The channel cannot be used from here any more: every pending work fails; on the loop."""
        if self._error is not None:
            return
        self._error = error
        waiting, self._waiting = self._waiting, []
        for call in waiting:  # they see the error
            call()
        closed = isinstance(error, ChannelClosed)
        works: list[AsyncWork[Any]] = [*self._puts.values(), *self._gets.values()]
        works += self._calls.values()
        self._puts.clear()
        self._gets.clear()
        self._calls.clear()
        for work in works:
            if closed and isinstance(work, CallWork):
                work._finish(Seen(0, 0, False))
            else:
                work._fail(_again(error), quiet=isinstance(error, ClosedError))
        self._note_idle()

    async def leave(self) -> None:
        """Wait until what was put is in the channel, and let go of it. Idempotent.

        Cancellation: the rest is dropped.
        """
        try:
            while self._puts and self._error is None:
                self._idle = asyncio.Event()
                await self._idle.wait()
        finally:
            self._send_taken()
            self.fail(ClosedError(f"the handle of channel {self.name!r} was closed on this side"))
            self._runtime.close()
        if self._group is not None:
            await self._group.aclose()

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
            if self._group is None and self._error is None:
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
            work._fail(_again(self._error))
        return self._error is not None

    def _send(self, message: FromClient) -> None:
        if self._group is None or self._error is not None:
            return
        if self._taken and not isinstance(message, Taken):
            self._send_taken()  # the answer may depend on it
        try:
            work = self._group.send(write(message))
        except AiocommError as error:
            self._over(error)
            return
        if not work.done():
            work.add_done_callback(_retrieve)
        elif not work.cancelled():
            work.exception()

    def _send_taken(self) -> None:
        if self._taken:
            taken, self._taken = self._taken, []
            self._send(Taken(taken))

    def _listen(self) -> None:
        assert self._group is not None
        try:
            while self._error is None:
                work = self._group.recv()
                if not work.done():
                    work.add_done_callback(self._received)
                    return
                self._take(work)
        except AiocommError as error:
            self._over(error)

    def _received(self, work: AsyncWork[Any]) -> None:
        try:
            self._take(work)
        except AiocommError as error:
            self._over(error)
        else:
            self._listen()

    def _take(self, work: AsyncWork[Any]) -> None:
        if work.cancelled():
            return
        message = read(work.result())
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
        try:
            items = [unpack_item(packet) for packet in message.packets]
        except AiocommError as error:  # nobody else could rebuild it either: it is not put back
            self.taken(message.number)
            work._fail(error)
            return
        work._owes = True
        work._delivered = message.number
        work.set_result(items if work._batch else items[0])

    def _refused(self, message: Refused) -> None:
        number = message.number
        work = self._puts.pop(number, None) or self._gets.pop(number, None)
        if work is not None:
            work._fail(_refusal(self.name, message.reason))
        self._note_idle()

    def _note_idle(self) -> None:
        if self._idle is not None and not self._puts:
            self._idle.set()

    def _over(self, error: AiocommError) -> None:
        """The group has ended, or broke."""
        if isinstance(error, PeerClosedError):
            self.fail(ChannelClosed(_CLOSED.format(self.name)))
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


_CLOSED = "channel {!r} is closed: create a new one"


def _refusal(name: str, reason: int) -> AiocommError:
    if reason == Reason.FULL:
        return ChannelFull(f"channel {name!r} is full: put() waits for room")
    if reason == Reason.EMPTY:
        return ChannelEmpty(f"channel {name!r} has no such item: get() waits for one")
    if reason == Reason.STUCK:
        return ChannelFull(
            f"channel {name!r} is full, and what it holds does not weigh enough for the batch: "
            "ask for less, or create it with more room"
        )
    return ChannelClosed(_CLOSED.format(name))


def _again(error: AiocommError) -> AiocommError:
    """A new one each time: one exception would collect the frames, and what they hold, of all."""
    again = type(error)(error.message)
    again.__cause__ = error.__cause__
    return again


def _retrieve(work: AsyncWork[None]) -> None:
    """The failure of a message shows in the receives: it is nobody's news."""
    if not work.cancelled():
        work.exception()


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise UsageError(f"key {key!r} is {type(key).__name__}: give a string")


def _check_weight(what: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UsageError(f"{what} {weight!r} is {type(weight).__name__}: give a number")
    if not (weight >= 0 and math.isfinite(weight)):
        raise UsageError(f"{what} {weight!r} is not usable: give 0 or more")
    return weight if type(weight) in (int, float) else float(weight)
