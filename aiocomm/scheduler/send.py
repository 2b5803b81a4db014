"""The sending lane: messages leave in the order of the calls.

Small ones leave inside their envelope, at once when the peer has granted credit. Bulk ones start
slowly (their route may have to be agreed on, small tensors staged), and nobody overtakes them.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from ..entries import IllegalTransition, Outgoing
from ..errors import AiocommError, Context, PairingError, ProtocolError, RouteError
from ..ordering import SendOrder
from ..packing import ALIGN, inline
from ..payload import Kind
from ..runtime import COPY_LIMIT
from ..stats import Traffic
from ..transport.base import MAX_BODY, FrameKind
from .device_sending import DeviceSending, ready_of
from .envelope import BY_DEVICE, FAR, envelope_head, read_credit
from .movers import STAGED
from .moves import Moves, as_route_error
from .schemas import SentSchemas
from .works import SendWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from ..entries import Start
    from ..payload import Packed
    from ..runtime import Runtime
    from ..transport.base import Link, SendingRoute
    from ..transport.device_base import DeviceSendingRoute

log = logging.getLogger("aiocomm")

MOST_INLINE = MAX_BODY // ALIGN // 2
"""Buffers that ride in an envelope: of tiny ones the padding alone could outgrow a frame."""

ENVELOPE = FrameKind.ENVELOPE  # finding a member in its enum takes 60 ns


class SendLane:
    """The sending direction of a group.

    Args:
        runtime: the loop and the options.
        open_route: gives the bulk route, agreed on with the peer on first use.
        open_device: the same for memory of the device of that index.
        broken: told when a transfer of this direction failed.
        context: ``group`` and ``peer`` for the errors.

    Attributes:
        eager_limit: bytes up to which a message in memory of the host rides in its envelope.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        open_route: Callable[[], Awaitable[SendingRoute]],
        open_device: Callable[[int], Awaitable[DeviceSendingRoute]],
        broken: Callable[[AiocommError], None],
        context: Context,
    ) -> None:
        self._runtime = runtime
        self.eager_limit = runtime.options.eager_limit
        self._order = SendOrder()
        self._schemas = SentSchemas()
        self._open_route = open_route
        self.device = DeviceSending(runtime, open_device, context)
        self._broken = broken
        self.context = context
        self._link: Link | None = None
        self._route: SendingRoute | None = None
        self._error: AiocommError | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Event | None = None
        self._moves = Moves(self._moved)
        self.traffic = Traffic()

    @property
    def pending(self) -> int:
        """Sends not completed yet."""
        return self._order.pending

    def submit(self, work: SendWork, packed: Packed) -> None:
        """Put a message in line; it may have left when this returns."""
        if self._error is not None:
            work._fail(self._error.again())
            return
        far = packed.device is not None
        limit = self._runtime.options.eager_limit if far else self.eager_limit
        bulk = packed.nbytes > limit or len(packed.buffers) > MOST_INLINE
        charge = len(packed.meta) + (0 if bulk else packed.nbytes)
        link = self._link
        if far:
            if not bulk and link is not None and not link.in_process:
                self.device.begin(work, packed)
        elif link is not None and not link.in_process and self._order.may_pass(charge):
            body = self._place(packed) if bulk else inline(packed.buffers)
            if body is not None:
                sequence = self._order.pass_through(charge)
                assert sequence is not None
                if self._leave(link, sequence, packed, charge, body, bulk=bulk):
                    self._count(packed, self._route.name if bulk and self._route else "link")
                    work._finish(None)
                    return
        work._packed = packed
        work._entry = Outgoing(work, charge, bulk or far)
        self._start(self._order.submit(work._entry))

    def cancelled(self, work: SendWork) -> None:
        """The caller cancelled its work."""
        removed, starts = self._order.cancel(work._entry)
        if removed:
            work._packed = None
            self._start(starts)
            self._note_idle()

    def link_up(self, link: Link) -> None:
        """The link is there; credit will come over it."""
        self._link = link

    def credit_received(self, head: bytes) -> None:
        """The peer granted its window, or gave back what it has taken.

        Raises:
            ProtocolError: it cannot have.
        """
        first, messages, nbytes = read_credit(head)
        try:
            starts = self._order.grant(messages, nbytes, first=first)
        except IllegalTransition as error:
            raise ProtocolError(f"the peer gives credit that it cannot give: {error}") from error
        self._start(starts)

    def rejected(self, sequence: int, text: str) -> None:
        """The peer could not pair a message with its call."""
        error = PairingError(text, direction="send", sequence=sequence, **self.context)
        entry = self._order.started_with(sequence)
        work = entry.owner if entry is not None else None
        if isinstance(work, SendWork) and not work.done():
            work._fail(error)
        else:
            log.warning("a send that had completed was not taken: %s", error)

    def close(self, error: AiocommError, *, quiet: bool = False, keep_moving: bool = False) -> None:
        """The direction is over: whatever is pending fails with the error.

        Args:
            error: why.
            quiet: failures that nobody retrieves are no news.
            keep_moving: bulk that its route has already may still end well, until ``settle``.
        """
        if self._error is not None:
            return
        self._error = error
        if self._starting is not None:
            self._starting.cancel()
        for entry in self._order.close():
            if keep_moving and entry in self._moves:
                continue
            work: SendWork = entry.owner
            work._fail(error.again(), quiet=quiet)
            entry.owner = work._packed = None
        self._note_idle()

    async def settle(self, timeout: float) -> None:
        """Wait until no bulk moves any more, at most so many seconds; what is left then fails.

        Cancellation: safe, what is left fails all the same.
        """
        if self._error is not None:
            await self._moves.settle(timeout, self._error)

    async def drain(self) -> None:
        """Wait until no send is pending.

        Cancellation: safe.
        """
        self._draining = asyncio.Event()
        self._note_idle()
        await self._draining.wait()

    def _start(self, starts: Sequence[Start]) -> None:
        link = self._link
        while starts:  # one that started may let the next one start: no recursion, they are many
            following: Sequence[Start] = ()
            for start in starts:
                entry = start.message
                packed: Packed = entry.owner._packed
                assert link is not None
                try:
                    if packed.device is not None:
                        self._prepare(partial(self._leave_device, link, entry, packed))
                        following = ()
                    elif link.in_process:
                        following = self._hand_over(link, entry, packed)
                    elif not entry.slow:
                        body = inline(packed.buffers)
                        if self._leave(
                            link, entry.sequence, packed, entry.charge, body, bulk=False
                        ):
                            self._sent(entry, "link")
                    else:
                        following = self._start_bulk(link, entry, packed)
                except AiocommError as error:
                    self._not_sent(entry.sequence, error)
                    return
            starts = following

    def _not_sent(self, sequence: int, error: AiocommError) -> None:
        # The link is down and about to say so to the group, which fails this lane then.
        log.debug("message %d was not sent: %s", sequence, error)

    def _place(self, packed: Packed) -> bytes | None:
        """Put a small message where the peer can reach it; None where that cannot be."""
        return self._route.place(packed.buffers) if self._route is not None else None

    def _leave(
        self,
        link: Link,
        sequence: int,
        packed: Packed,
        charge: int,
        body: bytes,
        *,
        bulk: bool,
        far: int = 0,
    ) -> bool:
        """Send an envelope; False when the link is down."""
        head = self._schemas.head(packed, charge, bulk=bulk, far=far)
        try:
            link.send(ENVELOPE, sequence, head, body)
        except AiocommError as error:
            self._not_sent(sequence, error)
            return False
        return True

    def _count(self, packed: Packed, route: str) -> None:
        self.traffic.count(route, len(packed.meta) + packed.nbytes)

    def _hand_over(self, link: Link, entry: Outgoing, packed: Packed) -> Sequence[Start]:
        buffers = tuple(packed.buffers)
        if packed.kind is Kind.TENSOR:
            # A completed send_tensor gives the buffer back on every route, so this one copies.
            buffers = tuple(buffer.clone() for buffer in buffers)
        head = envelope_head(packed.kind, packed.meta, entry.charge, bulk=False)
        link.send(ENVELOPE, entry.sequence, head, buffers)
        self._sent(entry, "memory")
        return self._order.started(entry) if entry.slow else ()

    def _start_bulk(self, link: Link, entry: Outgoing, packed: Packed) -> Sequence[Start]:
        body = self._place(packed)
        route = self._route
        if body is not None and route is not None:
            if self._leave(link, entry.sequence, packed, entry.charge, body, bulk=True):
                self._sent(entry, route.name)
            return self._order.started(entry)
        if route is not None and route.staged_bytes(packed.buffers) <= COPY_LIMIT:
            return self._transfer(link, entry, packed, route.stage(packed.buffers))

        async def stage() -> Sequence[Start]:
            staged = await self._stage(packed.buffers)
            return self._transfer(link, entry, packed, staged)

        self._prepare(stage)
        return ()

    def _prepare(self, start: Callable[[], Awaitable[Sequence[Start]]]) -> None:
        """Start a message in a task of its own, and then what may start after it."""

        async def prepare() -> None:
            try:
                self._start(await start())
            except Exception as error:  # of ours, or torch's when there is no memory to stage in
                self._broken(as_route_error(error))

        self._starting = self._runtime.loop.create_task(prepare())

    async def _stage(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the bulk route for memory of the host is given for these buffers."""
        if self._route is None:
            self._route = await self._open_route()
        return await self._runtime.off_loop(self._route.stage, buffers)

    async def _leave_device(self, link: Link, entry: Outgoing, packed: Packed) -> Sequence[Start]:
        device, work = self.device, entry.owner
        if link.in_process:
            memory = await device.hand_over(packed)
            head = envelope_head(packed.kind, packed.meta, entry.charge, bulk=False, far=FAR)
            link.send(ENVELOPE, entry.sequence, head, memory)
            self._sent(entry, "memory")
        elif entry.charge > len(packed.meta):  # small: the window was charged for its buffers too
            if work._host is None:
                device.begin(work, packed)
            body, work._host = inline(await work._host), None
            if self._leave(link, entry.sequence, packed, entry.charge, body, bulk=False, far=FAR):
                self._sent(entry, "link")
        else:
            if (route := await device.open(packed)) is not None:
                send = partial(route.send, packed.buffers, after=ready_of(packed))
                try:
                    return self._move(link, entry, packed, route.name, send, far=FAR | BY_DEVICE)
                except RouteError as error:
                    device.refused(error)
            staged = await self._stage(await device.bring(packed))
            return self._transfer(link, entry, packed, staged, name=STAGED, far=FAR)
        return self._order.started(entry) if self._error is None else ()

    def _transfer(
        self,
        link: Link,
        entry: Outgoing,
        packed: Packed,
        staged: Sequence[torch.Tensor],
        *,
        name: str | None = None,
        far: int = 0,
    ) -> Sequence[Start]:
        route = self._route
        assert route is not None
        send = partial(route.send, staged, lend=packed.kind is not Kind.TENSOR)
        return self._move(link, entry, packed, name or route.name, send, far=far)

    def _move(
        self,
        link: Link,
        entry: Outgoing,
        packed: Packed,
        name: str,
        send: Callable[..., asyncio.Future[None]],
        *,
        far: int,
    ) -> Sequence[Start]:
        """Give a message to a bulk route by its ``send``, which sends the envelope too."""
        starts: list[Start] = []
        sent = False

        def envelope(body: bytes) -> None:
            if self._error is None and self._leave(
                link, entry.sequence, packed, entry.charge, body, bulk=True, far=far
            ):
                starts.extend(self._order.started(entry))
                if sent:  # it had to wait for room
                    self._start(starts)

        moved = send(envelope=envelope)
        self._starting, sent = None, True
        self._moves.add(entry, name, moved)
        return starts

    def _moved(self, entry: Outgoing, route: str, error: BaseException | None) -> None:
        if self._error is not None:
            self._end_late(entry, route, error)
        elif error is None:
            self._sent(entry, route)
        else:
            self._broken(as_route_error(error))

    def _end_late(self, entry: Outgoing, route: str, error: BaseException | None) -> None:
        """A message whose direction was over before its route was done with it."""
        work: SendWork | None = entry.owner
        if work is None:
            return
        packed, entry.owner, work._packed = work._packed, None, None
        if error is None:
            assert packed is not None
            self._count(packed, route)
            work._finish(None)
        else:
            assert self._error is not None
            work._fail(self._error.again())

    def _sent(self, entry: Outgoing, route: str) -> None:
        work: SendWork = entry.owner
        entry.owner = None  # or work and entry would wait for the garbage collector
        packed, work._packed = work._packed, None
        assert packed is not None
        self._count(packed, route)
        if not work.done():
            work.set_result(None)
        self._order.finish(entry)
        if self._draining is not None:
            self._note_idle()

    def _note_idle(self) -> None:
        if self._draining is not None and not self._order.pending:
            self._draining.set()
