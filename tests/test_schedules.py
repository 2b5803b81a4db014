"""The order of the receiving end: every schedule against a simple model of two lists."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from .receiving import BUDGET, LARGE, LIMIT, SMALL, WINDOW_BYTES, WINDOW_MESSAGES, Shell

KINDS = st.sampled_from(["obj", "obj", "obj", "tensor"])


class Schedules(RuleBasedStateMachine):
    """Any calls, arrivals, cancellations, ends of moves and losses, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell()

    @rule(kind=KINDS, buffer=st.booleans())
    def post(self, kind: str, buffer: bool) -> None:
        self.shell.post(kind, buffer=buffer)

    @precondition(lambda self: not self.shell.over)
    @rule(
        kind=KINDS,
        size=st.sampled_from([0, SMALL, LARGE, BUDGET]),
        bulk=st.booleans(),
        reluctant=st.booleans(),
    )
    def arrive(self, kind: str, size: int, bulk: bool, reluctant: bool) -> None:
        self.shell.arrive(kind, size, bulk=bulk, reluctant=reluctant)

    @precondition(lambda self: self.shell.lingering)
    @rule(data=st.data())
    def nobody_asked_in_time(self, data: st.DataObject) -> None:
        self.shell.hurry(data.draw(st.sampled_from(self.shell.lingering)))

    @precondition(lambda self: self.shell.moves)
    @rule(data=st.data())
    def move_ends(self, data: st.DataObject) -> None:
        self.shell.end(data.draw(st.sampled_from(self.shell.moves)).message)  # type: ignore[union-attr]

    @precondition(lambda self: self.shell.posts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.shell.cancel(data.draw(st.sampled_from(self.shell.posts)))

    @precondition(lambda self: self.shell.delivered)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.shell.give_back(data.draw(st.sampled_from([*self.shell.delivered])))

    @precondition(lambda self: self.shell.moves)
    @rule(data=st.data(), luck=st.integers(0, 5))
    def move_fails(self, data: st.DataObject, luck: int) -> None:
        if luck == 5:
            self.shell.fail(data.draw(st.sampled_from(self.shell.moves)).message)  # type: ignore[union-attr]

    @rule(keep_moving=st.booleans(), luck=st.integers(0, 15))
    def lose(self, keep_moving: bool, luck: int) -> None:
        if luck == 15:
            self.shell.lose(keep_moving=keep_moving)

    @rule(luck=st.integers(0, 25), drain=st.booleans())
    def close(self, luck: int, drain: bool) -> None:
        if luck == 25:
            self.shell.close(drain=drain)

    @precondition(lambda self: self.shell.draining)
    @rule(size=st.sampled_from([0, SMALL, LARGE, BUDGET]), bulk=st.booleans())
    def turn_away(self, size: int, bulk: bool) -> None:
        self.shell.turn_away(size, bulk=bulk)

    @invariant()
    def agrees_with_the_model(self) -> None:
        shell, order = self.shell, self.shell.order
        assert (order.posted, order.waiting) == (len(shell.posts), len(shell.line))
        assert order.moving == sum(move.message in shell.line for move in shell.moves)  # type: ignore[union-attr]

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        shell = self.shell
        if not shell.moves:
            assert not (shell.posts and shell.line)
        if shell.over:
            assert all(shell.written(post) for post in shell.posts[len(shell.line) :])

    @invariant()
    def bulk_moves_in_as_soon_as_it_may(self) -> None:
        shell = self.shell
        if not shell.wire or shell.over or len(shell.moves) >= LIMIT:
            return
        message = shell.wire[0]
        place = shell.line.index(message)
        if place < len(shell.posts):
            assert shell.posts[place].owner.kind != message.owner.kind  # type: ignore[attr-defined]
        elif message.reluctant:
            assert message in shell.lingering
        else:
            assert shell.prefetched() + message.size > BUDGET

    @invariant()
    def credit_is_given_back_in_quarters(self) -> None:
        if not self.shell.over:
            assert self.shell.owed[0] < WINDOW_MESSAGES // 4
            assert self.shell.owed[1] < WINDOW_BYTES // 4

    def teardown(self) -> None:
        shell = self.shell
        for message in [*shell.lingering]:
            shell.hurry(message)
        self.end_all_moves()
        self.nobody_waits_in_vain()
        for message in [*shell.line]:  # whatever is left is whole, or moves in for the next post
            shell.post(message.owner.kind)  # type: ignore[attr-defined]
            self.end_all_moves()
        assert not shell.line
        if not shell.over:
            for post in [*shell.posts]:
                shell.cancel(post)
            shell.arrive("obj", BUDGET, bulk=True)
            assert len(shell.moves) == 1, "the budget leaked"

    def end_all_moves(self) -> None:
        for _ in range(4 * len(self.shell.line) + len(self.shell.moves) + 1):
            if self.shell.moves:
                self.shell.end(self.shell.moves[0].message)  # type: ignore[union-attr]
        assert not self.shell.moves


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40)
