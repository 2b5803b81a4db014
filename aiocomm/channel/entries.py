"""What stands in the queue of a channel, and what the queue tells its shell to do.

Plain slotted records, as in ``aiocomm/entries.py``: clients are hashable names, payloads opaque.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any


class Reason(enum.IntEnum):
    """Why an ask or a want is refused."""

    FULL = 1
    EMPTY = 2
    CLOSED = 3
    STUCK = 4  # full, and everybody who could make room waits for more to come


@dataclass(slots=True, eq=False)
class Ask:
    """A producer wants to bring an item. ``number`` is the client's, and used once."""

    client: Any
    number: int
    key: str
    nbytes: int
    weight: float = 0
    nowait: bool = False


@dataclass(slots=True, eq=False)
class Item:
    """What is queued; ``place`` is its place among all items of the channel."""

    place: int
    key: str
    nbytes: int
    weight: float
    payload: Any


@dataclass(slots=True, eq=False)
class Want:
    """A consumer wants one item, or where there is a ``target`` items of that weight."""

    client: Any
    number: int
    key: str
    target: float | None = None
    nowait: bool = False
    held: list[Item] = field(default_factory=list)


# --- actions ---


@dataclass(slots=True)
class Grant:
    """Tell the producer that there is room: it may send."""

    ask: Ask


@dataclass(slots=True)
class Accept:
    """Tell the producer that its item is in the queue."""

    ask: Ask


@dataclass(slots=True)
class Deliver:
    """Send the items that the want holds."""

    want: Want


@dataclass(slots=True)
class Refuse:
    """The ask or want comes to nothing."""

    refused: Ask | Want
    reason: Reason


@dataclass(slots=True)
class End:
    """Closed, and nothing is left that anybody could wait for."""


Action = Grant | Accept | Deliver | Refuse | End


@dataclass(slots=True, eq=False)
class Line:
    """Of one key: items in the order of their places, and wants in the order of the calls."""

    items: deque[Item] = field(default_factory=deque)
    wants: dict[Want, None] = field(default_factory=dict)
    weight: int | Fraction = 0  # of the items; exact, or rounding could keep a batch waiting
    held: int = 0  # items that wants hold

    @property
    def idle(self) -> bool:
        """Whether nothing is to be remembered of this key."""
        return not (self.items or self.wants or self.held)

    def pop(self) -> Item:
        """Take the first item."""
        item = self.items.popleft()
        self.weight = self.weight - exact(item.weight) if self.items else 0
        return item

    def insert(self, item: Item) -> None:
        """Put an item in its place."""
        items = self.items
        if not items or items[-1].place < item.place:
            items.append(item)
        else:  # it was here before: near the front
            index = next(n for n, other in enumerate(items) if other.place > item.place)
            items.insert(index, item)
        self.weight += exact(item.weight)


def exact(weight: float) -> int | Fraction:
    """A weight whose sums are not rounded."""
    return weight if isinstance(weight, int) else Fraction(weight)
