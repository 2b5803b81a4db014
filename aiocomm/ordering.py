"""The order of messages at the receiving end, as a pure state machine.

Events go in, actions come out; nothing here waits, allocates buffers, or knows of event loops,
tensors or sockets (neither asyncio nor torch may be imported). ``scheduler`` is the shell that
carries the actions out. Everything hard about order and cancellation is in this file so that a
test can drive it through every schedule. ``SendOrder``, the other end, comes from ``window.py``.

Posts (calls of recv) and messages stand in two queues, and the first live post always gets the
first message. Nothing is tied earlier, so a cancelled post just leaves its queue. The exception is
a message that moves straight into a post's own buffer::

    message  event                                        next      action
    -------  -------------------------------------------  --------  ------------------------------
    (none)   arrive, inline                               READY
    (none)   arrive, bulk                                 ARRIVED
    ARRIVED  its place in the line has a post that fits,  MOVING    Transfer (into the buffer of
             or the prefetch budget has room                        that post, if it has one)
    ARRIVED  lose, and its route holds it whole           MOVING    Transfer
    ARRIVED  reluctant, no post for it yet                ARRIVED   Linger (once)
    ARRIVED  hurry                                        ARRIVED   none: reluctant no more
    ARRIVED  first in line with a post that does not fit  GONE      Mismatch, Discard
    MOVING   transferred                                  READY
    MOVING   transferred, its post cancelled              LEAVING   Evacuate (out of that buffer)
    LEAVING  evacuated                                    READY
    READY    first in line with a post that fits          TAKEN     Deliver
    READY    the same, large, outside the post's buffer   COPYING   Copy (into that buffer)
    COPYING  transferred, its post cancelled or not       READY
    READY    first in line with a post that does not fit  GONE      Mismatch
    READY    holds the buffer of a post that is due an    LEAVING   Evacuate
             earlier message, or is cancelled
    TAKEN    give_back                                    READY     (by sequence, in its old place)
    any      lost or failed, before it was whole; close   GONE      with every message behind it
    (none)   arrive while ``draining``                    GONE      Discard, as at the close

A message that is ``far`` belongs in memory that takes time to reach: it is delivered like a large
one however small it is, and copied likewise. One whose bytes are ``here`` needs no peer for its
move: it stands ARRIVED and MOVING as bulk does, and neither a loss nor ``keep_moving`` matters.

A message that is dropped while it moves (MOVING, COPYING, LEAVING) is DROPPED until the move ends,
then GONE. A post that nothing will serve gets ``Fail``, but only once nothing moves into its
buffer, because a call that failed hands the buffer back to the caller.

An illegal event raises ``IllegalTransition`` and changes nothing. Rejected: tying each post to its
message by number at the call (a cancelled receive would lose the message or shift every later
one), and tying only on arrival (the receive of a large tensor could not use the caller's buffer).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from .entries import (
    Copy,
    Deliver,
    Discard,
    Evacuate,
    Fail,
    IllegalTransition,
    Incoming,
    Linger,
    Mismatch,
    Post,
    RecvAction,
    State,
    Transfer,
)
from .window import Dues, SendOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["IllegalTransition", "RecvOrder", "SendOrder"]

# Python 3.11 takes 60 ns to find a member in its enum, and 5 to find a global.
NEW, QUEUED, ARRIVED, MOVING = State.NEW, State.QUEUED, State.ARRIVED, State.MOVING
COPYING, LEAVING, READY = State.COPYING, State.LEAVING, State.READY
TAKEN, DROPPED, GONE = State.TAKEN, State.DROPPED, State.GONE
WHOLE = (READY, COPYING, LEAVING)  # every byte is on this side
ON_THE_MOVE = (MOVING, COPYING, LEAVING)


class RecvOrder:
    """Order of the receiving end: which message goes to which call, and when it may move.

    Args:
        fits: whether a post takes a message (kind, and for a buffer dtype, shape and device).
        prefetch_bytes: bytes of bulk messages that may move in before a post asks for them.
        copy_limit: bytes up to which a copy into a post's buffer is part of its delivery.
        moving_limit: messages on the move at which no further transfer begins.
        window_messages: messages the peer may leave unreceived here.
        window_bytes: the same, in bytes of inline messages.
    """

    def __init__(
        self,
        fits: Callable[[Post, Incoming], bool],
        *,
        prefetch_bytes: int,
        copy_limit: int,
        moving_limit: int,
        window_messages: int,
        window_bytes: int,
    ) -> None:
        self._fits = fits
        self._prefetch_left = prefetch_bytes
        self._copy_limit = copy_limit
        self._moving_limit = moving_limit
        self._dues = Dues(window_messages, window_bytes)
        self._posts: OrderedDict[Post, None] = OrderedDict()
        self._messages: deque[Incoming] = deque()  # by sequence
        self._begun = 0  # messages at the head of the line that are past ARRIVED
        self._moves = 0  # of which ``_dropped`` bring messages that were dropped since
        self._dropped = 0
        self.expected = 0  # sequence number of the message that arrives next
        self.over = False
        self.draining = False  # closed on this side, but what comes is still taken, and dropped

    @property
    def deaf(self) -> bool:
        """Whether nothing more may arrive."""
        return self.over and not self.draining

    @property
    def posted(self) -> int:
        """Calls of recv that wait."""
        return len(self._posts)

    @property
    def waiting(self) -> int:
        """Messages that arrived and wait for a call of recv."""
        return len(self._messages)

    @property
    def moving(self) -> int:
        """Messages on the move that somebody may still get."""
        return self._moves - self._dropped

    def arrived(self) -> list[Incoming]:
        """Bulk messages that have not begun to move in, in order."""
        return [message for message in self._messages if message.state is ARRIVED]

    def post(self, post: Post) -> list[RecvAction]:
        """A call of recv: takes its place at the end of the line."""
        if post.state is not NEW:
            raise IllegalTransition(f"post of {post}")
        post.state = QUEUED
        self._posts[post] = None
        return self._advance() if self._messages or self.over else []

    def arrive(self, message: Incoming) -> list[RecvAction]:
        """The envelope of the next message."""
        if message.sequence != self.expected or self.deaf or message.state is not NEW:
            raise IllegalTransition(f"arrival of {message}; the next is {self.expected}")
        self.expected += 1
        if self.draining:
            turned_away, message.state = self._turn_away([message]), GONE
            return turned_away
        if self._posts and not self._messages and not (message.bulk or message.far):
            # A short cut for the commonest case, to where ``_advance`` would come by the queue.
            post = next(iter(self._posts))
            if message.size <= self._copy_limit and self._fits(post, message):
                del self._posts[post]
                post.state, message.state = GONE, TAKEN
                actions: list[RecvAction] = [Deliver(post, message)]
                self._dues.add(message, actions, deaf=False)
                return actions
        if message.bulk:
            message.state = ARRIVED
        else:
            message.state = READY
            if self._begun == len(self._messages):
                self._begun += 1
        self._messages.append(message)
        return self._advance()

    def hurry(self, message: Incoming) -> list[RecvAction]:
        """A reluctant message has lingered long enough: the prefetch budget may take it in."""
        message.reluctant = False
        return self._advance() if message.state is ARRIVED else []

    def transferred(self, message: Incoming) -> list[RecvAction]:
        """A transfer or copy into memory is over, the bytes are there."""
        was = self._end_move(message, (MOVING, COPYING))
        if was is not DROPPED:
            message.state = READY
            if message.into is not None and message.into.state is GONE:
                if was is MOVING:
                    return [self._evacuate(message), *self._advance()]
                self._let_go(message)  # what was copied is still where it was
        return self._advance()

    def evacuated(self, message: Incoming) -> list[RecvAction]:
        """The message lies in memory of its own."""
        if self._end_move(message, (LEAVING,)) is not DROPPED:
            self._let_go(message)
            message.state = READY
        return self._advance()

    def cancel(self, post: Post) -> tuple[bool, list[RecvAction]]:
        """A call of recv is taken back; what it might have got goes to the next one."""
        if post.state is not QUEUED:
            return False, []
        post.state = GONE
        del self._posts[post]
        actions: list[RecvAction] = []
        if post.holds is not None and post.holds.state is READY:
            actions.append(self._evacuate(post.holds))
        return True, actions + self._advance()

    def give_back(self, message: Incoming) -> list[RecvAction]:
        """A delivered message was not taken after all: it is in line again, as it was before."""
        if message.state is not TAKEN:
            raise IllegalTransition(f"return of {message}")
        message.state, message.into = READY, None
        place = bisect_left(self._messages, message.sequence, key=attrgetter("sequence"))
        self._messages.insert(place, message)
        self._begun += 1
        return self._advance()

    def fail(self, message: Incoming) -> list[RecvAction]:
        """A move broke: the message and all behind it are lost, the direction is over."""
        if self._end_move(message, ON_THE_MOVE) is not DROPPED:
            message.state = READY  # it moves no more
            self._truncate(self._messages.index(message))
        return self.lose(keep_moving=True)

    def lose(self, *, keep_moving: bool, held: int = 0) -> list[RecvAction]:
        """No more messages will come.

        Args:
            keep_moving: transfers under way may still complete (the peer said goodbye after it
                had sent them); otherwise what they bring is lost too.
            held: so many messages that have not begun to move in lie with the route, whole; they
                move in now, whoever asks for them.
        """
        self.over = True
        for index, message in enumerate(self._messages):
            if message.state is ARRIVED and (held or message.here):
                held -= not message.here
            elif message.state not in WHOLE and not (
                message.state is MOVING and (keep_moving or message.here)
            ):
                self._truncate(index)
                break
        return self._advance()

    def close(self, *, drain: bool = False) -> list[RecvAction]:
        """Closed on this side: every message is dropped, and with ``drain`` discarded too.

        A post with a move into its buffer gets ``Fail`` when that ends.
        """
        self.draining = drain and not self.over
        self.over = True
        actions = self._turn_away(self._messages) if self.draining else []
        self._truncate(0)
        return [*self._fail_unserved(), *actions]

    # --- the moves ---

    def _end_move(self, message: Incoming, legal: tuple[State, ...]) -> State:
        """Count the move as over. Returns the state until now."""
        was = message.state
        if was is not DROPPED and was not in legal:
            raise IllegalTransition(f"end of a move of {message}")
        self._moves -= 1
        if was is DROPPED:
            self._dropped -= 1
            self._drop(message)
        return was

    def _evacuate(self, message: Incoming) -> Evacuate:
        message.state = LEAVING
        self._moves += 1
        return Evacuate(message)

    def _let_go(self, message: Incoming) -> None:
        if message.into is not None and message.into.holds is message:
            message.into.holds = None
        message.into = None

    def _free(self, message: Incoming) -> None:
        """Its memory no longer counts as taken in before anyone asked."""
        if message.prefetched:
            message.prefetched = False
            self._prefetch_left += message.size

    def _drop(self, message: Incoming) -> None:
        if message.state in ON_THE_MOVE:
            message.state = DROPPED
            self._dropped += 1
        else:
            message.state = GONE
            self._let_go(message)
            self._free(message)

    def _turn_away(self, messages: Iterable[Incoming]) -> list[RecvAction]:
        actions: list[RecvAction] = []
        for message in messages:
            moved = message.bulk and message.state is READY
            if not moved and message.state not in ON_THE_MOVE:  # with its route, or held by it
                actions.append(Discard(message))
            if not message.credited:
                self._dues.add(message, actions, deaf=self.deaf)
        return actions

    def _truncate(self, index: int) -> None:
        while len(self._messages) > index:
            self._drop(self._messages.pop())
        self._begun = min(self._begun, index)

    def _fail_unserved(self) -> list[Fail]:
        surplus = islice(self._posts, len(self._messages), None)
        unserved = [post for post in surplus if post.holds is None]
        for post in unserved:
            post.state = GONE
            del self._posts[post]
        return [Fail(post) for post in unserved]

    def _advance(self) -> list[RecvAction]:
        actions: list[RecvAction] = []
        while self._messages and self._posts and self._serve_first(actions):
            pass
        if self._begun < len(self._messages):
            self._begin_moves(actions)
        if self.over:
            actions.extend(self._fail_unserved())
        return actions

    def _serve_first(self, actions: list[RecvAction]) -> bool:
        """Serve the first post with the first message; False when they have to wait."""
        message = self._messages[0]
        post = next(iter(self._posts))
        held = post.holds
        if held is not None and held is not message:
            # This post was moved up by a cancellation: its buffer holds a later message.
            if held.state is READY:
                actions.append(self._evacuate(held))
            return False
        if not self._fits(post, message):
            actions.append(Mismatch(post, message))
            if message.state is ARRIVED:
                actions.append(Discard(message))
            self._drop(message)
        elif message.state is not READY:
            return False
        elif (
            post.in_place
            and message.into is not post
            and (message.size > self._copy_limit or message.far)
        ):
            message.state, message.into, post.holds = COPYING, post, message
            self._moves += 1
            actions.append(Copy(message, post))
            return False
        else:
            actions.append(Deliver(post, message))
            message.state = TAKEN
            post.holds = None  # no cycle of the two; ``into`` tells the shell where the bytes are
            self._free(message)
        self._messages.popleft()
        if self._begun:  # an inline one behind what was discarded just now is not counted yet
            self._begun -= 1
        del self._posts[post]
        post.state = GONE
        if not message.credited:
            self._dues.add(message, actions, deaf=self.deaf)
        return True

    def _begin_moves(self, actions: list[RecvAction]) -> None:
        """Let bulk messages move in, in their order, as far as posts, budget and limit allow."""
        while self._begun < len(self._messages):
            message = self._messages[self._begun]
            if message.state is ARRIVED:
                if self._moves >= self._moving_limit and not self.over:
                    return
                post = next(islice(self._posts, self._begun, None), None)
                if self.over and (post is None or not self._fits(post, message)):
                    pass  # now or never
                elif post is None:
                    if message.reluctant:
                        if not message.lingers:
                            message.lingers = True
                            actions.append(Linger(message))
                        return
                    if message.size > self._prefetch_left:
                        return
                    message.prefetched = True
                    self._prefetch_left -= message.size
                elif not self._fits(post, message):
                    return  # decided when both are first in line: they may still shift
                elif post.in_place and post.holds is None:
                    message.into, post.holds = post, message
                message.state = MOVING
                self._moves += 1
                actions.append(Transfer(message, message.into))
            self._begun += 1
