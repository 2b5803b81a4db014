"""The order of messages, as two pure state machines: one for each end of a direction.

Events go in, actions come out; nothing here waits, allocates buffers, or knows of event loops,
tensors or sockets (neither asyncio nor torch may be imported). ``scheduler.py`` is the shell that
carries the actions out. Everything hard about order, windows and cancellation is in this file so
that a test can drive it through every schedule.

The sending end (``SendOrder``), one row per outgoing message::

    state    event                                        next      action
    -------  -------------------------------------------  --------  ------------------------------
    QUEUED   its turn, credit left, nobody starting       STARTED   Start (takes its sequence)
    QUEUED   cancel                                       GONE
    QUEUED   close                                        GONE      returned by close()
    STARTED  finish                                       GONE
    STARTED  cancel                                       STARTED   none: finishes unseen
    STARTED  close                                        GONE      returned by close()

The receiving end (``RecvOrder``): posts (calls of recv) and messages stand in two queues, and the
first live post always gets the first message. Nothing is tied earlier, so a cancelled post just
leaves its queue. The one exception is a message that moves straight into a post's own buffer::

    message  event                                        next      action
    -------  -------------------------------------------  --------  ------------------------------
    (none)   arrive, inline                               READY
    (none)   arrive, bulk                                 ARRIVED
    ARRIVED  its place in the line has a post that fits,  MOVING    Transfer (into the buffer of
             or the prefetch budget has room                        that post, if it has one)
    ARRIVED  first in line with a post that does not fit  GONE      Mismatch, Discard
    MOVING   transferred                                  READY
    MOVING   transferred, its post cancelled              MOVING    Evacuate (out of that buffer)
    MOVING   evacuated                                    READY
    READY    first in line with a post that fits          GONE      Deliver
    READY    the same, large, outside the post's buffer   MOVING    Copy (into that buffer)
    READY    first in line with a post that does not fit  GONE      Mismatch
    READY    holds the buffer of a post that is due an    MOVING    Evacuate
             earlier message (a cancellation moved up)
    any      lost or failed, before READY                 GONE      with every message behind it

An illegal event raises ``IllegalTransition`` and changes nothing. Rejected: tying each post to its
message by number at the call (a cancelled receive would lose the message or shift every later
one), and tying only on arrival (the receive of a large tensor could not use the caller's buffer).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice

from .entries import (
    Copy,
    Credit,
    Deliver,
    Discard,
    Evacuate,
    Fail,
    Incoming,
    Mismatch,
    Outgoing,
    Post,
    RecvAction,
    Start,
    State,
    Transfer,
)


class IllegalTransition(Exception):
    """An event that the state does not allow: a bug in the shell, never the user's fault."""


class SendOrder:
    """Order of the sending end: who may start, and when.

    Nothing starts before the peer granted credit (its window, in messages and bytes). A message
    larger than what is left waits, except when nothing at all is unreceived at the peer: then it
    starts however large it is, so a window smaller than one message cannot stop the line.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[Outgoing, None] = OrderedDict()
        self._started: dict[int, Outgoing] = {}
        self._starting: Outgoing | None = None
        self._sequence = 0
        self._messages = 0  # credit left, in messages
        self._nbytes = 0  # credit left, in bytes
        self._unreceived = 0  # messages started and not yet credited back
        self._granted = False
        self.closed = False

    @property
    def pending(self) -> int:
        """Messages not finished yet."""
        return len(self._queue) + len(self._started)

    @property
    def queued(self) -> int:
        """Messages not started yet."""
        return len(self._queue)

    def started_with(self, sequence: int) -> Outgoing | None:
        """The unfinished message of that sequence number."""
        return self._started.get(sequence)

    def submit(self, message: Outgoing) -> list[Start]:
        """A call of send: takes its place at the end of the line."""
        if self.closed or message.state is not State.NEW:
            raise IllegalTransition(f"submit of {message} (closed: {self.closed})")
        message.state = State.QUEUED
        self._queue[message] = None
        return self._advance()

    def grant(self, messages: int, nbytes: int, *, first: bool = False) -> list[Start]:
        """Credit from the peer: its whole window (first), or what it has taken since."""
        if not first:
            self._unreceived -= messages
        self._messages += messages
        self._nbytes += nbytes
        self._granted = True
        return self._advance()

    def started(self, message: Outgoing) -> list[Start]:
        """A slow start is over; the next in line may start."""
        if self._starting is not message:
            raise IllegalTransition(f"{message} was not starting")
        self._starting = None
        return self._advance()

    def finish(self, message: Outgoing) -> list[Start]:
        """The message has left; its buffer is free."""
        if message.state is not State.STARTED:
            raise IllegalTransition(f"finish of {message}")
        message.state = State.GONE
        del self._started[message.sequence]
        return self._advance() if self._queue else []

    def cancel(self, message: Outgoing) -> tuple[bool, list[Start]]:
        """Take back a message that has not started.

        Returns:
            Whether it was taken back, and what starts in its stead.
        """
        if message.state is not State.QUEUED:
            return False, []
        message.state = State.GONE
        del self._queue[message]
        return True, self._advance()

    def close(self) -> list[Outgoing]:
        """The direction is over. Returns every unfinished message, in order."""
        self.closed = True
        self._starting = None
        left = [*self._started.values(), *self._queue]
        self._started.clear()
        self._queue.clear()
        for message in left:
            message.state = State.GONE
        return left

    def _advance(self) -> list[Start]:
        actions: list[Start] = []
        queue = self._queue
        while queue and self._granted and self._starting is None and self._messages > 0:
            message = next(iter(queue))
            if message.charge > self._nbytes and self._unreceived:
                break
            del queue[message]
            message.state = State.STARTED
            message.sequence = self._sequence
            self._sequence += 1
            self._messages -= 1
            self._nbytes -= message.charge
            self._unreceived += 1
            self._started[message.sequence] = message
            if message.slow:
                self._starting = message
            actions.append(Start(message))
        return actions


class RecvOrder:
    """Order of the receiving end: which message goes to which call, and when it may move.

    Args:
        fits: whether a post takes a message (kind, and for a buffer dtype, shape and device).
        prefetch_bytes: bytes of bulk messages that may move in before a post asks for them.
        copy_limit: bytes up to which a copy into a post's buffer is part of its delivery.
        moving_limit: bulk messages that may move at a time.
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
        # Credit goes back in quarters of the window: seldom enough to cost nothing, often enough
        # that a busy sender never sees it empty.
        self._credit_messages = max(1, window_messages // 4)
        self._credit_bytes = max(1, window_bytes // 4)
        self._owed_messages = 0
        self._owed_bytes = 0
        self._posts: OrderedDict[Post, None] = OrderedDict()
        self._messages: deque[Incoming] = deque()
        self._begun = 0  # messages at the head of the line that are past ARRIVED
        self._moving = 0
        self._next = 0
        self.over = False

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
        """Bulk messages on the move."""
        return self._moving

    def post(self, post: Post) -> list[RecvAction]:
        """A call of recv: takes its place at the end of the line."""
        if post.state is not State.NEW:
            raise IllegalTransition(f"post of {post}")
        if self.over and len(self._posts) >= len(self._messages):
            post.state = State.GONE
            return [Fail(post)]
        post.state = State.QUEUED
        self._posts[post] = None
        return self._advance() if self._messages else []

    def arrive(self, message: Incoming) -> list[RecvAction]:
        """The envelope of the next message."""
        if message.sequence != self._next or self.over or message.state is not State.NEW:
            raise IllegalTransition(f"arrival of {message}; the next is {self._next}")
        self._next += 1
        if message.bulk:
            message.state = State.ARRIVED
        else:
            message.state = State.READY
            if self._begun == len(self._messages):
                self._begun += 1
        self._messages.append(message)
        return self._advance()

    @property
    def expected(self) -> int:
        """Sequence number of the message that arrives next."""
        return self._next

    def transferred(self, message: Incoming) -> list[RecvAction]:
        """A transfer or copy into memory is over, the bytes are there."""
        if not self._stop_moving(message):
            return self._advance()
        if message.into is not None and message.into.state is State.GONE:
            return [self._evacuate(message), *self._advance()]
        message.state = State.READY
        return self._advance()

    def evacuated(self, message: Incoming) -> list[RecvAction]:
        """The message lies in memory of its own."""
        alive = self._stop_moving(message)
        self._let_go(message)
        if alive:
            message.state = State.READY
        return self._advance()

    def cancel(self, post: Post) -> tuple[bool, list[RecvAction]]:
        """A call of recv is taken back; what it might have got goes to the next one."""
        if post.state is not State.QUEUED:
            return False, []
        post.state = State.GONE
        del self._posts[post]
        actions: list[RecvAction] = []
        held = post.holds
        if held is not None and held.state is State.READY:
            actions.append(self._evacuate(held))
        return True, actions + self._advance()

    def fail(self, message: Incoming) -> list[RecvAction]:
        """A transfer broke: the message and all behind it are lost, the direction is over."""
        if self._stop_moving(message):
            self._let_go(message)
            message.state = State.GONE
            self._truncate(self._messages.index(message))
        self.over = True
        return self._advance() + self._fail_surplus()

    def lose(self, *, keep_moving: bool) -> list[RecvAction]:
        """No more messages will come.

        Args:
            keep_moving: messages on the move may still complete (the peer said goodbye after it
                had sent them); otherwise they are lost too.
        """
        self.over = True
        whole = (State.READY, State.MOVING) if keep_moving else (State.READY,)
        for index, message in enumerate(self._messages):
            if message.state not in whole:
                self._truncate(index)
                break
        return self._advance() + self._fail_surplus()

    def close(self) -> list[Post]:
        """Closed on this side. Returns the posts that waited, in order."""
        self.over = True
        self._truncate(0)
        posts = list(self._posts)
        self._posts.clear()
        for post in posts:
            post.state = State.GONE
        return posts

    # --- the moves ---

    def _stop_moving(self, message: Incoming) -> bool:
        """False for a message that was dropped while it moved: now its buffer is free."""
        if message.state is State.GONE:
            self._let_go(message)
            return False
        if message.state is not State.MOVING:
            raise IllegalTransition(f"end of a move of {message}")
        self._moving -= 1
        return True

    def _let_go(self, message: Incoming) -> None:
        if message.into is not None and message.into.holds is message:
            message.into.holds = None
        message.into = None

    def _evacuate(self, message: Incoming) -> Evacuate:
        message.state = State.MOVING
        self._moving += 1
        return Evacuate(message)

    def _truncate(self, index: int) -> None:
        messages = self._messages
        while len(messages) > index:
            message = messages.pop()
            if message.state is State.MOVING:
                self._moving -= 1
            message.state = State.GONE
        self._begun = min(self._begun, index)

    def _fail_surplus(self) -> list[RecvAction]:
        surplus = list(islice(self._posts, len(self._messages), None))
        for post in surplus:
            post.state = State.GONE
            del self._posts[post]
        return [Fail(post) for post in surplus]

    def _advance(self) -> list[RecvAction]:
        actions: list[RecvAction] = []
        while self._messages and self._posts and self._serve_first(actions):
            pass
        if self._begun < len(self._messages):
            actions.extend(self._begin_moves())
        return actions

    def _serve_first(self, actions: list[RecvAction]) -> bool:
        """Serve the first post with the first message; False when they have to wait."""
        message = self._messages[0]
        post = next(iter(self._posts))
        held = post.holds
        if held is not None and held is not message:
            # A cancellation moved this post up: its buffer holds a later message.
            if held.state is State.READY:
                actions.append(self._evacuate(held))
            return False
        if not self._fits(post, message):
            self._consume(post, message, actions, Mismatch(post, message))
            return True
        if message.state is not State.READY:
            return False
        if post.in_place and message.into is not post and message.size > self._copy_limit:
            message.state, message.into, post.holds = State.MOVING, post, message
            self._moving += 1
            actions.append(Copy(message, post))
            return False
        self._consume(post, message, actions, Deliver(post, message))
        return True

    def _consume(
        self, post: Post, message: Incoming, actions: list[RecvAction], action: Deliver | Mismatch
    ) -> None:
        self._messages.popleft()
        del self._posts[post]
        post.state = State.GONE
        actions.append(action)
        if message.state is State.ARRIVED:
            actions.append(Discard(message))
        else:
            self._begun -= 1
            if message.state is State.MOVING:
                self._moving -= 1
        message.state = State.GONE
        if message.prefetched:
            self._prefetch_left += message.size
        self._owed_messages += 1
        self._owed_bytes += message.charge
        if (
            self._owed_messages >= self._credit_messages or self._owed_bytes >= self._credit_bytes
        ) and not self.over:
            actions.append(Credit(self._owed_messages, self._owed_bytes))
            self._owed_messages = self._owed_bytes = 0

    def _begin_moves(self) -> Iterator[RecvAction]:
        """Let bulk messages move in, in their order, as far as posts, budget and limit allow."""
        while self._begun < len(self._messages):
            message = self._messages[self._begun]
            if message.state is State.ARRIVED:
                if self._moving >= self._moving_limit:
                    return
                post = next(islice(self._posts, self._begun, None), None)
                if post is None:
                    if message.size > self._prefetch_left:
                        return
                    message.prefetched = True
                    self._prefetch_left -= message.size
                elif not self._fits(post, message):
                    return  # decided when both are first in line: they may still shift
                elif post.in_place and post.holds is None:
                    message.into, post.holds = post, message
                message.state = State.MOVING
                self._moving += 1
                yield Transfer(message, message.into)
            self._begun += 1
