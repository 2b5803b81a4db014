"""The queue of a channel against plain lists that say what must be the case after each event."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiocomm.channel.entries import Accept, Action, Ask, Deliver, End, Grant, Reason, Refuse, Want
from aiocomm.channel.queue import Queue

CLIENTS, KEYS = ("p", "q", "r"), ("k", "l")
WEIGHTS = st.sampled_from([0, 1, 2, 0.1, 2.5])


class Model(RuleBasedStateMachine):
    """Plain lists say what must be the case after each event."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = (3, 12)
        self.queue = Queue(*self.bounds)
        self.number = 0
        self.asked: list[Ask] = []  # waiting, by producer in order
        self.granted: list[Ask] = []
        self.wants: list[Want] = []  # waiting
        self.holding: list[Want] = []
        self.queued: list[tuple[int, str, float, int]] = []  # payload, key, weight, bytes
        self.kept: dict[int, tuple[int, str, float, int]] = {}
        self.puts = 0
        self.closed = self.ended = False

    def follow(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Grant(ask):
                    first = next(each for each in self.asked if each.client == ask.client)
                    assert first is ask, "a producer's asks are granted in order"
                    self.asked.remove(ask)
                    self.granted.append(ask)
                case Deliver(want):
                    self.deliver(want)
                case Refuse(refused, reason):
                    self.refuse(refused, reason)
                case End():
                    assert not self.ended
                    self.ended = True

    def deliver(self, want: Want) -> None:
        waiting = [each for each in self.wants if each.key == want.key]
        assert waiting[0] is want, "first come, first served"
        self.wants.remove(want)
        self.holding.append(want)
        payloads = [item.payload for item in want.held]
        there = [each for each in self.queued if each[1] == want.key]
        assert [each[0] for each in there[: len(payloads)]] == payloads
        taken = there[: len(payloads)]
        if want.target is None:
            assert len(taken) == 1
        else:
            assert sum(each[2] for each in taken[:-1]) < want.target
            assert self.closed or sum(each[2] for each in taken) >= want.target - 1e-9
        for each in taken:
            self.queued.remove(each)

    def refuse(self, refused: Ask | Want, reason: Reason) -> None:
        if isinstance(refused, Ask):
            assert reason is Reason.CLOSED if self.closed else refused.nowait
            for asks in (self.asked, self.granted):
                if refused in asks:
                    asks.remove(refused)
            return
        self.wants.remove(refused)
        if reason is Reason.CLOSED:
            assert self.closed
            assert not [each for each in self.queued if each[1] == refused.key]
        elif reason is Reason.EMPTY:
            assert refused.nowait
        else:
            assert refused.target is not None
            assert self.asked

    def give_back(self, want: Want) -> None:
        self.queued += [self.kept[payload] for payload in self.payloads[want]]
        self.queued.sort()

    @property
    def payloads(self) -> dict[Want, list[int]]:
        return {want: [item.payload for item in want.held] for want in self.holding}

    @rule(
        client=st.sampled_from(CLIENTS),
        key=st.sampled_from(KEYS),
        nbytes=st.integers(0, 12),
        weight=WEIGHTS,
        nowait=st.booleans(),
    )
    def ask(self, client: str, key: str, nbytes: int, weight: float, nowait: bool) -> None:
        self.number += 1
        ask = Ask(client, self.number, key, nbytes, weight, nowait)
        self.asked.append(ask)
        self.follow(self.queue.ask(ask))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        # A producer's payloads come in the order of its grants.
        firsts = {ask.client: ask for ask in reversed(self.granted)}
        ask = data.draw(st.sampled_from(sorted(firsts.values(), key=lambda each: each.number)))
        self.granted.remove(ask)
        self.puts += 1
        self.kept[self.puts] = (self.puts, ask.key, ask.weight, ask.nbytes)
        self.queued.append(self.kept[self.puts])
        actions = self.queue.put(ask.client, ask.number, self.puts)
        assert actions.count(Accept(ask)) == 1
        self.follow(actions)

    @precondition(lambda self: self.asked or self.granted)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from([*self.asked, *self.granted]))
        (self.asked if ask in self.asked else self.granted).remove(ask)
        self.follow(self.queue.withdraw(ask.client, ask.number))

    @rule(
        client=st.sampled_from(CLIENTS),
        key=st.sampled_from(KEYS),
        weight=st.sampled_from([None, None, 1, 3, 0.3]),
        nowait=st.booleans(),
    )
    def get(self, client: str, key: str, weight: float | None, nowait: bool) -> None:
        self.number += 1
        want = Want(client, self.number, key, weight, nowait)
        self.wants.append(want)
        self.follow(self.queue.get(want))
        assert not nowait or want not in self.wants

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def taken(self, data: st.DataObject) -> None:
        want = data.draw(st.sampled_from(self.holding))
        self.holding.remove(want)
        self.follow(self.queue.taken(want.client, want.number))

    @precondition(lambda self: self.wants or self.holding)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        want = data.draw(st.sampled_from([*self.wants, *self.holding]))
        if want in self.holding:
            self.give_back(want)
            self.holding.remove(want)
        else:
            self.wants.remove(want)
        self.follow(self.queue.cancel(want.client, want.number))

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def spoiled(self, data: st.DataObject) -> None:
        want = data.draw(st.sampled_from(self.holding))
        place = data.draw(st.integers(0, len(want.held) - 1))
        gone = self.kept[want.held[place].payload]
        self.give_back(want)
        self.queued.remove(gone)
        self.holding.remove(want)
        self.follow(self.queue.spoiled(want.client, want.number, place))

    @rule(client=st.sampled_from(CLIENTS))
    def leave(self, client: str) -> None:
        for want in [want for want in self.holding if want.client == client]:
            self.give_back(want)
            self.holding.remove(want)
        self.wants = [want for want in self.wants if want.client != client]
        self.asked = [ask for ask in self.asked if ask.client != client]
        self.granted = [ask for ask in self.granted if ask.client != client]
        self.follow(self.queue.leave(client))

    @precondition(lambda self: self.number > 15)
    @rule()
    def close(self) -> None:
        self.closed = True
        self.follow(self.queue.close())
        assert not self.asked
        assert not self.granted

    @invariant()
    def bounds_hold(self) -> None:
        held = [self.kept[payload] for each in self.payloads.values() for payload in each]
        count = len(self.granted) + len(self.queued) + len(held)
        nbytes = sum(ask.nbytes for ask in self.granted) + sum(
            each[3] for each in [*self.queued, *held]
        )
        assert (self.queue.count, self.queue.nbytes) == (count, nbytes)
        assert count <= self.bounds[0]
        assert nbytes <= self.bounds[1]
        assert self.queue.qsize() == len(self.queued)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        for key in KEYS:
            there = [each for each in self.queued if each[1] == key]
            first = next((want for want in self.wants if want.key == key), None)
            if first is not None and there:
                assert first.target is not None
                assert sum(each[2] for each in there) < first.target
        if self.asked:
            turn = next(iter(self.queue._turns))
            ask = next(ask for ask in self.asked if ask.client == turn)
            assert not self.queue._fits(ask)
            # Somebody can still make room: a call that is to come, or one that has begun.
            free = [
                key
                for key in KEYS
                if any(each[1] == key for each in self.queued)
                and not any(want.key == key for want in self.wants)
            ]
            assert self.granted or self.holding or free

    @invariant()
    def it_ends_once_nothing_is_left(self) -> None:
        assert self.ended == (self.closed and not self.queued and not self.holding)
        if self.ended:
            assert not self.wants


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestModel = Model.TestCase
