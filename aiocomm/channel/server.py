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
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from .entries import Accept, Deliver, Grant, Refuse
from .entries import Ask as QueuedAsk
from .entries import Want as QueuedWant
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
)
from .queue import Queue
from .wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..group import CollectiveGroup
    from .entries import Action
    from .messages import Message

log = logging.getLogger("aiocomm")


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
        self._members: set[Wire] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def join(self, group: CollectiveGroup) -> None:
        """A client has come: listen to it until it goes."""
        member = Wire(
            group,
            lambda message: self._take(member, message),
            lambda error: self._leave(member, error),
        )
        self._members.add(member)
        member.listen()

    async def aclose(self) -> None:
        """Close the groups of all clients, which tells them that the channel is gone.

        Cancellation: the closing goes on in the background.
        """
        self.ended.set()
        members, self._members = self._members, set()
        for member in members:
            member.stop()
        await asyncio.gather(*(member.group.aclose() for member in members), *self._leaving)

    # --- listening ---

    def _take(self, member: Wire, message: Message) -> None:
        queue = self.queue
        if isinstance(message, Put):
            self._put(member, message)
        elif isinstance(message, Get):
            number, key, target, nowait = message
            self._perform(queue.get(QueuedWant(member, number, key, target, nowait)))
        elif isinstance(message, Taken):
            for number in message.numbers:
                self._perform(queue.taken(member, number))
        elif isinstance(message, Spoiled):
            self._perform(queue.spoiled(member, message.number, message.place))
        elif isinstance(message, Ask):
            self._perform(queue.ask(QueuedAsk(member, *message)))
        elif isinstance(message, Cancel):
            self._perform(queue.cancel(member, message.number))
        elif isinstance(message, Withdraw):
            self._perform(queue.withdraw(member, message.number))
        elif isinstance(message, Look):
            count = queue.qsize(message.key)
            member.send(Seen(message.number, count, queue.full))
        elif isinstance(message, Close):
            actions = queue.abort() if message.drop else queue.close()
            member.send(Done(message.number))
            self._perform(actions)
        else:
            raise ProtocolError(f"a client does not say {type(message).__name__}")

    def _put(self, member: Wire, message: Put) -> None:
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
                want.client.send(Items(want.number, [each.payload for each in want.held]))
            elif isinstance(action, Accept):
                action.ask.client.send(Done(action.ask.number))
            elif isinstance(action, Grant):
                action.ask.client.send(Granted(action.ask.number))
            elif isinstance(action, Refuse):
                refused = action.refused
                refused.client.send(Refused(refused.number, int(action.reason)))
            else:
                self.ended.set()

    def _leave(self, member: Wire, error: Exception) -> None:
        """A client is gone, or broke the protocol: it keeps nothing."""
        log.debug("channel %s: client %s has left: %s", self.name, member.group.peer, error)
        self._members.discard(member)
        task = asyncio.get_running_loop().create_task(member.group.abort())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._perform(self.queue.leave(member))
