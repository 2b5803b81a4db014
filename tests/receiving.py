"""A shell around the receiving order for tests: it knows where every message's bytes are.

It carries actions out the way the scheduler does, except that a move ends when the test says so,
and holds each one to a model of two plain lists: the first live post gets the first message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aiocomm.entries import (
    Copy,
    Credit,
    Deliver,
    Discard,
    Evacuate,
    Fail,
    Incoming,
    Linger,
    Mismatch,
    Post,
    RecvAction,
    Transfer,
)
from aiocomm.ordering import RecvOrder
from aiocomm.window import Dues

BUDGET, COPY_LIMIT, LIMIT, WINDOW_MESSAGES, WINDOW_BYTES = 100, 10, 2, 8, 40
SMALL, LARGE = 5, 40


@dataclass(eq=False)
class Side:
    """The shell's half of a post or a message."""

    kind: str
    body: int | None = None  # sequence of the message whose bytes lie in memory of its own
    buffer: int | None = None  # the same, for the buffer that a post brought
    prefetched: bool = False


@dataclass
class Shell:
    """Carries out what the order says, and holds it to the model."""

    order: RecvOrder = field(
        default_factory=lambda: RecvOrder(
            lambda post, message: post.owner.kind == message.owner.kind,  # type: ignore[attr-defined]
            prefetch_bytes=BUDGET,
            copy_limit=COPY_LIMIT,
            moving_limit=LIMIT,
            window_messages=WINDOW_MESSAGES,
            window_bytes=WINDOW_BYTES,
        )
    )
    posts: list[Post] = field(default_factory=list)  # the model: who waits,
    line: list[Incoming] = field(default_factory=list)  # and for what
    wire: list[Incoming] = field(default_factory=list)  # bulk that nobody asked to take in yet
    moves: list[RecvAction] = field(default_factory=list)
    lingering: list[Incoming] = field(default_factory=list)
    delivered: dict[Incoming, Post] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    failed: list[Post] = field(default_factory=list)
    owed: list[int] = field(default_factory=lambda: [0, 0])
    credited: set[Incoming] = field(default_factory=set)
    next: int = 0
    over: bool = False
    draining: bool = False

    # --- events ---

    def post(self, kind: str = "obj", *, buffer: bool = False) -> Post:
        post = Post(Side(kind), buffer)
        self.posts.append(post)
        self._carry_out(self.order.post(post))
        return post

    def arrive(
        self, kind: str = "obj", size: int = SMALL, *, bulk: bool = False, reluctant: bool = False
    ) -> Incoming:
        side = Side(kind, body=None if bulk else self.next)
        message = Incoming(side, self.next, size, 1 if bulk else size, bulk)
        message.reluctant = reluctant and bulk
        self.next += 1
        self.line.append(message)
        if bulk:
            self.wire.append(message)
        self._carry_out(self.order.arrive(message))
        return message

    def hurry(self, message: Incoming) -> None:
        """Nobody asked for this message in a moment."""
        self.lingering.remove(message)
        self._carry_out(self.order.hurry(message))

    def end(self, message: Incoming) -> None:
        """The move of this message ends well."""
        move = self._pop_move(message)
        side = message.owner
        match move:
            case Transfer(into=None):
                side.body = message.sequence
            case Transfer(into=post):
                post.owner.buffer = message.sequence
            case Copy(into=post):
                post.owner.buffer = side.body
            case Evacuate():
                side.body = message.into.owner.buffer if side.body is None else side.body
                assert side.body == message.sequence
                self._carry_out(self.order.evacuated(message))
                return
        self._carry_out(self.order.transferred(message))

    def cancel(self, post: Post) -> None:
        if post in self.posts:
            self.posts.remove(post)
        self._carry_out(self.order.cancel(post)[1])

    def give_back(self, message: Incoming) -> None:
        del self.delivered[message]
        message.owner.body, message.owner.prefetched = message.sequence, False
        self.line = sorted([*self.line, message], key=lambda each: each.sequence)
        self._carry_out(self.order.give_back(message))

    def fail(self, message: Incoming) -> None:
        self.over = True
        self._pop_move(message)
        if message in self.line:
            del self.line[self.line.index(message) :]
        self._cut(keep_moving=True)
        self._carry_out(self.order.fail(message))

    def lose(self, *, keep_moving: bool, held: int = 0) -> None:
        self.over = True
        self._cut(keep_moving=keep_moving, held=held)
        self._carry_out(self.order.lose(keep_moving=keep_moving, held=held))

    def close(self, *, drain: bool = False) -> list[Post]:
        self.draining = drain and not self.over
        self.over = True
        left = [post for post in self.posts if not self.written(post)]
        if self.draining:
            self._owe(*self.line)
        self.line.clear()
        before = len(self.failed)
        self._carry_out(self.order.close(drain=drain))
        assert left == self.failed[before:]
        assert not (self.draining and self.wire)
        return left

    def turn_away(self, size: int = SMALL, *, bulk: bool = False) -> Incoming:
        """What arrives while a closed side drains."""
        message = Incoming(Side("obj"), self.next, size, 1 if bulk else size, bulk)
        self.next += 1
        if bulk:
            self.wire.append(message)
        self._owe(message)
        self._carry_out(self.order.arrive(message))
        return message

    # --- what the model knows ---

    def written(self, post: Post) -> bool:
        """Whether something moves into the buffer of this post, or out of it."""
        return any(
            move.message.into is post
            if isinstance(move, Evacuate)
            else isinstance(move, Transfer | Copy) and move.into is post
            for move in self.moves
        )

    def move_of(self, message: Incoming) -> Any:
        return next((move for move in self.moves if move.message is message), None)  # type: ignore[union-attr]

    def whole(self, message: Incoming) -> bool:
        moving = isinstance(self.move_of(message), Transfer)
        return message not in self.wire and not moving

    def prefetched(self) -> int:
        """Bytes taken in that nobody had asked for, while they may still be around."""
        messages: set[Any] = {*self.line}
        messages.update(move.message for move in self.moves)  # type: ignore[union-attr]
        return sum(message.size for message in messages if message.owner.prefetched)

    def _cut(self, *, keep_moving: bool, held: int = 0) -> None:
        kept = self.wire[:held]
        for index, message in enumerate(self.line):
            moving = message in kept or (keep_moving and message not in self.wire)
            if not (moving or self.whole(message)):
                del self.line[index:]
                return

    def _pop_move(self, message: Incoming) -> Any:
        move = self.move_of(message)
        self.moves.remove(move)
        return move

    # --- actions ---

    def _carry_out(self, actions: list[RecvAction]) -> None:
        for action in actions:
            self.told.append(type(action).__name__)
            match action:
                case Transfer() | Copy() | Evacuate():
                    assert self.move_of(action.message) is None
                    self._check_move(action)
                    self.moves.append(action)
                case Linger(message=message):
                    assert message is self.wire[0], "only the next one to move may hold up the line"
                    assert self.line.index(message) >= len(self.posts)
                    assert message.reluctant
                    assert message not in self.lingering
                    self.lingering.append(message)
                case Discard(message=message):
                    assert self.draining or message is self.wire[0]
                    if message in self.wire:
                        assert message is self.wire.pop(0)
                case Deliver(post=post, message=message) | Mismatch(post=post, message=message):
                    self._check_pair(action, post, message)
                case Credit(messages=messages, nbytes=nbytes):
                    assert self.draining or not self.over
                    assert messages > 0
                    if self.draining:  # what it turned away is owed bit by bit
                        self.owed = [self.owed[0] - messages, self.owed[1] - nbytes]
                        continue
                    assert [messages, nbytes] == self.owed
                    self.owed = [0, 0]
                case Fail(post=post):
                    assert self.over
                    assert self.posts.index(post) >= len(self.line)
                    assert not self.written(post)
                    self.posts.remove(post)
                    self.failed.append(post)

    def _check_move(self, action: Any) -> None:
        message = action.message
        place = self.line.index(message)
        if isinstance(action, Transfer):
            assert message is self.wire.pop(0), "bulk leaves the wire in its order"
            # What the route holds once all is over moves in whatever the limits are.
            assert len(self.moves) < LIMIT or self.over
            post = self.posts[place] if place < len(self.posts) else None
            assert action.into is None or (action.into is post and post.in_place)
            assert post is None or post.owner.kind == message.owner.kind or self.over
            assert action.into is None or not self.written(action.into)
            message.owner.prefetched = post is None and not self.over
            assert self.prefetched() <= BUDGET
        elif isinstance(action, Copy):
            assert message.owner.body == message.sequence
            assert (message, action.into) == (self.line[0], self.posts[0])
            assert action.into.in_place
            assert not self.written(action.into)
        else:
            assert message.into.owner.buffer == message.sequence

    def _check_pair(self, action: RecvAction, post: Post, message: Incoming) -> None:
        assert (post, message) == (self.posts.pop(0), self.line.pop(0))
        assert not self.written(post), "a buffer is handed back while something moves in or out"
        fit = post.owner.kind == message.owner.kind
        assert isinstance(action, Deliver if fit else Mismatch)
        if fit:
            body = message.owner.body
            if post.in_place and message.into is post:
                body = post.owner.buffer
            assert body == message.sequence
            assert self.move_of(message) is None
            self.delivered[message] = post
        self._owe(message)

    def _owe(self, *messages: Incoming) -> None:
        for message in messages:
            if message not in self.credited:
                self.credited.add(message)
                self.owed[0] += 1
                self.owed[1] += message.charge


def snapshot(order: RecvOrder, *entries: Post | Incoming | None) -> list[dict[str, Any]]:
    """All that an event could change."""
    state = {
        name: list(value)
        if isinstance(value, dict | deque)
        else dict(vars(value))
        if isinstance(value, Dues)
        else value
        for name, value in vars(order).items()
    }
    return [state, *({n: getattr(e, n) for n in e.__slots__} for e in entries if e)]


def shell_at(state: str) -> tuple[Shell, Incoming, Post | None]:
    """A message in this state, and the post whose buffer it has to do with, if any."""
    shell = Shell()
    if state == "ARRIVED":
        return shell, shell.arrive(size=BUDGET + 1, bulk=True), None
    if state == "READY":
        return shell, shell.arrive("tensor", LARGE), None
    if state == "TAKEN":
        post = shell.post()
        return shell, shell.arrive(), post
    if state == "COPYING":
        message = shell.arrive("tensor", LARGE)
        return shell, message, shell.post("tensor", buffer=True)
    post = shell.post("tensor", buffer=True)
    message = shell.arrive("tensor", LARGE, bulk=True)
    if state in ("LEAVING", "READY, post cancelled"):
        shell.cancel(post)
        shell.end(message)
    elif state == "DROPPED":
        shell.lose(keep_moving=False)
    elif state == "GONE":
        shell.lose(keep_moving=False)
        shell.end(message)
    assert message.state.name == state
    return shell, message, post
