"""A channel at work: what clients say becomes events of the queue, and its actions what they hear.

One group for each client; knows neither Ray nor what an item is. Nothing here waits: a message is
dealt with when it comes and the answers are given to the groups, which keep them until their
clients can take them, so a slow consumer holds up nobody. What lies in such a group is what its
client has asked for, and counts as held by the queue. A thousand waiting gets are entries of the
queue, not tasks.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import AiocommError, ProtocolError
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
    read,
    write,
)
from .queue import Accept, Deliver, Grant, IllegalTransition, Queue, Refuse
from .queue import Ask as QueuedAsk
from .queue import Want as QueuedWant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..group import CollectiveGroup
    from ..handles import AsyncWork
    from .messages import FromServer
    from .queue import Action

log = logging.getLogger("aiocomm")


@dataclass(slots=True, eq=False)
class _Member:
    """One client: its group, and what it is called in the log."""

    group: CollectiveGroup
    name: str

    def __str__(self) -> str:
        return self.name


class ChannelServer:
    """The items of one channel, and its clients.

    Args:
        name: of the channel.
        maxsize: items that it may hold, 0 without bound.
        max_bytes: the same in bytes.
    """

    def __init__(self, name: str, maxsize: int = 0, max_bytes: int = 0) -> None:
        self.name = name
        self.queue = Queue(maxsize, max_bytes)
        self.ended = asyncio.Event()  # closed, and nothing is left
        self._members: set[_Member] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def join(self, group: CollectiveGroup) -> None:
        """A client has come: listen to it until it goes."""
        member = _Member(group, str(group.peer))
        self._members.add(member)
        self._listen(member)

    async def aclose(self) -> None:
        """Close the groups of all clients, which tells them that the channel is gone.

        Cancellation: the closing goes on in the background.
        """
        self.ended.set()
        members, self._members = self._members, set()
        await asyncio.gather(*(member.group.aclose() for member in members), *self._leaving)

    # --- listening ---

    def _listen(self, member: _Member) -> None:
        try:
            while member in self._members:
                work = member.group.recv()
                if not work.done():
                    work.add_done_callback(partial(self._received, member))
                    return
                self._take(member, work)
        except (AiocommError, IllegalTransition) as error:
            self._leave(member, error)

    def _received(self, member: _Member, work: AsyncWork[Any]) -> None:
        try:
            self._take(member, work)
        except (AiocommError, IllegalTransition) as error:
            self._leave(member, error)
        else:
            self._listen(member)

    def _take(self, member: _Member, work: AsyncWork[Any]) -> None:
        if member not in self._members:
            if not work.cancelled():
                work.exception()
            return
        message = read(work.result())
        queue = self.queue
        if isinstance(message, Put):
            self._put(member, message)
        elif isinstance(message, Get):
            number, key, target, nowait = message
            self._perform(queue.get(QueuedWant(member, number, key, target, nowait)))
        elif isinstance(message, Taken):
            for number in message.numbers:
                self._perform(queue.taken(member, number))
        elif isinstance(message, Ask):
            self._perform(queue.ask(QueuedAsk(member, *message)))
        elif isinstance(message, Cancel):
            self._perform(queue.cancel(member, message.number))
        elif isinstance(message, Withdraw):
            self._perform(queue.withdraw(member, message.number))
        elif isinstance(message, Look):
            count = queue.qsize(message.key)
            self._say(member, Seen(message.number, count, queue.full))
        elif isinstance(message, Close):
            actions = queue.abort() if message.drop else queue.close()
            self._say(member, Done(message.number))
            self._perform(actions)
        else:
            raise ProtocolError(f"a client does not say {type(message).__name__}")

    def _put(self, member: _Member, message: Put) -> None:
        number, key, weight, packet = message
        nbytes = packet.nbytes
        if not self.queue.bounded:
            actions = self.queue.ask(QueuedAsk(member, number, key, nbytes, weight))
            actions = [action for action in actions if type(action) is not Grant]
            if actions:  # closed
                self._perform(actions)
                return
        elif not self.queue.closed and self.queue.granted_bytes(member, number) != nbytes:
            raise ProtocolError(f"item {number} has {nbytes} bytes, and room was asked for others")
        self._perform(self.queue.put(member, number, packet))

    # --- answering ---

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                want = action.want
                self._say(want.client, Items(want.number, [each.payload for each in want.held]))
            elif isinstance(action, Accept):
                self._say(action.ask.client, Done(action.ask.number))
            elif isinstance(action, Grant):
                self._say(action.ask.client, Granted(action.ask.number))
            elif isinstance(action, Refuse):
                refused = action.refused
                self._say(refused.client, Refused(refused.number, int(action.reason)))
            else:
                self.ended.set()

    def _say(self, member: Any, message: FromServer) -> None:
        try:
            work = member.group.send(write(message))
        except AiocommError as error:  # its group is over, and its receive is about to say so
            log.debug("channel %s: %s was not told: %s", self.name, member, error)
            return
        if not work.done():
            work.add_done_callback(_retrieve)
        elif not work.cancelled():
            work.exception()

    def _leave(self, member: _Member, error: Exception) -> None:
        """A client is gone, or broke the protocol: it keeps nothing."""
        if member not in self._members:
            return
        log.debug("channel %s: client %s has left: %s", self.name, member, error)
        self._members.discard(member)
        task = asyncio.get_running_loop().create_task(member.group.abort())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._perform(self.queue.leave(member))


def _retrieve(work: AsyncWork[None]) -> None:
    if not work.cancelled():
        work.exception()
