"""The messages of one group of a channel, both ways: the part in which client and server are alike.

There is no task: the next receive is posted when a message was dealt with, and a message that is
there already needs no turn of the loop. What goes out is not waited for, since the group keeps its
order and what its peer has not taken; that it failed shows in the receives, which end. Knows what a
message is, not what it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..entries import IllegalTransition
from ..errors import AiocommError, ProtocolError
from .messages import read, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..group import CollectiveGroup
    from ..handles import AsyncWork
    from .messages import Message


class Wire:
    """One end of it.

    Args:
        group: with the other end.
        take: called with each message that comes; what it raises ends the wire.
        over: called once, with why nothing more will come.
    """

    def __init__(
        self,
        group: CollectiveGroup,
        take: Callable[[Message], None],
        over: Callable[[Exception], None],
    ) -> None:
        self.group = group
        self._take = take
        self._over = over
        self._ended = False

    def listen(self) -> None:
        """Take what is there, and whatever comes later."""
        try:
            while not self._ended:
                work = self.group.recv()
                if not work.done():
                    work.add_done_callback(self._received)
                    return
                self._take_all(work)
        except (AiocommError, IllegalTransition) as error:
            self._end(error)

    def send(self, *messages: Message) -> None:
        """Send them together, as soon as the group can; without effect once the wire has ended."""
        if self._ended:
            return
        try:
            work = self.group.send([write(message) for message in messages])
        except AiocommError as error:
            self._end(error)
            return
        if work.done():
            _retrieve(work)
        else:
            work.add_done_callback(_retrieve)

    def stop(self) -> None:
        """Take and send nothing more; ``over`` is not called."""
        self._ended = True

    def _received(self, work: AsyncWork[Any]) -> None:
        if self._ended or work.cancelled():
            _retrieve(work)
            return
        try:
            self._take_all(work)
        except (AiocommError, IllegalTransition) as error:
            self._end(error)
        else:
            self.listen()

    def _take_all(self, work: AsyncWork[Any]) -> None:
        came = work.result()
        if type(came) is not list:
            raise ProtocolError(f"the other end of a channel sent a {type(came).__name__}")
        for each in came:
            if not self._ended:
                self._take(read(each))

    def _end(self, error: Exception) -> None:
        if not self._ended:
            self._ended = True
            self._over(error)


def _retrieve(work: AsyncWork[Any]) -> None:
    """Its failure is nobody's news."""
    if not work.cancelled():
        work.exception()
