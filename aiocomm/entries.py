"""What stands in the queues of ``ordering.py``, and what it tells its shell to do.

Plain slotted records, one or two per message, so they are not frozen: making a frozen one costs
three times as much. They know nothing of asyncio, torch or sockets; ``owner`` is the shell's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    """Where a message or a post stands."""

    NEW = "new"
    QUEUED = "queued"
    STARTED = "started"
    ARRIVED = "arrived"
    MOVING = "moving"  # from the peer
    COPYING = "copying"  # into a post's buffer
    LEAVING = "leaving"  # a post's buffer
    READY = "ready"
    TAKEN = "taken"
    DROPPED = "dropped"  # but still on the move
    GONE = "gone"


class IllegalTransition(Exception):
    """An event that the state does not allow: a bug in the shell, never the user's fault."""


# --- entries: what stands in the queues. Mutable and slotted: one is made per message. ---


@dataclass(slots=True, eq=False)
class Outgoing:
    """One message to send. ``charge``: bytes it takes of the peer's window (little for bulk)."""

    owner: Any
    charge: int = 0
    slow: bool = False  # starting it takes time: nobody else starts until ``started``
    sequence: int = -1
    state: State = State.NEW


@dataclass(slots=True, eq=False)
class Post:
    """One call of recv. ``in_place``: it brought a buffer of its own."""

    owner: Any
    in_place: bool = False
    state: State = State.NEW
    holds: Incoming | None = None  # the message that moves, or lies, in its buffer


@dataclass(slots=True, eq=False)
class Incoming:
    """One message that arrived: ``size`` bytes of body, ``charge`` bytes of window taken."""

    owner: Any
    sequence: int
    size: int
    charge: int
    bulk: bool
    state: State = State.NEW
    into: Post | None = None  # whose buffer it moves to, or lies in
    reluctant: bool = False  # better moved once a post asks for it; ``hurry`` ends that
    lingers: bool = False  # the shell was told
    prefetched: bool = False  # counts against the prefetch budget
    credited: bool = False  # the sender got its share of the window back
    far: bool = False  # it belongs in memory that takes time to reach, however small it is
    here: bool = False  # its bytes are on this side: to move them takes no peer


# --- actions: what the shell is to do, in this order ---


@dataclass(slots=True)
class Start:
    """Put the message on the wire under its sequence number."""

    message: Outgoing


@dataclass(slots=True)
class Transfer:
    """Move a bulk message in: into the post's buffer, or into fresh memory where there is none."""

    message: Incoming
    into: Post | None


@dataclass(slots=True)
class Linger:
    """Say ``hurry`` if nobody has asked for the message in a moment."""

    message: Incoming


@dataclass(slots=True)
class Copy:
    """Copy a message that lies in memory of its own into the post's buffer."""

    message: Incoming
    into: Post


@dataclass(slots=True)
class Evacuate:
    """Copy a message out of a post's buffer into memory of its own."""

    message: Incoming


@dataclass(slots=True)
class Discard:
    """Drain a message that nobody can take, and give back the memory that it lies in."""

    message: Incoming


@dataclass(slots=True)
class Deliver:
    """The post is done: it gets this message."""

    post: Post
    message: Incoming


@dataclass(slots=True)
class Mismatch:
    """The post fails: what was sent does not fit what was asked; the message is dropped."""

    post: Post
    message: Incoming


@dataclass(slots=True)
class Credit:
    """Tell the sender that this much of its window is free again."""

    messages: int
    nbytes: int


@dataclass(slots=True)
class Fail:
    """The post can never be served: the direction is over."""

    post: Post


RecvAction = Transfer | Linger | Copy | Evacuate | Discard | Deliver | Mismatch | Credit | Fail
