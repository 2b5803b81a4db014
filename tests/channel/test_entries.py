"""The line of one key: items in their places, and weights that add up."""

from __future__ import annotations

from aiocomm.channel.entries import Item, Line, Want, exact


def item(place: int, weight: float = 0) -> Item:
    return Item(place, "k", 1, weight, f"payload {place}")


def test_items_have_their_places_whenever_they_come() -> None:
    line = Line()
    for place in (3, 7, 5, 1, 8, 4):
        line.insert(item(place))
    assert [line.pop().place for _ in range(6)] == [1, 3, 4, 5, 7, 8]
    assert line.idle


def test_weights_are_not_rounded() -> None:
    line = Line()
    for place in range(30):
        line.insert(item(place, 0.1))
    for _ in range(20):
        line.pop()
    assert line.weight == 10 * exact(0.1)
    for _ in range(10):
        line.pop()
    assert line.weight == 0


def test_a_line_is_idle_once_nobody_needs_it() -> None:
    line = Line()
    want = Want("c", 1, "k")
    line.wants[want] = None
    assert not line.idle
    del line.wants[want]
    line.held = 1
    assert not line.idle
