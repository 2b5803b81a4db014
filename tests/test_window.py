"""The order of the sending end: its table row by row, its window, and both ends joined."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from aiocomm.entries import (
    Credit,
    Deliver,
    IllegalTransition,
    Incoming,
    Outgoing,
    Post,
    Start,
    State,
)
from aiocomm.ordering import RecvOrder, SendOrder


def granted(messages: int = 4, nbytes: int = 100) -> SendOrder:
    order = SendOrder()
    assert order.grant(messages, nbytes, first=True) == []
    return order


def submit(order: SendOrder, charge: int = 1, *, slow: bool = False) -> Outgoing:
    message = Outgoing(None, charge, slow)
    order.submit(message)
    return message


def test_nothing_starts_before_the_window_is_granted() -> None:
    order = SendOrder()
    messages = [submit(order) for _ in range(3)]
    assert (order.queued, order.pending) == (3, 3)
    starts = order.grant(2, 100, first=True)
    assert [start.message for start in starts] == messages[:2]
    assert [message.sequence for message in messages] == [0, 1, -1]
    assert (order.queued, order.pending) == (1, 3)
    assert [start.message for start in order.grant(1, 0)] == messages[2:]


def test_started_message_finishes_whatever_its_caller_does() -> None:
    order = granted()
    message = submit(order)
    assert order.cancel(message) == (False, [])
    assert order.started_with(0) is message
    assert message.state is State.STARTED
    assert order.finish(message) == []
    assert message.state.name == "GONE"
    assert (order.pending, order.started_with(0)) == (0, None)


def test_cancelled_message_takes_no_sequence_and_lets_the_next_one_start() -> None:
    order = granted(4, 100)
    submit(order, 90)
    large, small = submit(order, 50), submit(order, 5)
    taken, starts = order.cancel(large)
    assert taken
    assert [start.message for start in starts] == [small]
    assert (large.state, large.sequence, small.sequence) == (State.GONE, -1, 1)


def test_nobody_overtakes_a_slow_start() -> None:
    order = granted()
    slow, behind = submit(order, slow=True), submit(order)
    assert order.grant(0, 0) == []
    assert (slow.state, behind.state) == (State.STARTED, State.QUEUED)
    assert order.finish(slow) == []  # not even when it has left already
    assert [start.message for start in order.started(slow)] == [behind]


@pytest.mark.parametrize(
    ("before", "charge"),
    [
        (lambda order: None, 1),
        (lambda order: submit(order, 60), 40),
        (lambda order: submit(order, 60), 41),
        (lambda order: [submit(order) for _ in range(2)], 1),  # the window is full
        (lambda order: [submit(order) for _ in range(3)], 1),  # somebody waits
        (lambda order: submit(order, slow=True), 1),
        (lambda order: order.finish(submit(order)), 1),
    ],
)
def test_passing_through_is_submitting_to_an_empty_line_and_finishing(
    before: Callable[[SendOrder], object], charge: int
) -> None:
    passed, queued = granted(2, 100), granted(2, 100)
    for order in (passed, queued):
        before(order)
    as_it_was = repr(vars(passed))
    sequence = passed.pass_through(charge)
    message = Outgoing(None, charge)
    starts = queued.submit(message)
    if sequence is None:
        assert repr(vars(passed)) == as_it_was
        assert starts == []
    else:
        assert [start.message for start in starts] == [message]
        assert sequence == message.sequence
        queued.finish(message)
        assert repr(vars(passed)) == repr(vars(queued))


def test_nothing_passes_through_after_the_end() -> None:
    order = granted()
    assert order.pass_through(1) == 0
    order.close()
    assert order.pass_through(1) is None


def test_close_returns_what_is_unfinished_in_order() -> None:
    order = granted(2, 100)
    done, *rest = [submit(order), submit(order, slow=True), submit(order), submit(order)]
    order.finish(done)
    assert order.close() == rest
    assert {message.state for message in rest} == {State.GONE}
    assert (order.pending, order.closed, order.close()) == (0, True, [])
    assert order.grant(1, 1) == []


def test_illegal_events_change_nothing() -> None:
    order = granted(2, 100)
    slow, queued, gone = submit(order, slow=True), submit(order), submit(order)
    order.cancel(gone)
    closed = granted()
    closed.close()

    def state() -> list[str]:
        return [repr(vars(order)), *(repr(message) for message in (slow, queued, gone))]

    before = state()
    for event in (
        lambda: order.submit(slow),
        lambda: order.submit(queued),
        lambda: order.submit(gone),
        lambda: order.started(queued),
        lambda: order.finish(queued),
        lambda: order.finish(gone),
        lambda: order.grant(2, 0),  # more messages than are out
        lambda: order.grant(1, 2),  # more bytes than are out
        lambda: order.grant(1, 1, first=True),
        lambda: SendOrder().grant(1, 0),
        lambda: SendOrder().grant(0, 1, first=True),
        lambda: closed.submit(Outgoing(None)),
    ):
        with pytest.raises(IllegalTransition):
            event()
        assert state() == before
    assert order.cancel(gone) == (False, [])
    assert state() == before


@pytest.mark.parametrize(("out", "starts"), [(24, True), (25, False)])
def test_message_larger_than_the_window_waits_only_for_credit_that_is_due(
    out: int, starts: bool
) -> None:
    order = granted(100, 100)
    submit(order, out)
    large = submit(order, 1_000)
    assert (large.state is State.STARTED) is starts
    if not starts:
        order.grant(1, out)
        assert large.state is State.STARTED
    assert submit(order, 1).state is State.QUEUED
    assert order.queued == 1


@settings(max_examples=200)
@given(
    charges=st.lists(st.integers(0, 30), max_size=40),
    messages=st.integers(1, 9),
    nbytes=st.integers(0, 25),
    seed=st.randoms(use_true_random=False),
)
def test_two_ends_never_stop(charges: list[int], messages: int, nbytes: int, seed: Random) -> None:
    sender = SendOrder()
    receiver = RecvOrder(
        lambda post, message: True,
        prefetch_bytes=0,
        copy_limit=100,
        moving_limit=1,
        window_messages=messages,
        window_bytes=nbytes,
    )
    wire: deque[Outgoing] = deque()
    credits: deque[Credit] = deque()
    got: list[object] = []
    out: list[int] = []  # what the sender has not got back
    returned = 0

    def start(starts: list) -> None:
        for each in starts:
            left = nbytes - sum(out)
            quiet = len(out) < max(1, messages // 4) and sum(out) < max(1, nbytes // 4)
            assert len(out) < messages
            assert each.message.charge <= left or quiet
            out.append(each.message.charge)
            wire.append(each.message)

    def receive(actions: list) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                got.append(action.message.owner)
            elif isinstance(action, Credit):
                credits.append(action)

    start(sender.grant(messages, nbytes, first=True))
    calls = [*range(len(charges))]
    posts = len(charges)
    while calls or posts or wire or credits:
        step = seed.randrange(4)
        if step == 0 and calls:
            number = calls.pop(0)
            message = Outgoing(number, charges[number])
            sequence = sender.pass_through(message.charge)
            if sequence is None:
                start(sender.submit(message))
            else:
                message.sequence = sequence
                start([Start(message)])
        elif step == 1 and posts:
            posts -= 1
            receive(receiver.post(Post(None)))
        elif step == 2 and wire:
            sent = wire.popleft()
            if sent.state is State.STARTED:  # else it has passed through
                sender.finish(sent)
            receive(
                receiver.arrive(
                    Incoming(sent.owner, sent.sequence, sent.charge, sent.charge, False)
                )
            )
        elif step == 3 and credits:
            credit = credits.popleft()
            returned += credit.messages
            assert credit.nbytes == sum(out[: credit.messages])
            del out[: credit.messages]
            start(sender.grant(credit.messages, credit.nbytes))
    assert got == [*range(len(charges))]
    assert sender.pending == 0
    assert returned + len(out) == len(charges)


def test_cost_of_a_cancellation_does_not_grow() -> None:
    def seconds_each(count: int) -> float:
        order = granted(1, 100)
        messages = [submit(order) for _ in range(count)]
        Random(count).shuffle(messages)
        start = time.thread_time()
        for message in messages:
            order.cancel(message)
        assert order.pending == 1
        return (time.thread_time() - start) / count

    few, many = (min(seconds_each(count) for _ in range(3)) for count in (500, 5_000))
    assert many < 4 * few + 5e-6  # quadratic: 10 times
