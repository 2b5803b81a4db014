"""The order of the sending end: who may start, and when, within the window of the peer.

Also what the receiving end owes of that window (``Dues``). The counterpart of ``ordering.py``, and
as pure: events in, actions out, neither asyncio nor torch.

One row per outgoing message::

    state    event                                        next      action
    -------  -------------------------------------------  --------  ------------------------------
    QUEUED   its turn, credit left, nobody starting       STARTED   Start (takes its sequence)
    QUEUED   cancel                                       GONE
    QUEUED   close                                        GONE      returned by close()
    STARTED  finish                                       GONE
    STARTED  cancel                                       STARTED   none: finishes unseen
    STARTED  close                                        GONE      returned by close()

A message that could start and finish within its call takes no row: ``pass_through`` gives it its
sequence, and it never stands in the line.

An illegal event raises ``IllegalTransition`` and changes nothing. Rejected: credit for every
message (a frame each), and a message that waits for room that the peer may never announce.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from .entries import Credit, IllegalTransition, Outgoing, Start, State

if TYPE_CHECKING:
    from .entries import Incoming, RecvAction

# Python 3.11 takes 60 ns to find a member in its enum, and 5 to find a global.
NEW, QUEUED, STARTED, GONE = State.NEW, State.QUEUED, State.STARTED, State.GONE


class Dues:
    """What the receiving end owes the sender of its window; given back a quarter at a time.

    Args:
        messages: the whole window.
        nbytes: the same, in bytes.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._enough_messages, self._enough_bytes = quarter(messages), quarter(nbytes)
        self._messages = self._bytes = 0

    def add(self, message: Incoming, actions: list[RecvAction], *, deaf: bool) -> None:
        """A message left the window; there is a ``Credit`` more in the actions when it is time.

        Args:
            message: the one that left.
            actions: of the receiving end.
            deaf: nothing more may arrive, so nothing is given back.
        """
        message.credited = True
        self._messages += 1
        self._bytes += message.charge
        enough = self._messages >= self._enough_messages or self._bytes >= self._enough_bytes
        if enough and not deaf:
            actions.append(Credit(self._messages, self._bytes))
            self._messages = self._bytes = 0


def quarter(window: int) -> int:
    """How much of its window a receiver may have taken without saying so.

    Seldom enough to cost nothing, often enough that a busy sender never sees it empty.
    """
    return max(1, window // 4)


class SendOrder:
    """Order of the sending end: who may start, and when.

    Nothing starts before the peer granted credit (its window, in messages and bytes). A message
    larger than what is left waits while the peer owes an answer; when so little is out that it
    may never hear of it (see ``quarter``), it starts however large it is, so a window smaller
    than one message cannot stop the line.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[Outgoing, None] = OrderedDict()
        self._started: dict[int, Outgoing] = {}
        self._starting: Outgoing | None = None
        self._sequence = 0
        self._window_messages = self._window_bytes = 0
        self._messages = self._nbytes = 0  # of the window, what is left; bytes may be negative
        self.closed = False

    @property
    def pending(self) -> int:
        """Messages not finished yet."""
        return len(self._queue) + len(self._started)

    @property
    def queued(self) -> int:
        """Messages not started yet."""
        return len(self._queue)

    def started_with(self, sequence: int) -> Outgoing | None:
        """The unfinished message of that sequence number."""
        return self._started.get(sequence)

    def may_pass(self, charge: int) -> bool:
        """Whether ``pass_through`` would let a message leave."""
        return not (
            self._queue
            or self._messages <= 0
            or charge > self._nbytes
            or self._starting is not None
            or self.closed
        )

    def pass_through(self, charge: int) -> int | None:
        """A call of send whose message leaves at once: its sequence number.

        The same as ``submit`` and ``finish``, at a fifth of the cost.

        Returns:
            None, and nothing has happened, when it has to stand in the line.
        """
        if not self.may_pass(charge):
            return None
        sequence = self._sequence
        self._sequence = sequence + 1
        self._messages -= 1
        self._nbytes -= charge
        return sequence

    def submit(self, message: Outgoing) -> list[Start]:
        """A call of send: takes its place at the end of the line."""
        if self.closed or message.state is not NEW:
            raise IllegalTransition(f"submit of {message} (closed: {self.closed})")
        message.state = QUEUED
        self._queue[message] = None
        return self._advance()

    def grant(self, messages: int, nbytes: int, *, first: bool = False) -> list[Start]:
        """Credit from the peer: its whole window (first), or what it has taken since."""
        if first:
            if self._window_messages or messages < 1:
                raise IllegalTransition(f"a window of {messages}, after {self._window_messages}")
            self._window_messages, self._window_bytes = messages, nbytes
        elif (
            messages > self._window_messages - self._messages
            or nbytes > self._window_bytes - self._nbytes
        ):
            raise IllegalTransition(f"credit for {messages}, {nbytes} bytes: more than was sent")
        self._messages += messages
        self._nbytes += nbytes
        return self._advance()

    def started(self, message: Outgoing) -> list[Start]:
        """A slow start is over; the next in line may start."""
        if self._starting is not message:
            raise IllegalTransition(f"{message} was not starting")
        self._starting = None
        return self._advance()

    def finish(self, message: Outgoing) -> list[Start]:
        """The message has left; its buffer is free. Nobody waits for that, so nobody starts."""
        if message.state is not STARTED:
            raise IllegalTransition(f"finish of {message}")
        message.state = GONE
        del self._started[message.sequence]
        return []

    def cancel(self, message: Outgoing) -> tuple[bool, list[Start]]:
        """Take back a message that has not started.

        Returns:
            Whether it was taken back, and what starts in its stead.
        """
        if message.state is not QUEUED:
            return False, []
        message.state = GONE
        del self._queue[message]
        return True, self._advance()

    def close(self) -> list[Outgoing]:
        """The direction is over. Returns every unfinished message, in order."""
        self.closed = True
        self._starting = None
        left = [*self._started.values(), *self._queue]
        self._started.clear()
        self._queue.clear()
        for message in left:
            message.state = GONE
        return left

    def _advance(self) -> list[Start]:
        actions: list[Start] = []
        queue = self._queue
        while queue and self._messages > 0 and self._starting is None:
            message = next(iter(queue))
            if message.charge > self._nbytes and self._owed():
                break
            del queue[message]
            message.state = STARTED
            message.sequence = self._sequence
            self._sequence += 1
            self._messages -= 1
            self._nbytes -= message.charge
            self._started[message.sequence] = message
            if message.slow:
                self._starting = message
            actions.append(Start(message))
        return actions

    def _owed(self) -> bool:
        """Whether credit is sure to come without another message being sent."""
        return self._window_messages - self._messages >= quarter(
            self._window_messages
        ) or self._window_bytes - self._nbytes >= quarter(self._window_bytes)
