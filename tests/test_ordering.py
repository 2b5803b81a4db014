"""The order of the receiving end: its table row by row; test_schedules.py has every schedule."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from aiocomm.entries import Incoming, Post, State
from aiocomm.ordering import IllegalTransition, RecvOrder

from .receiving import (
    BUDGET,
    LARGE,
    LIMIT,
    SMALL,
    Shell,
    Side,
    shell_at,
    snapshot,
)

# --- the table, row by row ---


def test_reluctant_message_waits_for_its_call_or_for_hurry() -> None:
    shell = Shell()
    asked, unasked = (shell.arrive("tensor", LARGE, bulk=True, reluctant=True) for _ in range(2))
    behind = shell.arrive("tensor", SMALL, bulk=True)
    assert shell.told == ["Linger"]  # for the first in line, and only once
    post = shell.post("tensor", buffer=True)
    assert shell.told == ["Linger", "Transfer", "Linger"]
    assert asked.into is post
    shell.hurry(asked)  # too late to matter
    assert [unasked.state, behind.state] == [State.ARRIVED] * 2
    shell.hurry(unasked)
    assert [unasked.state, behind.state] == [State.MOVING, State.ARRIVED]  # the limit of moves
    assert unasked.prefetched


@pytest.mark.parametrize(
    ("state", "event", "after", "told"),
    [
        ("ARRIVED", lambda s, m: s.post(), "MOVING", ["Transfer"]),
        ("ARRIVED", lambda s, m: s.post("tensor"), "GONE", ["Mismatch", "Discard"]),
        ("ARRIVED", lambda s, m: s.lose(keep_moving=True), "GONE", []),
        ("ARRIVED", lambda s, m: s.lose(keep_moving=True, held=1), "MOVING", ["Transfer"]),
        ("MOVING", lambda s, m: s.end(m), "TAKEN", ["Deliver"]),
        ("MOVING", lambda s, m: (s.cancel(s.posts[0]), s.end(m)), "LEAVING", ["Evacuate"]),
        ("MOVING", lambda s, m: (s.cancel(s.posts[0]), s.post()), "DROPPED", ["Mismatch"]),
        ("MOVING", lambda s, m: s.lose(keep_moving=True), "MOVING", []),
        ("MOVING", lambda s, m: s.lose(keep_moving=False), "DROPPED", []),
        ("MOVING", lambda s, m: s.fail(m), "GONE", ["Fail"]),
        ("ARRIVED", lambda s, m: s.close(), "GONE", []),
        ("ARRIVED", lambda s, m: s.close(drain=True), "GONE", ["Discard"]),
        ("MOVING", lambda s, m: s.close(), "DROPPED", []),
        ("MOVING", lambda s, m: s.close(drain=True), "DROPPED", []),
        ("LEAVING", lambda s, m: s.end(m), "READY", []),
        ("LEAVING", lambda s, m: s.post(), "DROPPED", ["Mismatch"]),
        ("LEAVING", lambda s, m: s.lose(keep_moving=False), "LEAVING", []),
        ("LEAVING", lambda s, m: s.fail(m), "GONE", []),
        ("READY", lambda s, m: s.post("tensor"), "TAKEN", ["Deliver"]),
        ("READY", lambda s, m: s.post("tensor", buffer=True), "COPYING", ["Copy"]),
        ("READY", lambda s, m: s.post(), "GONE", ["Mismatch"]),
        ("READY", lambda s, m: s.lose(keep_moving=False), "READY", []),
        ("READY", lambda s, m: s.close(), "GONE", []),
        ("READY", lambda s, m: s.close(drain=True), "GONE", ["Discard"]),
        ("COPYING", lambda s, m: s.end(m), "TAKEN", ["Deliver"]),
        ("COPYING", lambda s, m: (s.cancel(s.posts[0]), s.end(m)), "READY", []),
        ("COPYING", lambda s, m: s.lose(keep_moving=False), "COPYING", []),
        ("COPYING", lambda s, m: s.fail(m), "GONE", ["Fail"]),
        ("COPYING", lambda s, m: s.close(drain=True), "DROPPED", []),
        ("TAKEN", lambda s, m: s.give_back(m), "READY", []),
        ("DROPPED", lambda s, m: s.end(m), "GONE", ["Fail"]),
        ("DROPPED", lambda s, m: s.fail(m), "GONE", ["Fail"]),
    ],
)
def test_row(state: str, event: Any, after: str, told: list[str]) -> None:
    shell, message, _ = shell_at(state)
    before = len(shell.told)
    event(shell, message)
    assert message.state.name == after
    assert [name for name in shell.told[before:] if name != "Credit"] == told


@pytest.mark.parametrize(
    ("bulk", "size", "state"),
    [
        (False, LARGE, State.READY),
        (True, BUDGET, State.MOVING),
        (True, BUDGET + 1, State.ARRIVED),
    ],
)
def test_arrival(bulk: bool, size: int, state: State) -> None:
    assert Shell().arrive(size=size, bulk=bulk).state is state


@pytest.mark.parametrize("asked", ["obj", "tensor"])
@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("size", [0, SMALL, LARGE])
@pytest.mark.parametrize("behind", [0, 1])
def test_short_cut_comes_to_what_the_queue_does(
    asked: str, buffer: bool, size: int, behind: int
) -> None:
    waited, queued = Shell(), Shell()
    for _ in range(5):  # the credit of some is due
        posts = [waited.post(asked, buffer=buffer) for _ in range(1 + behind)]
        short = waited.arrive(size=size)
        long = queued.arrive(size=size)
        post = queued.post(asked, buffer=buffer)
        assert (short.state, posts[0].state) == (long.state, post.state)
        for shell in (waited, queued):
            for move in [*shell.moves]:
                shell.end(move.message)  # type: ignore[union-attr]
        for post in posts[1:]:
            waited.cancel(post)
    assert waited.told == queued.told
    ends = [snapshot(shell.order)[0] for shell in (waited, queued)]
    for end in ends:
        del end["_fits"]
    assert ends[0] == ends[1]


LEGAL = {
    "transferred": {"MOVING", "COPYING", "DROPPED"},
    "evacuated": {"LEAVING", "DROPPED"},
    "fail": {"MOVING", "COPYING", "LEAVING", "DROPPED"},
    "give_back": {"TAKEN"},
    "arrive": set(),
}


@pytest.mark.parametrize("event", LEGAL)
@pytest.mark.parametrize(
    "state", ["ARRIVED", "MOVING", "LEAVING", "READY", "COPYING", "TAKEN", "DROPPED", "GONE"]
)
def test_illegal_event_changes_nothing(event: str, state: str) -> None:
    shell, message, post = shell_at(state)
    send = getattr(shell.order, event)
    if state in LEGAL[event]:
        send(message)
        return
    before = snapshot(shell.order, message, post)
    with pytest.raises(IllegalTransition):
        send(message)
    assert snapshot(shell.order, message, post) == before


def test_new_messages_come_in_sequence_and_before_the_end() -> None:
    shell = Shell()
    late = Incoming(Side("obj"), 1, 0, 0, bulk=False)
    for event in (shell.order.arrive, shell.order.transferred, shell.order.give_back):
        with pytest.raises(IllegalTransition):
            event(late)
    shell.lose(keep_moving=True)
    with pytest.raises(IllegalTransition):
        shell.order.arrive(Incoming(Side("obj"), 0, 0, 0, bulk=False))
    assert shell.order.expected == 0


@pytest.mark.parametrize("end", ["wait", "delivered", "cancelled"])
def test_post_stands_in_line_once(end: str) -> None:
    shell = Shell()
    post = shell.post()
    if end == "delivered":
        shell.arrive()
    elif end == "cancelled":
        shell.cancel(post)
    before = snapshot(shell.order, post)
    with pytest.raises(IllegalTransition):
        shell.order.post(post)
    assert end == "wait" or shell.order.cancel(post) == (False, [])
    assert snapshot(shell.order, post) == before


# --- what once went wrong, or could ---


def test_shifted_post_gives_its_buffer_up_before_it_is_served() -> None:
    shell = Shell()
    first, second = (shell.post("tensor", buffer=True) for _ in range(2))
    slow, quick = (shell.arrive("tensor", LARGE, bulk=True) for _ in range(2))
    shell.end(quick)
    shell.cancel(first)
    assert shell.told[-1:] == ["Evacuate"]
    shell.end(slow)  # its own post is gone: it leaves that buffer too
    shell.end(slow)
    assert not shell.delivered, "the buffer still holds the other message"
    shell.end(quick)
    shell.end(slow)  # copied into the buffer of the second post
    assert shell.delivered == {slow: second}


def test_mismatch_waits_for_a_shifted_buffer() -> None:
    shell = Shell()
    first = shell.post()
    second = shell.post("tensor", buffer=True)
    shell.arrive("obj", LARGE, bulk=True)
    tensor = shell.arrive("tensor", LARGE, bulk=True)
    shell.cancel(first)
    assert "Mismatch" not in shell.told
    shell.end(tensor)
    shell.end(tensor)
    assert shell.told[-2:] == ["Evacuate", "Mismatch"]
    assert second.state is State.GONE


@pytest.mark.parametrize("how", ["lose", "fail", "close"])
def test_buffer_is_not_handed_back_while_a_dropped_message_moves_into_it(how: str) -> None:
    shell = Shell()
    first, second, third = (shell.post("tensor", buffer=True) for _ in range(3))
    one, two = (shell.arrive("tensor", LARGE, bulk=True) for _ in range(2))
    if how == "fail":
        shell.fail(one)
    elif how == "lose":
        shell.lose(keep_moving=False)
    else:
        assert shell.close() == [third]
    assert shell.order.moving == 0
    assert second in shell.posts
    assert first in shell.posts or how == "fail"
    while shell.moves:
        shell.end(two if how == "fail" else shell.moves[0].message)  # type: ignore[union-attr]
    assert not shell.posts


def test_message_ready_in_a_buffer_behind_a_gap_lets_the_buffer_go() -> None:
    shell = Shell()
    posts = [shell.post("tensor", buffer=True) for _ in range(2)]
    slow, quick = (shell.arrive("tensor", LARGE, bulk=True) for _ in range(2))
    shell.end(quick)
    shell.fail(slow)
    assert shell.failed == posts


def test_dropped_moves_count_against_the_limit_and_the_budget_until_they_end() -> None:
    shell = Shell()
    dropped = [shell.arrive(size=BUDGET // 2, bulk=True) for _ in range(LIMIT)]
    for _ in dropped:
        shell.post("tensor")
    waiting = shell.arrive(size=BUDGET // 2, bulk=True)
    assert shell.told.count("Mismatch") == LIMIT
    assert waiting.state is State.ARRIVED
    shell.end(dropped[0])
    assert waiting.state.name == "MOVING"


def test_inline_message_behind_a_discarded_one_is_served_in_the_same_breath() -> None:
    shell = Shell()
    posts = [shell.post(kind) for kind in ("obj", "tensor", "obj")]
    moving, _ = (shell.arrive(size=LARGE, bulk=True) for _ in range(2))
    inline = shell.arrive()
    shell.end(moving)
    assert shell.told == ["Transfer", "Deliver", "Mismatch", "Discard", "Credit", "Deliver"]
    assert shell.delivered == {moving: posts[0], inline: posts[2]}
    assert shell.arrive(size=LARGE, bulk=True).state is State.MOVING


def test_failed_drain_of_a_dropped_message_ends_the_direction_and_keeps_what_is_whole() -> None:
    shell = Shell()
    dropped = shell.arrive(size=LARGE, bulk=True)
    shell.post("tensor")
    whole, late = shell.arrive(), shell.arrive(size=BUDGET + 1, bulk=True)
    shell.fail(dropped)
    assert shell.line == [whole]
    assert late.state is State.GONE
    assert [shell.post(), shell.post()][1:] == shell.failed
    assert whole in shell.delivered


def test_returned_messages_keep_their_order_and_their_credit() -> None:
    shell = Shell()
    for _ in range(4):
        shell.post()
    messages = [shell.arrive() for _ in range(4)]
    for number in (1, 3, 0, 2):
        shell.give_back(messages[number])
    for _ in messages:
        shell.post()
    assert [*shell.delivered] == messages
    assert shell.told.count("Credit") == 2


@pytest.mark.parametrize("kind", ["alone", "moving", "given back"])
def test_cost_per_call_does_not_grow(kind: str) -> None:
    def seconds_each(count: int) -> float:
        order = RecvOrder(
            lambda post, message: True,
            prefetch_bytes=0,
            copy_limit=0,
            moving_limit=LIMIT,
            window_messages=2 * count,
            window_bytes=count,
        )
        posts = [Post(None, True) for _ in range(count)]
        messages = [Incoming(None, number, 9, 0, bulk=True) for number in range(count)]
        shuffled = Random(count).sample(posts, count)
        start = time.thread_time()
        for post in posts:
            order.post(post)
        if kind == "given back":
            for message in messages:
                order.arrive(message)
                order.transferred(message)
            for message in messages:
                order.give_back(message)
        else:
            for message in messages[: 50 if kind == "moving" else 0]:
                order.arrive(message)
            for post in shuffled:
                order.cancel(post)
        assert order.posted == 0
        return (time.thread_time() - start) / count

    few, many = (min(seconds_each(count) for _ in range(3)) for count in (500, 5_000))
    assert many < 4 * few + 5e-6  # quadratic: 10 times


def test_messages_that_their_route_holds_move_in_whatever_the_limits_are() -> None:
    shell = Shell()
    posts = [shell.post("obj"), shell.post("tensor", buffer=True)]
    messages = [shell.arrive("obj", BUDGET + 1, bulk=True) for _ in range(LIMIT + 2)]
    torn = shell.arrive("obj", SMALL, bulk=True)
    assert [message.state for message in messages[:2]] == [State.MOVING, State.ARRIVED]
    shell.lose(keep_moving=True, held=len(messages) - 1)
    assert {message.state for message in messages} == {State.MOVING}
    assert torn.state is State.GONE
    assert all(message.into is None for message in messages)
    assert {post.state for post in posts} == {State.QUEUED}


# --- closing while the peer still sends ---


def test_a_closed_side_that_drains_takes_everything_off_its_route_and_gives_credit() -> None:
    shell = Shell()
    moving = shell.arrive(size=LARGE, bulk=True)
    waiting = [shell.arrive(size=BUDGET, bulk=True) for _ in range(2)]
    shell.close(drain=True)
    assert shell.told == ["Transfer", "Discard", "Credit", "Discard"]
    late = [shell.turn_away(LARGE, bulk=True), shell.turn_away()]
    assert shell.told[4:] == ["Discard", "Credit", "Discard"]
    shell.end(moving)
    assert {each.state for each in (moving, *waiting, *late)} == {State.GONE}
    shell.order.draining = False
    with pytest.raises(IllegalTransition):
        shell.turn_away()


def test_bulk_that_has_moved_in_is_not_taken_off_its_route_again() -> None:
    shell = Shell()
    shell.end(shell.arrive(size=LARGE, bulk=True))
    shell.close(drain=True)
    assert shell.told == ["Transfer"]


def test_a_direction_that_was_over_before_its_close_does_not_drain() -> None:
    shell = Shell()
    shell.arrive(size=BUDGET + 1, bulk=True)
    shell.lose(keep_moving=False)
    shell.close(drain=True)
    assert not shell.order.draining
    assert shell.told == []
