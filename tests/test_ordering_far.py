"""The order of messages for memory that takes time to reach, and of those whose bytes are here."""

from __future__ import annotations

import pytest

from aiocomm.entries import Copy, Deliver, Discard, Fail, Incoming, Mismatch, Post, State, Transfer
from aiocomm.ordering import RecvOrder


def order() -> RecvOrder:
    return RecvOrder(
        lambda post, message: post.owner == message.owner,  # type: ignore[attr-defined]
        prefetch_bytes=100,
        copy_limit=10,
        moving_limit=2,
        window_messages=8,
        window_bytes=40,
    )


def far(number: int, owner: str = "obj", *, here: bool = False, bulk: bool = True) -> Incoming:
    message = Incoming(owner, number, 5, 1, bulk)
    message.far, message.here = True, here
    return message


def test_a_small_one_is_copied_into_a_buffer_before_it_is_delivered() -> None:
    receiving, message = order(), far(0, bulk=False)
    post = Post("obj", True)
    assert receiving.post(post) == []
    (copy,) = receiving.arrive(message)
    assert copy == Copy(message, post)
    assert receiving.transferred(message) == [Deliver(post, message)]
    assert message.state is State.TAKEN


def test_without_a_buffer_it_is_delivered_at_once() -> None:
    receiving, message, post = order(), far(0, bulk=False), Post("obj", False)
    receiving.post(post)
    assert receiving.arrive(message) == [Deliver(post, message)]


@pytest.mark.parametrize("keep_moving", [True, False])
@pytest.mark.parametrize("moving", [True, False])
def test_what_is_here_needs_no_peer(keep_moving: bool, moving: bool) -> None:
    receiving = order()
    messages = [far(number, here=True) for number in range(3)]
    for message in messages[: 2 if moving else 3]:
        receiving.arrive(message)
    if not moving:
        assert messages[2].state is State.ARRIVED, "the limit of moves"
    actions = receiving.lose(keep_moving=keep_moving)
    kept = messages[: 2 if moving else 3]
    assert [message.state for message in kept] == [State.MOVING] * len(kept)
    assert actions == ([] if moving else [Transfer(messages[2], None)])
    posts = [Post("obj", False) for _ in range(4)]
    told = [action for post in posts for action in receiving.post(post)]
    for message in kept:
        told += receiving.transferred(message)
    assert [type(action) for action in told].count(Deliver) == len(kept)
    assert [type(action) for action in told].count(Fail) == 4 - len(kept)


def test_behind_one_that_is_not_here_all_is_lost() -> None:
    receiving = order()
    messages = [far(0, here=True), far(1), far(2), far(3, here=True)]
    for message in messages:
        receiving.arrive(message)
    receiving.lose(keep_moving=False)
    assert [message.state for message in messages] == [
        *(State.MOVING, State.DROPPED, State.GONE, State.GONE)
    ]


def test_the_route_holds_others_than_those_that_are_here() -> None:
    receiving = order()
    busy = [far(number, here=True) for number in range(2)]
    held, here, lost = far(2), far(3, here=True), far(4)
    for message in (*busy, held, here, lost):
        receiving.arrive(message)
    actions = receiving.lose(keep_moving=False, held=1)
    assert actions == [Transfer(held, None), Transfer(here, None)]
    assert lost.state is State.GONE


def test_one_that_does_not_fit_is_discarded_before_it_moved() -> None:
    receiving = order()
    for number in range(2):
        receiving.arrive(far(number, here=True))
    third = far(2, "tensor", here=True)
    receiving.arrive(third)
    posts = [Post("obj", False) for _ in range(3)]
    for post in posts:
        receiving.post(post)
    for message in list(receiving._messages)[:2]:
        actions = receiving.transferred(message)
    assert actions[-2:] == [Mismatch(posts[2], third), Discard(third)]
