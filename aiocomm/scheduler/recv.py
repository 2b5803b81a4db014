"""The receiving lane: the first call gets the first message.

Nothing is unpickled before its message is first in line and a call is there to take it, so a
class that fails to load fails that call and no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..entries import (
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
    Transfer,
)
from ..errors import AiocommError, ClosedError, Context, PairingError, ProtocolError
from ..handles.base import AsyncWork
from ..ordering import RecvOrder
from ..runtime import COPY_LIMIT
from ..stats import Traffic
from ..transport.base import FrameKind
from .arrival import TENSOR, Arrival, fits
from .envelope import Envelope, credit_head
from .movers import DeviceMover, HostMover
from .moves import as_route_error
from .schemas import KeptSchemas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from ..entries import RecvAction
    from ..runtime import Runtime
    from ..transport.base import Frame, Link, ReceivingRoute
    from ..transport.device_base import DeviceReceivingRoute
    from .works import RecvWork

log = logging.getLogger("aiocomm")

MOVING_LIMIT = 4
"""Bulk messages on the move at a time: enough to hide the loop's turn between two of them."""

PREFETCH_DELAY = 0.02
"""Seconds that a tensor waits for its ``recv_tensor`` before it is taken in without: much longer
than a loop needs to post the next receive, and nothing beside the copy that it spares."""


class RecvLane:
    """The receiving direction of a group.

    Args:
        runtime: the loop and the options.
        broken: told when a transfer of this direction failed.
        context: ``group`` and ``peer`` for the errors.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        broken: Callable[[AiocommError], None],
        context: Context,
    ) -> None:
        options = runtime.options
        self._runtime = runtime
        self._broken = broken
        self.context = context
        self._order = RecvOrder(
            fits,
            prefetch_bytes=options.prefetch_bytes,
            copy_limit=max(COPY_LIMIT, options.eager_limit),
            moving_limit=MOVING_LIMIT,
            window_messages=options.window_messages,
            window_bytes=options.window_bytes,
        )
        self._schemas = KeptSchemas()
        self._actions: deque[RecvAction] = deque()
        self._quiet = False  # failures that nobody retrieves are no news
        self._broke: list[Incoming] = []  # their transfers failed; until it is known why
        self._performing = False
        self._inbound = 0  # what its route takes in, to keep or to drop
        self._settling: asyncio.Event | None = None
        self._link: Link | None = None
        self._error: AiocommError | None = None
        self._host = HostMover(runtime)
        self.device = DeviceMover(runtime, self._host)
        self.traffic = Traffic()

    @property
    def pending(self) -> int:
        """Calls of recv that wait."""
        return self._order.posted

    @property
    def unreceived(self) -> int:
        """Messages that wait for a call of recv."""
        return self._order.waiting

    @property
    def moving(self) -> int:
        """Bulk messages that move in, those included that nobody gets any more."""
        return self._inbound

    def submit(self, work: RecvWork) -> None:
        """Put a call of recv in line; it may be done when this returns."""
        post = work._entry = Post(work, work._buffer is not None)
        actions = self._order.post(post)
        if actions:
            self._perform(actions)

    def cancelled(self, work: RecvWork) -> None:
        """The caller cancelled its work."""
        post = work._entry
        del work._entry  # the post may need the buffer still; the two shall not hold each other
        _, actions = self._order.cancel(post)
        self._perform(actions)

    def give_back(self, work: RecvWork, message: Incoming) -> None:
        """A delivered message was not taken: it is first in line again."""
        arrival = message.owner
        if work._buffer is None:
            arrival.value = AsyncWork.result(work)
        elif message.into is work._entry or arrival.held is not None:
            arrival.buffers = [self._mover(arrival).clone_now(work._bytes)]
        self._perform(self._order.give_back(message))

    def link_up(self, link: Link) -> None:
        """The link is there: grant the peer its window."""
        self._link = link
        options = self._runtime.options
        head = credit_head(options.window_messages, options.window_bytes, first=True)
        self._reply(FrameKind.CREDIT, 0, head)

    def route_up(self, route: ReceivingRoute) -> None:
        """The receiving end of the bulk route that was agreed on."""
        self._host.route = route

    def device_route_up(self, route: DeviceReceivingRoute) -> None:
        """The same for memory of a device."""
        self.device.route = route

    def envelope_received(self, frame: Frame) -> None:
        """The next message of the peer.

        Raises:
            ProtocolError: out of sequence, or its head is not sound.
        """
        order = self._order
        if order.deaf:
            return
        if frame.sequence != order.expected:
            raise ProtocolError(
                f"the peer sent message {frame.sequence} where {order.expected} was due"
            )
        envelope = Envelope.read(frame.head)
        arrival, size = Arrival.of(envelope, frame.body, self._schemas)
        bulk = envelope.bulk
        if bulk and not envelope.far:
            bulk = self._host.admit(arrival)
        message = Incoming(arrival, frame.sequence, size, envelope.charge, bulk)
        if envelope.far:
            self.device.admit(message)
        # recv_tensor brings memory of its own, which spares a copy: worth a moment's wait.
        message.reluctant = bulk and envelope.kind is TENSOR
        self._perform(order.arrive(message))

    def lose(self, error: AiocommError, *, keep_moving: bool) -> None:
        """No more messages will come; those that are here whole can still be taken."""
        if self._error is not None:
            self._host.end(())  # what is being dropped ends too, where the rest of it never comes
            return
        self._error = error
        self._fail_broken()
        held = self._host.end(self._order.arrived())
        keep_moving = keep_moving or held is not None
        self._perform(self._order.lose(keep_moving=keep_moving, held=held or 0))

    async def settle(self) -> None:
        """Wait until no bulk message moves in.

        Cancellation: safe.
        """
        if self._inbound:
            self._settling = asyncio.Event()
            await self._settling.wait()

    def close(self, error: ClosedError, *, drain: bool = False) -> None:
        """Closed on this side: calls that wait fail, quietly.

        Args:
            error: why.
            drain: take and drop what the peer still sends, until ``stop_draining``.
        """
        self._error = error
        self._quiet = True
        self._fail_broken()
        self._perform(self._order.close(drain=drain))

    def stop_draining(self) -> None:
        """Begin to drop nothing more; what is being dropped goes on, see ``settle``."""
        self._order.draining = False

    # --- carrying out what the order says ---

    def _perform(self, actions: Iterable[RecvAction]) -> None:
        # Rebuilding an object may run the user's code, which may call recv: then the outer call
        # carries the new actions out after its own.
        if self._performing:
            self._actions.extend(actions)
            return
        self._performing = True
        try:
            for action in actions:
                self._HANDLERS[type(action)](self, action)
            while self._actions:
                action = self._actions.popleft()
                self._HANDLERS[type(action)](self, action)
        finally:
            self._performing = False

    def _deliver(self, action: Deliver) -> None:
        message = action.message
        arrival: Arrival = message.owner
        work: RecvWork = action.post.owner
        action.post.owner = None  # as ``_release`` does
        try:
            value = work._buffer
            if value is None:
                value = arrival.rebuild()
            elif message.into is not action.post:
                arrival.fill(value)
        except Exception as error:
            arrival.release()
            if isinstance(error, AiocommError):
                error.direction, error.sequence = "recv", message.sequence
                error.group, error.peer = self.context["group"], self.context["peer"]
            work._fail(error)
            return
        if arrival.held is not None:
            arrival.held.release()
        if arrival.nbytes:
            mover = self.device if arrival.far else self._host  # not by a call: this is hot
            self.traffic.count(mover.route_of(message), arrival.nbytes)
            arrival.nbytes = 0
        if arrival.far:
            self.device.hand_over(arrival, work)
        work._delivered = message
        if not work.done():
            work.set_result(value)

    @staticmethod
    def _release(post: Post) -> RecvWork:
        """The work of a post that is done: without this it would wait for the collector."""
        work: RecvWork = post.owner
        post.owner = None
        return work

    def _mover(self, arrival: Arrival) -> HostMover | DeviceMover:
        return self.device if arrival.far else self._host

    def _mismatch(self, action: Mismatch) -> None:
        work, arrival = self._release(action.post), action.message.owner
        arrival.release()
        sent = f"send_tensor({arrival.spec})" if arrival.kind is TENSOR else "send(obj)"
        asked = f"recv_tensor({work._spec})" if work._spec is not None else "recv()"
        sequence = action.message.sequence
        mend = "call send with recv, send_tensor with recv_tensor and a buffer of the same spec"
        text = f"{sent} met {asked}: the message is dropped; {mend}"
        work._fail(PairingError(text, direction="recv", sequence=sequence, **self.context))
        self._reply(FrameKind.REJECT, sequence, text.encode())

    def _transfer(self, action: Transfer) -> None:
        message = action.message
        arrival: Arrival = message.owner
        into = action.into.owner if action.into is not None else None
        try:
            moved = self._mover(arrival).take_in(arrival, into)
        except (MemoryError, RuntimeError) as error:  # torch says RuntimeError when out of memory
            self._transfer_failed(message, error)
            return
        if moved.done():
            self._moved(message, moved)
        else:
            self._taken_in(moved).add_done_callback(partial(self._moved, message))

    def _linger(self, action: Linger) -> None:
        message = action.message
        self._runtime.loop.call_later(
            PREFETCH_DELAY, lambda: self._perform(self._order.hurry(message))
        )

    def _copy(self, action: Copy) -> None:
        arrival = action.message.owner
        copied = self._mover(arrival).copy(arrival, action.into.owner)
        copied.add_done_callback(partial(self._moved, action.message))

    def _evacuate(self, action: Evacuate) -> None:
        message = action.message
        arrival = message.owner
        assert message.into is not None
        memory: torch.Tensor = message.into.owner._bytes

        def evacuated(cloned: asyncio.Future[torch.Tensor]) -> None:
            error = None if cloned.cancelled() else cloned.exception()
            if error is not None:
                self._transfer_failed(message, error)
                return
            arrival.buffers = [cloned.result()]
            self._perform(self._order.evacuated(message))

        if arrival.buffers or not message.bulk:  # the original is still there
            self._perform(self._order.evacuated(message))
        else:
            self._mover(arrival).clone(memory).add_done_callback(evacuated)

    def _discard(self, action: Discard) -> None:
        arrival = action.message.owner
        drained = self._taken_in(self._mover(arrival).discard(arrival))

        def done(future: asyncio.Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and self._error is None:
                self._broken(as_route_error(error))

        drained.add_done_callback(done)

    def _credit(self, action: Credit) -> None:
        self._reply(FrameKind.CREDIT, 0, credit_head(action.messages, action.nbytes))

    def _fail(self, action: Fail) -> None:
        assert self._error is not None
        self._release(action.post)._fail(self._error.again(), quiet=self._quiet)

    def _reply(self, kind: FrameKind, sequence: int, head: bytes) -> None:
        assert self._link is not None
        if self._error is not None and not self._order.draining:
            return
        try:
            self._link.send(kind, sequence, head)
        except AiocommError as error:
            # The link is down and about to say so; a call of recv is not the one to hear of it.
            log.debug("a %s frame was not sent: %s", kind.name, error)

    def _taken_in(self, moved: asyncio.Future[None]) -> asyncio.Future[None]:
        """Count a move of the route, until it ends."""
        self._inbound += 1
        moved.add_done_callback(self._count_down)
        return moved

    def _count_down(self, _: object) -> None:
        self._inbound -= 1
        if self._settling is not None and not self._inbound:
            self._settling.set()

    def _moved(self, message: Incoming, move: asyncio.Future[Any]) -> None:
        error = None if move.cancelled() else move.exception()
        if error is None:
            self._perform(self._order.transferred(message))
        else:
            self._transfer_failed(message, error)

    def _transfer_failed(self, message: Incoming, cause: BaseException) -> None:
        if self._error is None:
            self._broke.append(message)
            self._broken(as_route_error(cause))  # finds out why, and calls lose()
        else:
            self._perform(self._order.fail(message))

    def _fail_broken(self) -> None:
        broke, self._broke = self._broke, []
        for message in broke:
            self._perform(self._order.fail(message))

    _HANDLERS: ClassVar[dict[type, Callable[[RecvLane, Any], None]]] = {
        Deliver: _deliver,
        Mismatch: _mismatch,
        Transfer: _transfer,
        Linger: _linger,
        Copy: _copy,
        Evacuate: _evacuate,
        Discard: _discard,
        Credit: _credit,
        Fail: _fail,
    }
