"""What a channel holds and who waits for what: a pure state machine, events in and actions out.

It knows no event loop, no process and no bytes: clients are hashable names, payloads opaque. Every
event returns what the shell is to tell whom, in that order; an event that the state does not allow
raises and changes nothing. The way of an item::

    ask      waits    -> granted      there is room: for a number, and for the bytes
             waits    -> gone         withdrawn, refused, or its producer left
             granted  -> gone         the same; the room is free again, and no half item is left
             granted  -> an item      the payload came
    item     queued   -> held         given to a want, which answers for it
             held     -> gone         taken
             held     -> gone         its consumer cannot rebuild it
             held     -> queued       its want was cancelled, or the consumer left: in its old place
    want     waits    -> holding      items for it are there
             waits    -> gone         cancelled, refused, or its consumer left
             holding  -> gone         taken, cancelled, or its consumer left

Room is asked for before a payload leaves its producer, and counted until the item is taken, so the
bounds are bounds of memory. Asks of one producer are granted in order; producers take turns, and
nobody is passed over because what it brings is large. Rejected: one line for all asks (a producer
with a thousand of them would hold up the others for a thousand turns), and a bound for each key
(the number of keys has none).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..entries import IllegalTransition
from .entries import (
    Accept,
    Action,
    Ask,
    Deliver,
    End,
    Grant,
    Item,
    Line,
    Reason,
    Refuse,
    Want,
    exact,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator
    from fractions import Fraction


@dataclass(slots=True, eq=False)
class _Client:
    waiting: dict[int, Ask] = field(default_factory=dict)
    granted: dict[int, Ask] = field(default_factory=dict)
    wants: dict[int, Want] = field(default_factory=dict)


class Queue:
    """The items of one channel, by key.

    Args:
        maxsize: items that may be held or reserved for, 0 without bound.
        max_bytes: the same in bytes.
    """

    def __init__(self, maxsize: int = 0, max_bytes: int = 0) -> None:
        self.maxsize = maxsize
        self.max_bytes = max_bytes
        self.count = 0  # items held, and room granted
        self.nbytes = 0
        self.closed = False
        self.ended = False
        self._places = 0
        self._lines: dict[str, Line] = {}
        self._clients: dict[Hashable, _Client] = {}
        self._turns: dict[Hashable, None] = {}  # producers that wait, by whose turn it is
        self._queued = 0
        self._held = 0

    @property
    def bounded(self) -> bool:
        """Whether a producer has to ask before it sends."""
        return bool(self.maxsize or self.max_bytes)

    @property
    def full(self) -> bool:
        """Whether there is no room for one more item of any size."""
        return bool(
            (self.maxsize and self.count >= self.maxsize)
            or (self.max_bytes and self.nbytes >= self.max_bytes)
        )

    def qsize(self, key: str | None = None) -> int:
        """Items that are queued, under a key or in all; held ones do not count."""
        if key is None:
            return self._queued
        line = self._lines.get(key)
        return len(line.items) if line is not None else 0

    def granted_bytes(self, client: Hashable, number: int) -> int | None:
        """Room that was granted and not used yet; None where there is none."""
        found = self._clients.get(client)
        ask = found.granted.get(number) if found is not None else None
        return ask.nbytes if ask is not None else None

    # --- producers ---

    def ask(self, ask: Ask) -> list[Action]:
        """A producer has an item and wants to know whether there is room.

        Raises:
            IllegalTransition: the number is in use, or the item can never find room.
        """
        client = self._client(ask.client)
        if ask.number in client.waiting or ask.number in client.granted:
            raise IllegalTransition(f"ask {ask.number} of {ask.client} was made before")
        if ask.nbytes < 0 or (self.max_bytes and ask.nbytes > self.max_bytes):
            raise IllegalTransition(f"an item of {ask.nbytes} bytes can never find room")
        if self.closed:
            return [Refuse(ask, Reason.CLOSED)]
        if ask.nowait and (self._turns or not self._fits(ask)):
            return [Refuse(ask, Reason.FULL)]
        client.waiting[ask.number] = ask
        self._turns.setdefault(ask.client)
        return [*self._grant(), *self._unstick()]

    def put(self, client: Hashable, number: int, payload: Any) -> list[Action]:
        """The payload came for which room was granted.

        Raises:
            IllegalTransition: no room was granted for it.
        """
        ask = self._client(client).granted.pop(number, None)
        if ask is None:
            if self.closed:
                return []  # it crossed the refusal
            raise IllegalTransition(f"item {number} of {client} came without a grant")
        item = Item(self._places, ask.key, ask.nbytes, ask.weight, payload)
        self._places += 1
        self._queued += 1
        line = self._line(ask.key)
        line.insert(item)
        # The producer first: it goes on while the consumer's process wakes up (8% in a round trip).
        return [Accept(ask), *self._serve(line), *self._unstick()]

    def withdraw(self, client: Hashable, number: int) -> list[Action]:
        """The producer thought better of it before its payload left."""
        found = self._clients.get(client)
        if found is None:
            return []
        self._drop_ask(client, found, number)
        return [*self._grant(), *self._unstick()]

    # --- consumers ---

    def get(self, want: Want) -> list[Action]:
        """A consumer asks for an item, or for a batch.

        Raises:
            IllegalTransition: the number is in use.
        """
        client = self._client(want.client)
        if want.number in client.wants:
            raise IllegalTransition(f"want {want.number} of {want.client} was made before")
        line = self._line(want.key)
        client.wants[want.number] = want
        line.wants[want] = None
        actions = self._serve(line)
        if want.nowait and not want.held and want in line.wants:
            self._drop_want(want)
            actions.append(Refuse(want, Reason.EMPTY))
        self._tidy(want.key)
        return [*actions, *self._unstick()]

    def cancel(self, client: Hashable, number: int) -> list[Action]:
        """The consumer does not wait any more, or gives back what it was given."""
        found = self._clients.get(client)
        want = found.wants.get(number) if found is not None else None
        if want is None:
            return []  # it crossed the refusal
        self._drop_want(want)
        actions = self._serve(self._line(want.key))
        self._tidy(want.key)
        return [*actions, *self._unstick(), *self._end()]

    def taken(self, client: Hashable, number: int) -> list[Action]:
        """The consumer has what it was given: it is the channel's no more.

        Raises:
            IllegalTransition: it holds nothing.
        """
        want = self._client(client).wants.get(number)
        if want is None and self.closed:
            return []  # it crossed an abort
        if want is None or not want.held:
            raise IllegalTransition(f"want {number} of {client} holds nothing")
        del self._clients[client].wants[number]
        line = self._line(want.key)
        for item in want.held:
            self._free(item.nbytes)
        self._release(line, want)
        actions = self._serve(line) if self.closed else []
        self._tidy(want.key)
        return [*actions, *self._grant(), *self._unstick(), *self._end()]

    def spoiled(self, client: Hashable, number: int, index: int) -> list[Action]:
        """The consumer cannot use one of the items it was given: that is gone, others go back.

        Raises:
            IllegalTransition: it holds no such item.
        """
        want = self._client(client).wants.get(number)
        if want is None and self.closed:
            return []  # it crossed an abort
        if want is None or not 0 <= index < len(want.held):
            raise IllegalTransition(f"want {number} of {client} holds no item {index}")
        self._free(want.held.pop(index).nbytes)
        self._line(want.key).held -= 1
        self._held -= 1
        granted = [*self._grant()]
        return [*granted, *self.cancel(client, number)]

    # --- ends ---

    def leave(self, client: Hashable) -> list[Action]:
        """A client is gone: what it was given goes back, what it was to bring will not come."""
        found = self._clients.pop(client, None)
        if found is None:
            return []
        for number in [*found.waiting, *found.granted]:
            self._drop_ask(client, found, number)
        keys = {want.key for want in found.wants.values()}
        for want in found.wants.values():
            self._remove_want(want)
        actions: list[Action] = []
        for key in keys:
            actions += self._serve(self._line(key))
            self._tidy(key)
        return [*actions, *self._grant(), *self._unstick(), *self._end()]

    def close(self) -> list[Action]:
        """Nothing can be put any more; what is queued or held can still be got. Idempotent."""
        if self.closed:
            return []
        self.closed = True
        actions: list[Action] = []
        for name, client in self._clients.items():
            asks = [*client.granted.values(), *client.waiting.values()]
            for ask in asks:
                self._drop_ask(name, client, ask.number)
            actions += [Refuse(ask, Reason.CLOSED) for ask in asks]
        return actions + self._settle()

    def abort(self) -> list[Action]:
        """Close, and drop what is queued or held. Idempotent."""
        for client in self._clients.values():
            for want in [want for want in client.wants.values() if want.held]:
                del client.wants[want.number]
                self._remove_want(want)
        for line in self._lines.values():
            while line.items:
                self._free(line.pop().nbytes)
        self._queued = 0
        return self._settle() if self.closed else self.close()

    # --- inside ---

    def _client(self, name: Hashable) -> _Client:
        return self._clients.setdefault(name, _Client())

    def _line(self, key: str) -> Line:
        return self._lines.setdefault(key, Line())

    def _tidy(self, key: str) -> None:
        line = self._lines.get(key)
        if line is not None and line.idle:
            del self._lines[key]

    def _fits(self, ask: Ask) -> bool:
        return (not self.maxsize or self.count < self.maxsize) and (
            not self.max_bytes or self.nbytes + ask.nbytes <= self.max_bytes
        )

    def _free(self, nbytes: int) -> None:
        self.count -= 1
        self.nbytes -= nbytes

    def _grant(self) -> Iterator[Action]:
        while self._turns:
            name = next(iter(self._turns))
            client = self._clients[name]
            ask = next(iter(client.waiting.values()))
            if not self._fits(ask):
                return
            del client.waiting[ask.number], self._turns[name]
            if client.waiting:
                self._turns[name] = None  # behind the others
            client.granted[ask.number] = ask
            self.count += 1
            self.nbytes += ask.nbytes
            yield Grant(ask)

    def _drop_ask(self, name: Hashable, client: _Client, number: int) -> None:
        if (ask := client.granted.pop(number, None)) is not None:
            self._free(ask.nbytes)
        elif client.waiting.pop(number, None) is not None and not client.waiting:
            del self._turns[name]

    def _serve(self, line: Line) -> list[Action]:
        """Give items to those who wait for them, first come, first served."""
        actions: list[Action] = []
        while line.wants and line.items:
            want = next(iter(line.wants))
            target = want.target
            if target is not None and line.weight < exact(target) and not self.closed:
                break
            del line.wants[want]
            reached: int | Fraction = 0
            while line.items and (not want.held or (target is not None and reached < target)):
                item = line.pop()
                reached += exact(item.weight)
                want.held.append(item)
            line.held += len(want.held)
            self._held += len(want.held)
            self._queued -= len(want.held)
            actions.append(Deliver(want))
        if self.closed and not line.held:  # what others hold may still come back
            for want in [*line.wants]:
                self._drop_want(want)
                actions.append(Refuse(want, Reason.CLOSED))
        return actions

    def _settle(self) -> list[Action]:
        """Closed: give what is there to those who wait, and tell the others that no more comes."""
        actions: list[Action] = []
        for key in [*self._lines]:
            actions += self._serve(self._lines[key])
            self._tidy(key)
        return [*actions, *self._end()]

    def _drop_want(self, want: Want) -> None:
        del self._clients[want.client].wants[want.number]
        self._remove_want(want)

    def _remove_want(self, want: Want) -> None:
        line = self._line(want.key)
        line.wants.pop(want, None)
        items = want.held
        self._release(line, want)
        for item in items:
            line.insert(item)
        self._queued += len(items)

    def _release(self, line: Line, want: Want) -> None:
        line.held -= len(want.held)
        self._held -= len(want.held)
        want.held = []

    def _unstick(self) -> Iterable[Action]:
        """Refuse a batch that waits for more in a channel that can take no more.

        So it is when somebody waits for room, and whatever takes it up is queued under keys whose
        first want is a batch that it does not fill.
        """
        actions: list[Action] = []
        while self._turns and self._queued and self.count == self._queued:
            first: Line | None = None
            for line in self._lines.values():
                if line.items and not line.wants:
                    return actions
                first = first or (line if line.items else None)
            assert first is not None
            want = next(iter(first.wants))
            self._drop_want(want)
            actions.append(Refuse(want, Reason.STUCK))
            actions += self._serve(first)
        return actions

    def _end(self) -> Iterator[Action]:
        if self.closed and not self.ended and not (self._queued or self._held):
            self.ended = True
            yield End()
