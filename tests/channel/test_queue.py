"""The queue of a channel: each transition by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from aiocomm.channel.entries import Accept, Action, Ask, Deliver, End, Grant, Refuse, Want
from aiocomm.channel.queue import Queue
from aiocomm.entries import IllegalTransition


def said(actions: Iterable[Action]) -> list[Any]:
    """Actions as short texts: ``grant p1``, ``deliver c1 ab``, ``refuse c1 EMPTY``."""
    words = []
    for action in actions:
        match action:
            case Grant(ask):
                words.append(f"grant {ask.client}{ask.number}")
            case Accept(ask):
                words.append(f"accept {ask.client}{ask.number}")
            case Deliver(want):
                items = "".join(str(item.payload) for item in want.held)
                words.append(f"deliver {want.client}{want.number} {items}")
            case Refuse(refused, reason):
                words.append(f"refuse {refused.client}{refused.number} {reason.name}")
            case End():
                words.append("end")
    return words


class Bench:
    """A queue that counts numbers by itself."""

    def __init__(self, maxsize: int = 0, max_bytes: int = 0) -> None:
        self.queue = Queue(maxsize, max_bytes)
        self.numbers: dict[str, int] = {}

    def _next(self, client: str) -> int:
        self.numbers[client] = self.numbers.get(client, 0) + 1
        return self.numbers[client]

    def ask(self, client: str = "p", **fields: Any) -> list[Any]:
        fields = {"key": "k", "nbytes": 1, **fields}
        return said(self.queue.ask(Ask(client, self._next(client), **fields)))

    def put(self, payload: str, client: str = "p", **fields: Any) -> list[Any]:
        """Ask and put at once, where there is room."""
        assert self.ask(client, **fields) == [f"grant {client}{self.numbers[client]}"]
        actions = said(self.queue.put(client, self.numbers[client], payload))
        actions.remove(f"accept {client}{self.numbers[client]}")
        return actions

    def get(self, client: str = "c", key: str = "k", **fields: Any) -> list[Any]:
        return said(self.queue.get(Want(client, self._next(client), key, **fields)))


def test_items_come_in_order_under_each_key() -> None:
    bench = Bench()
    for payload, key in [("a", "k"), ("x", "l"), ("b", "k")]:
        assert bench.put(payload, key=key) == []
    assert (bench.queue.qsize(), bench.queue.qsize("k"), bench.queue.qsize("none")) == (3, 2, 0)
    assert bench.get() == ["deliver c1 a"]
    assert bench.get() == ["deliver c2 b"]
    assert bench.get(key="l") == ["deliver c3 x"]
    assert bench.queue.qsize() == 0


def test_who_waited_first_is_served_first() -> None:
    bench = Bench()
    assert bench.get("c") == bench.get("d") == []
    assert bench.put("a") == ["deliver c1 a"]
    assert bench.put("b") == ["deliver d1 b"]


def test_room_is_taken_from_the_grant_until_the_item_was_taken() -> None:
    bench = Bench(maxsize=1)
    bench.put("a")
    assert bench.queue.full
    assert bench.ask() == []
    assert bench.get() == ["deliver c1 a"]
    assert bench.queue.full, "what a consumer may still give back takes room"
    assert said(bench.queue.taken("c", 1)) == ["grant p2"]
    assert said(bench.queue.put("p", 2, "b")) == ["accept p2"]


def test_bytes_are_reserved_too() -> None:
    bench = Bench(max_bytes=10)
    bench.put("a", nbytes=6)
    assert bench.ask(nbytes=6) == []
    assert bench.get() == ["deliver c1 a"]
    assert said(bench.queue.taken("c", 1)) == ["grant p2"]
    assert bench.queue.nbytes == 6
    with pytest.raises(IllegalTransition, match="never find room"):
        bench.ask(nbytes=11)
    with pytest.raises(IllegalTransition, match="never find room"):
        bench.ask(nbytes=-1)


def test_nobody_overtakes_a_large_item() -> None:
    bench = Bench(max_bytes=10)
    bench.put("a", nbytes=6)
    assert bench.ask("p", nbytes=8) == []
    assert bench.ask("p", nbytes=1) == []
    assert bench.ask("q", nbytes=1) == []
    bench.get()
    assert said(bench.queue.taken("c", 1)) == ["grant p2", "grant q1", "grant p3"]


def test_producers_take_turns() -> None:
    bench = Bench(maxsize=1)
    bench.put("a", "p")
    for client in "pppqr":
        assert bench.ask(client) == []
    granted = []
    for number in range(1, 6):
        bench.get()
        granted += said(bench.queue.taken("c", number))
        client, place = granted[-1].split()[1][0], int(granted[-1][-1])
        bench.queue.put(client, place, "x")
    assert granted == ["grant p2", "grant q1", "grant r1", "grant p3", "grant p4"]


def test_nowait_never_waits() -> None:
    bench = Bench(maxsize=1)
    assert bench.get(nowait=True) == ["refuse c1 EMPTY"]
    bench.put("a")
    assert bench.ask(nowait=True) == ["refuse p2 FULL"]
    assert bench.get(nowait=True) == ["deliver c2 a"]
    assert bench.ask("q") == []
    bench.queue.taken("c", 2)
    bench.queue.withdraw("q", 1)
    assert bench.ask(nowait=True) == ["grant p3"]


def test_nowait_does_not_overtake() -> None:
    bench = Bench(max_bytes=10)
    bench.put("a", nbytes=5)
    bench.ask("q", nbytes=6)
    assert bench.ask("p", nbytes=1, nowait=True) == ["refuse p2 FULL"]


@pytest.mark.parametrize("granted", [True, False])
def test_a_withdrawn_ask_leaves_no_half_item(granted: bool) -> None:
    bench = Bench(maxsize=1)
    if not granted:
        bench.put("a")
    assert bench.ask("q") == (["grant q1"] if granted else [])
    assert bench.ask("r") == []
    assert said(bench.queue.withdraw("q", 1)) == (["grant r1"] if granted else [])
    assert bench.queue.count == 1
    with pytest.raises(IllegalTransition, match="without a grant"):
        bench.queue.put("q", 1, "b")
    assert bench.queue.withdraw("nobody", 1) == []


def test_a_producer_that_leaves_takes_its_room_with_it() -> None:
    bench = Bench(maxsize=2)
    bench.put("a", "p")
    bench.ask("p")
    bench.ask("p")
    assert bench.ask("q") == []
    assert said(bench.queue.leave("p")) == ["grant q1"]
    assert bench.queue.qsize() == 1, "what it had put stays"
    assert bench.queue.leave("p") == []


# --- delivery ---


def test_what_is_given_back_takes_its_old_place() -> None:
    bench = Bench()
    for payload in "abc":
        bench.put(payload)
    assert bench.get("c") == ["deliver c1 a"]
    assert bench.get("d") == ["deliver d1 b"]
    assert said(bench.queue.cancel("d", 1)) == []
    assert said(bench.queue.leave("c")) == []
    assert [bench.get("e")[0][-1] for _ in "abc"] == ["a", "b", "c"]


def test_what_is_given_back_goes_to_who_waits() -> None:
    bench = Bench()
    bench.put("a")
    bench.get("c")
    assert bench.get("d") == []
    assert said(bench.queue.leave("c")) == ["deliver d1 a"]


def test_a_cancelled_get_waits_no_more() -> None:
    bench = Bench()
    bench.get("c")
    assert bench.queue.cancel("c", 1) == []
    assert bench.queue.cancel("c", 1) == [], "it crossed the delivery"
    assert bench.put("a") == []
    assert bench.get("d") == ["deliver d1 a"]


def test_only_what_is_held_can_be_taken() -> None:
    bench = Bench()
    bench.get("c")
    for number in (1, 2):
        with pytest.raises(IllegalTransition, match="holds nothing"):
            bench.queue.taken("c", number)


def test_numbers_are_used_once() -> None:
    queue = Queue()
    queue.ask(Ask("p", 1, "k", 1))
    with pytest.raises(IllegalTransition, match="made before"):
        queue.ask(Ask("p", 1, "k", 1))
    queue.get(Want("p", 1, "k"))
    with pytest.raises(IllegalTransition, match="made before"):
        queue.get(Want("p", 1, "k"))


# --- batches ---


def test_a_batch_stops_when_it_reaches_or_exceeds_its_weight() -> None:
    bench = Bench()
    for payload, weight in [("a", 2), ("b", 1), ("c", 3), ("d", 9)]:
        bench.put(payload, weight=weight)
    assert bench.get(target=3) == ["deliver c1 ab"]
    assert bench.get(target=2) == ["deliver c2 c"]
    assert bench.get(target=4) == ["deliver c3 d"], "a first item that exceeds it comes alone"


def test_a_batch_waits_until_the_weight_is_there() -> None:
    bench = Bench()
    assert bench.get(target=3) == []
    assert bench.put("a", weight=2) == []
    assert bench.get("d") == [], "and nobody overtakes it"
    assert bench.put("b", weight=2) == ["deliver c1 ab"]
    assert bench.put("c") == ["deliver d1 c"]


def test_weights_add_up_exactly() -> None:
    bench = Bench()
    for payload in "abcd":
        bench.put(payload, weight=0.1)
    assert bench.get() == ["deliver c1 a"]
    assert bench.get(target=0.3) == ["deliver c2 bcd"]


def test_a_batch_that_can_never_be_served_is_refused() -> None:
    bench = Bench(maxsize=2)
    bench.put("a", weight=1)
    bench.put("b", weight=1)
    assert bench.get(target=5) == [], "nobody waits for room yet"
    assert bench.ask(weight=1) == ["refuse c1 STUCK"]
    assert bench.get(target=5) == ["refuse c2 STUCK"]
    assert bench.get(target=2) == ["deliver c3 ab"]


def test_a_batch_waits_while_others_can_make_room() -> None:
    bench = Bench(maxsize=2)
    bench.put("a", weight=1)
    bench.put("x", key="l")
    bench.get(target=2)
    assert bench.ask(weight=1) == []
    assert bench.get("d", key="l") == ["deliver d1 x"]
    assert said(bench.queue.taken("d", 1)) == ["grant p3"]
    assert said(bench.queue.put("p", 3, "b")) == ["accept p3", "deliver c1 ab"]


# --- ends ---


def test_close_refuses_puts_and_lets_gets_drain() -> None:
    bench = Bench(maxsize=2)
    bench.put("a")
    bench.ask()
    bench.ask()
    assert bench.get(key="l") == []
    assert said(bench.queue.close()) == ["refuse p2 CLOSED", "refuse p3 CLOSED", "refuse c1 CLOSED"]
    assert bench.queue.put("p", 2, "b") == [], "it crossed the refusal"
    assert bench.ask() == ["refuse p4 CLOSED"]
    assert bench.get() == ["deliver c2 a"]
    assert bench.get("d") == [], "what another holds may come back"
    assert said(bench.queue.taken("c", 2)) == ["refuse d1 CLOSED", "end"]
    assert bench.get() == ["refuse c3 CLOSED"]
    assert bench.queue.close() == []


def test_what_comes_back_after_close_is_delivered() -> None:
    bench = Bench()
    bench.put("a")
    bench.get("c")
    assert said(bench.queue.close()) == []
    assert bench.get("d") == []
    assert said(bench.queue.leave("c")) == ["deliver d1 a"]
    assert said(bench.queue.taken("d", 1)) == ["end"]


def test_a_batch_takes_what_is_left_after_close() -> None:
    bench = Bench()
    bench.put("a", weight=1)
    bench.get(target=5)
    assert said(bench.queue.close()) == ["deliver c1 a"]


def test_an_empty_channel_ends_with_its_close() -> None:
    bench = Bench()
    bench.ask()
    assert said(bench.queue.close()) == ["refuse p1 CLOSED", "end"]


def test_abort_drops_what_is_there() -> None:
    bench = Bench()
    bench.put("a")
    bench.put("b")
    bench.get("c")
    bench.get("d", key="l")
    assert said(bench.queue.abort()) == ["refuse d1 CLOSED", "end"]
    assert bench.queue.taken("c", 1) == [], "it crossed the abort"
    assert (bench.queue.count, bench.queue.nbytes, bench.queue.qsize()) == (0, 0, 0)
    assert bench.queue.abort() == []


def test_abort_after_close_ends_what_still_waits() -> None:
    bench = Bench()
    bench.put("a")
    bench.get("c")
    bench.queue.close()
    assert bench.get("d") == []
    assert said(bench.queue.abort()) == ["refuse d1 CLOSED", "end"]


def test_of_a_batch_one_is_spoiled_and_the_others_go_back() -> None:
    bench = Bench(maxsize=3)
    for payload in "abc":
        bench.put(payload, weight=1)
    bench.ask(weight=1)
    bench.get(target=3)
    bench.get("d")
    for place in (-1, 3):
        with pytest.raises(IllegalTransition, match="holds no item"):
            bench.queue.spoiled("c", 1, place)
    assert said(bench.queue.spoiled("c", 1, 1)) == ["grant p4", "deliver d1 a"]
    assert (bench.queue.count, bench.queue.qsize()) == (3, 1)
    with pytest.raises(IllegalTransition, match="holds no item"):
        bench.queue.spoiled("c", 1, 0)
    bench.queue.abort()
    assert bench.queue.spoiled("d", 1, 0) == [], "it crossed the abort"


def test_the_last_item_of_a_closed_channel_may_be_spoiled() -> None:
    bench = Bench()
    bench.put("a")
    bench.get()
    bench.get("d")
    bench.queue.close()
    assert said(bench.queue.spoiled("c", 1, 0)) == ["refuse d1 CLOSED", "end"]
    assert (bench.queue.count, bench.queue.nbytes) == (0, 0)


def test_nothing_is_kept_of_keys_that_are_done_with() -> None:
    bench = Bench()
    for number in range(1, 100):
        bench.put("a", key=f"key {number}")
        bench.get(key=f"key {number}")
        bench.queue.taken("c", number)
        bench.get(key="other", nowait=True)
        bench.numbers["c"] -= 1
    assert bench.queue._lines == {}
