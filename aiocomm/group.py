"""A group of two members: what users send and receive with.

Puts a link, two lanes and the bulk routes together, and takes them apart again. Knows nothing of
where the peer lives: its ``Collective`` connects it, or is connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from typing import TYPE_CHECKING, Any

from .bulk import BulkRoutes, End
from .errors import (
    AiocommError,
    ClosedError,
    PeerClosedError,
    PeerLostError,
    RouteError,
    UsageError,
)
from .payload import as_bytes, pack, pack_tensor, spec_of
from .scheduler import RecvLane, RecvWork, SendLane, SendWork
from .stats import GroupStatistics
from .transport.base import FrameKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import torch

    from .address import WorkerAddress
    from .handles import AsyncWork
    from .runtime import Runtime
    from .transport.base import Frame, Link

log = logging.getLogger("aiocomm")

VERDICT_DELAY = 0.5
"""Seconds that a failed transfer waits for the link to say that the peer is lost."""


class GroupState(enum.Enum):
    """Where a group stands."""

    NEW = "new"
    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"
    CLOSING = "closing"
    CLOSED = "closed"


class CollectiveGroup:
    """Two workers that exchange tensors and objects, in strict order in each direction.

    Made by ``Collective.create_collective_group``. Every call of ``send``, ``recv``,
    ``send_tensor`` and ``recv_tensor`` takes its place in the order when it is called, not when
    its work is awaited. The two directions never wait for each other.

    All four may be called on the loop's own thread, and from threads without a loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        key: str,
        members: tuple[WorkerAddress, WorkerAddress],
        rank: int,
        connect: Callable[[], Awaitable[Link]],
        ended: Callable[[CollectiveGroup], None],
    ) -> None:
        self.name = name
        self.members = members
        self.rank = rank
        self.peer = members[1 - rank]
        self.claimed = False  # whether create_collective_group has given it to anybody
        self._key = key
        self._runtime = runtime
        self._connect = connect
        self._ended = ended
        self._state = GroupState.NEW
        self._link: Link | None = None
        self._linked = asyncio.Event()
        self._error: AiocommError | None = None
        self._bulk: BulkRoutes | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._verdicts: list[asyncio.TimerHandle] = []
        context = {"group": name, "peer": str(self.peer)}
        self._sending = SendLane(
            runtime,
            open_route=self._open_route,
            broken=lambda error: self._transfer_broke(End.SENDING, error),
            context=context,
        )
        self._receiving = RecvLane(
            runtime,
            broken=lambda error: self._transfer_broke(End.RECEIVING, error),
            context=context,
        )

    def __repr__(self) -> str:
        return (
            f"<CollectiveGroup {self.name!r} rank {self.rank} of {self.members[0]}, "
            f"{self.members[1]}: {self._state.value}, {self._sending.pending} sends and "
            f"{self._receiving.pending} recvs pending>"
        )

    # --- what users call ---

    def send(self, obj: object, async_op: bool = True) -> AsyncWork[None]:
        """Send a tensor, a list, tuple, dict or dataclass of tensors, or any picklable object.

        Args:
            obj: tensors in it are contiguous, dense, and all on the CPU or all on one device.
            async_op: accepted for compatibility; only True.

        Returns:
            A work that completes with None when the memory of ``obj`` is the caller's again, which
            does not say that the peer has called ``recv``. Until then, do not write to its tensors.

        Raises:
            PayloadError: the object cannot be sent; nothing was queued.
            ClosedError: the group or its runtime is closed.
            WrongLoopError: called from another event loop, or in a forked child.
            UsageError: ``async_op=False``.

        Cancellation: of the work: see ``SendWork``.
        """
        _only_async(async_op)
        packed = pack(obj)
        work = SendWork(loop=self._runtime.loop)
        self._enter(lambda: self._sending.submit(work, packed), work)
        return work

    def recv(self, async_op: bool = True) -> AsyncWork[Any]:
        """Receive what the peer gave to ``send``.

        Returns:
            A work that completes with the object, of the types it was sent with. Plain tensors
            arrive detached.

        Raises:
            ClosedError, WrongLoopError, UsageError: as ``send``.

        The work fails with PairingError when the peer called ``send_tensor``, DecodeError when the
        object cannot be rebuilt here, PeerLostError when the peer is gone.

        Cancellation: of the work: loses no message, see ``RecvWork``.
        """
        _only_async(async_op)
        work = RecvWork(loop=self._runtime.loop)
        self._enter(lambda: self._receiving.submit(work), work)
        return work

    def send_tensor(self, tensor: torch.Tensor, async_op: bool = True) -> AsyncWork[None]:
        """Send one tensor to a peer that receives it with ``recv_tensor``.

        Args:
            tensor: contiguous and dense, of any dtype and shape.
            async_op: as in ``send``.

        Returns:
            A work that completes with None when the tensor is the caller's again.

        Raises:
            PayloadError, ClosedError, WrongLoopError, UsageError: as ``send``.

        The work fails with PairingError when the peer called ``recv``, or brought a buffer of
        another dtype, shape or device, while this send is pending.

        Cancellation: of the work: see ``SendWork``.
        """
        _only_async(async_op)
        packed = pack_tensor(tensor)
        work = SendWork(loop=self._runtime.loop)
        self._enter(lambda: self._sending.submit(work, packed), work)
        return work

    def recv_tensor(self, tensor: torch.Tensor, async_op: bool = True) -> AsyncWork[torch.Tensor]:
        """Receive into ``tensor`` what the peer gave to ``send_tensor``.

        Args:
            tensor: contiguous and dense; dtype, shape and device are those of the sender's.
            async_op: as in ``send``.

        Returns:
            A work that completes with ``tensor`` itself, filled.

        Raises:
            PayloadError: the buffer cannot be received into.
            ClosedError, WrongLoopError, UsageError: as ``send``.

        The work fails with PairingError when dtype, shape or device differ, or the peer called
        ``send``; the buffer is untouched then, and the next message is intact.

        Cancellation: of the work: loses no message, see ``RecvWork``.
        """
        _only_async(async_op)
        as_bytes(tensor)  # refuses what cannot be written to as bytes
        work = RecvWork(loop=self._runtime.loop)
        work._buffer, work._spec = tensor, spec_of(tensor)
        self._enter(lambda: self._receiving.submit(work), work)
        return work

    async def ready(self) -> None:
        """Connect to the peer, and set up the bulk route of the sending direction.

        Raises:
            RendezvousTimeout: the peer did not appear in time.
            PeerLostError, HandshakeError, RouteError: it appeared, and then this.
            ClosedError: closed on this side.

        Cancellation: safe; what was begun goes on for the next call.
        """
        self._runtime.enter(self._begin, log.debug)
        await self._linked.wait()
        if self._error is not None:
            raise self._error
        if self._bulk is not None:
            await self._bulk.open()

    def statistics(self) -> GroupStatistics:
        """What went where so far."""
        route = self._bulk.sending if self._bulk is not None else None
        return GroupStatistics(
            group=self.name,
            peer=str(self.peer),
            state=self._state.value,
            sent=self._sending.traffic.snapshot(),
            received=self._receiving.traffic.snapshot(),
            pending_sends=self._sending.pending,
            pending_recvs=self._receiving.pending,
            unreceived=self._receiving.unreceived,
            bulk_route=route.name if route is not None else None,
        )

    async def aclose(self) -> None:
        """Drain and close: pending sends leave, within ``close_timeout``, then goodbye.

        Receives that wait fail with ClosedError. Idempotent.

        Cancellation: the closing goes on in the background.
        """
        await asyncio.shield(self._close(drain=True))

    async def abort(self) -> None:
        """Close at once: whatever is pending fails with ClosedError. Idempotent.

        Cancellation: the closing goes on in the background.
        """
        error = ClosedError(
            "the group was aborted on this side", group=self.name, peer=str(self.peer)
        )
        self._sending.close(error, quiet=True)  # also cuts a drain short that is under way
        await asyncio.shield(self._close(drain=False))

    # --- calls enter ---

    def _enter(self, submit: Callable[[], None], work: AsyncWork[Any]) -> None:
        def entry() -> None:
            if self._state is not GroupState.UP:
                self._begin()
            submit()

        self._runtime.enter(entry, work._fail)

    def _begin(self) -> None:
        if self._state is GroupState.NEW:
            self._state = GroupState.CONNECTING
            self._connecting = self._runtime.loop.create_task(self._run_connect())
        elif self._state in (GroupState.CLOSING, GroupState.CLOSED):
            raise ClosedError(
                "the group is closed on this side: create_collective_group makes a new one",
                group=self.name,
                peer=str(self.peer),
            )

    # --- the link comes and goes ---

    @property
    def state(self) -> GroupState:
        """Where the group stands."""
        return self._state

    @property
    def unreceived(self) -> int:
        """Messages that wait here for a ``recv``."""
        return self._receiving.unreceived

    @property
    def peer_incarnation(self) -> str | None:
        """Which life of the peer the group is linked to."""
        return self._link.peer.incarnation if self._link is not None else None

    async def _run_connect(self) -> None:
        try:
            link = await self._connect()
        except AiocommError as error:
            self._lose(error)
        else:
            self.link_up(link)

    def peer_restarted(self) -> None:
        """A new life of the peer has dialled, before this side saw the old one end."""
        if self._link is not None:
            self._link.abort()
        self._lose(PeerLostError("the peer died and was started again"))

    def link_up(self, link: Link, *, inbound: bool = False) -> None:
        """A link to the peer, dialled by this side or (inbound) by the peer."""
        if self._link is not None or self._state not in (GroupState.NEW, GroupState.CONNECTING):
            link.abort()
            return
        if inbound and self._connecting is not None:
            self._connecting.cancel()
        self._link = link
        self._state = GroupState.UP
        if not link.in_process:
            self._bulk = BulkRoutes(
                self._runtime,
                link,
                self._key,
                self.rank,
                opened=self._receiving.route_up,
                broken=self._peer_broke,
            )
        self._sending.link_up(link)
        self._receiving.link_up(link)
        self._linked.set()
        link.attach(self)

    def frame_received(self, frame: Frame) -> None:
        """Give a frame of the peer to the part that it is for."""
        kind = frame.kind
        if kind is FrameKind.ENVELOPE:
            self._receiving.envelope_received(frame)
        elif kind is FrameKind.CREDIT:
            self._sending.credit_received(frame.head)
        elif kind is FrameKind.REJECT:
            self._sending.rejected(frame.sequence, bytes(frame.head).decode(errors="replace"))
        elif self._bulk is not None:
            self._bulk.frame_received(frame)

    def link_lost(self, error: PeerLostError) -> None:
        """The peer is gone, or said goodbye."""
        self._lose(error)

    async def _open_route(self) -> Any:
        assert self._bulk is not None
        return await self._bulk.open()

    def _transfer_broke(self, end: End, error: AiocommError) -> None:
        # Most often the peer died and the link is about to say so: that is the better error.
        if self._state is GroupState.UP:
            self._verdicts.append(
                self._runtime.loop.call_later(VERDICT_DELAY, self._break, end, error)
            )

    def _break(self, end: End, error: AiocommError) -> None:
        if self._state is GroupState.UP and self._bulk is not None:
            self._bulk.break_end(end, str(error))
            self._end_direction(end, error)

    def _peer_broke(self, end: End, error: RouteError) -> None:
        self._end_direction(end, error)

    def _end_direction(self, end: End, error: AiocommError) -> None:
        error.group, error.peer = self.name, str(self.peer)
        if end is End.SENDING:
            self._sending.close(error)
        else:
            self._receiving.lose(error, keep_moving=False)

    def _lose(self, error: AiocommError) -> None:
        if self._state not in (GroupState.NEW, GroupState.CONNECTING, GroupState.UP):
            self._sending.close(error)  # a drain waits in vain
            return
        self._state = GroupState.LOST
        error.group, error.peer = self.name, str(self.peer)
        self._error = error
        graceful = isinstance(error, PeerClosedError)
        if self._bulk is not None:
            self._bulk.sever(End.SENDING if graceful else None)
        self._sending.close(error)
        self._receiving.lose(error, keep_moving=graceful)
        self._linked.set()
        self._ended(self)
        self._closing = self._runtime.loop.create_task(self._tear_down())

    # --- closing ---

    def _close(self, *, drain: bool) -> asyncio.Task[None]:
        if self._closing is None:
            drain = drain and self._state in (GroupState.CONNECTING, GroupState.UP)
            self._state = GroupState.CLOSING
            self._refuse_receives()
            self._closing = self._runtime.loop.create_task(self._run_close(drain=drain))
        elif self._state is GroupState.LOST:  # and so torn down already
            self._state = GroupState.CLOSED
            self._refuse_receives()
        return self._closing

    def _refuse_receives(self) -> None:
        self._receiving.close(
            ClosedError("the group was closed on this side", group=self.name, peer=str(self.peer))
        )

    async def _run_close(self, *, drain: bool) -> None:
        if drain:
            try:
                await asyncio.wait_for(self._sending.drain(), self._runtime.options.close_timeout)
            except TimeoutError:
                log.warning(
                    "group %s: %d sends were dropped at close: %s did not take them in %g s",
                    self.name,
                    self._sending.pending,
                    self.peer,
                    self._runtime.options.close_timeout,
                )
        error = ClosedError(
            "the group was closed on this side before the message had left",
            group=self.name,
            peer=str(self.peer),
        )
        self._sending.close(error, quiet=not drain)
        if self._link is not None:
            await self._link.aclose()
        self._ended(self)
        await self._tear_down()
        self._state = GroupState.CLOSED

    async def _tear_down(self) -> None:
        """Give back everything that the group holds."""
        for verdict in self._verdicts:
            verdict.cancel()
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._link is not None:
            self._link.abort()
        if self._bulk is not None:
            if self._receiving.moving:
                # The peer said goodbye after it had sent them: they are about to be here.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._runtime.options.close_timeout):
                        await self._receiving.settle()
            await self._bulk.aclose()


def _only_async(async_op: bool) -> None:
    if not async_op:
        raise UsageError(
            "async_op=False would stop the event loop: await the work, or use the same call of "
            "aiocomm.blocking.CollectiveGroup"
        )
