"""The life of one group: a link, two lanes and the bulk routes, put together and taken apart again.

The inside of a ``CollectiveGroup``. Knows nothing of where the peer lives: ``connect`` is handed to
it, or the peer's own link is. States::

    NEW         nothing asked for yet
    CONNECTING  the first call came; the peer is looked for
    UP          linked
    LOST        the peer is gone; whole messages can still be received
    CLOSING     closed on this side; pending sends leave
    CLOSED      nothing is left
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
    Context,
    PeerClosedError,
    PeerLostError,
    RendezvousError,
    RouteError,
)
from .scheduler import RecvLane, SendLane
from .transport.base import FrameKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .handles import AsyncWork
    from .runtime import Runtime
    from .transport.base import Frame, Link, SendingRoute
    from .transport.device_base import DeviceSendingRoute

log = logging.getLogger("aiocomm")

VERDICT_DELAY = 0.5
"""Seconds that a failed transfer waits for the link to say that the peer is lost, and that bulk
which has left waits for its route to say so once the peer is gone."""


class State(enum.Enum):
    """Where a session stands."""

    NEW = "new"
    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"
    CLOSING = "closing"
    CLOSED = "closed"


# Python 3.11 takes 60 ns to find a member in its enum, and 5 to find a global.
UP, ENVELOPE = State.UP, FrameKind.ENVELOPE

LIVE = (State.NEW, State.CONNECTING, State.UP)


class Session:
    """One group's connection to its peer.

    Args:
        runtime: the loop and the options.
        name: of the group, the same on both sides.
        peer: address of the other member, in error texts.
        rank: of this member, 0 or 1.
        connect: dials the peer.
        ended: told once, when the session is lost or closed; given the task that takes it down.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        peer: str,
        rank: int,
        connect: Callable[[], Awaitable[Link]],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._runtime = runtime
        self._rank = rank
        self._connect = connect
        self._ended = ended
        self._where = Context(group=name, peer=peer)
        self._link: Link | None = None
        self._linked = asyncio.Event()
        self._error: AiocommError | None = None
        self._bulk: BulkRoutes | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._verdicts: list[asyncio.TimerHandle] = []
        self._draining = False
        self.state = State.NEW
        self.sending = SendLane(
            runtime,
            open_route=self._open_route,
            open_device=self._open_device,
            broken=lambda error: self._transfer_broke(End.SENDING, error),
            context=self._where,
        )
        self.receiving = RecvLane(
            runtime,
            broken=lambda error: self._transfer_broke(End.RECEIVING, error),
            context=self._where,
        )

    @property
    def bulk_route(self) -> SendingRoute | None:
        """The bulk route of the sending direction, where it is set up."""
        return self._bulk.sending if self._bulk is not None else None

    @property
    def device_route(self) -> str | None:
        """How large messages in memory of a device go; None before the first one."""
        return self.sending.device.name

    @property
    def wants_link(self) -> bool:
        """Not linked yet, and of use if it were."""
        return self._link is None and (self.state in LIVE or self._draining)

    @property
    def _moving(self) -> bool:
        """Whether messages move: also while a close waits for those that are pending."""
        return self.state is State.UP or self._draining

    @property
    def dialling(self) -> bool:
        """Not linked yet, and on the way to the peer."""
        return self._connecting is not None and self.wants_link

    @property
    def peer_incarnation(self) -> str | None:
        """Which life of the peer the session is linked to."""
        return self._link.peer.incarnation if self._link is not None else None

    def enter(self, submit: Callable[..., None], work: AsyncWork[Any], *args: object) -> None:
        """Let ``submit(work, *args)`` in, from the loop's thread or from one without a loop.

        Raises:
            ClosedError, WrongLoopError: see ``Runtime.enter``.
        """
        if self.state is UP and self._runtime.here:
            submit(work, *args)
            return

        def entry() -> None:
            if self.state is not UP:
                self.begin()
            submit(work, *args)

        self._runtime.enter(entry, work._fail)

    def begin(self) -> None:
        """Connect, if nobody has asked for it yet.

        Raises:
            ClosedError: closed on this side.
        """
        if self.state is State.NEW:
            self.state = State.CONNECTING
            self._connecting = self._runtime.loop.create_task(self._run_connect())
        elif self.state in (State.CLOSING, State.CLOSED):
            raise ClosedError(
                "the group is closed on this side: create_collective_group makes a new one",
                **self._where,
            )

    async def ready(self) -> None:
        """See ``CollectiveGroup.ready``."""
        self._runtime.enter(self.begin, log.debug)
        await self._linked.wait()
        if self._error is not None:
            raise self._error.again()
        if self._bulk is not None:
            try:
                await self._bulk.open()
            except RouteError as error:
                if self.state is State.UP:
                    raise
                raise (self._error or self._closed()).again() from error

    # --- the link comes and goes ---

    async def _run_connect(self) -> None:
        try:
            link = await self._connect()
        except AiocommError as error:
            self._lose(error)
        except Exception as error:  # of a board that is not ours: nobody may wait for ever
            failure = RendezvousError(
                f"the peer could not be looked for: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._lose(failure)
        else:
            self.link_up(link)
        finally:
            # When the peer's own link came first, what ended this task holds a socket's remains.
            self._connecting = None

    def peer_restarted(self) -> None:
        """A new life of the peer has dialled, before this side saw the old one end."""
        if self._link is not None:
            self._link.abort()
        self._lose(PeerLostError("another worker has the peer's address: did it start again?"))

    def link_up(self, link: Link, *, inbound: bool = False) -> None:
        """A link to the peer, dialled by this side or (inbound) by the peer."""
        if not self.wants_link:
            link.abort()
            return
        if inbound and self._connecting is not None:
            self._connecting.cancel()
        self._link = link
        if self.state in LIVE:
            self.state = State.UP
        if not link.in_process:
            self._bulk = BulkRoutes(
                self._runtime,
                link,
                self._where["group"],
                self._rank,
                opened=self.receiving.route_up,
                opened_device=self.receiving.device_route_up,
                broken=self._peer_broke,
            )
            self.sending.eager_limit = self._bulk.eager_limit
        self.sending.link_up(link)
        self.receiving.link_up(link)
        self._linked.set()
        link.attach(self)

    def frame_received(self, frame: Frame) -> None:
        """Give a frame of the peer to the part that it is for."""
        kind = frame.kind
        if kind is ENVELOPE:
            self.receiving.envelope_received(frame)
        elif kind is FrameKind.CREDIT:
            self.sending.credit_received(frame.head)
        elif kind is FrameKind.REJECT:
            self.sending.rejected(frame.sequence, bytes(frame.head).decode(errors="replace"))
        elif self._bulk is not None:
            self._bulk.frame_received(frame)

    def link_lost(self, error: PeerLostError) -> None:
        """The peer is gone, or said goodbye."""
        self._lose(error)

    async def _open_route(self) -> SendingRoute:
        assert self._bulk is not None
        route = await self._bulk.open()
        self.sending.eager_limit = self._bulk.eager_limit
        return route

    async def _open_device(self, index: int) -> DeviceSendingRoute:
        assert self._bulk is not None
        return await self._bulk.open_device(index)

    def _transfer_broke(self, end: End, error: AiocommError) -> None:
        # Most often the peer died and the link is about to say so: that is the better error.
        if self._moving:
            self._verdicts.append(
                self._runtime.loop.call_later(VERDICT_DELAY, self._break, end, error)
            )

    def _break(self, end: End, error: AiocommError) -> None:
        if not self._moving:
            return
        if self._bulk is not None:
            self._bulk.break_end(end, str(error))
            self._end_direction(end, error)
        elif self._link is not None:  # in one process only a device can fail, and it is both sides'
            self._link.abort()
            self._lose(error)

    def _peer_broke(self, end: End, error: RouteError) -> None:
        self._end_direction(end, error)

    def _end_direction(self, end: End, error: AiocommError) -> None:
        error.group, error.peer = self._where["group"], self._where["peer"]
        if end is End.SENDING:
            self.sending.close(error)
        else:
            self.receiving.lose(error, keep_moving=False)

    def _lose(self, error: AiocommError) -> None:
        # One that says goodbye may have taken bulk whole whose route tells so a moment later.
        graceful = isinstance(error, PeerClosedError)
        error.group, error.peer = self._where["group"], self._where["peer"]
        if self._bulk is not None:
            self._bulk.peer_gone(goodbye=graceful)
        if self.state not in LIVE:
            # A drain waits in vain. That this side closes, the board included, is no news.
            quiet = isinstance(error, ClosedError)
            self.sending.close(error, quiet=quiet, keep_moving=graceful)
            self.receiving.lose(error, keep_moving=graceful)
            return
        self.state = State.LOST
        self._error = error
        self.sending.close(error, keep_moving=graceful)
        self.receiving.lose(error, keep_moving=graceful)
        self._linked.set()
        self._closing = self._runtime.loop.create_task(self._tear_down())
        self._ended(self._closing)

    # --- closing ---

    def close(self, *, drain: bool) -> asyncio.Task[None]:
        """Begin to close, or join the closing that has begun.

        Args:
            drain: let pending sends leave first.
        """
        if not drain:  # also cuts a drain short that is under way
            error = ClosedError("the group was aborted on this side", **self._where)
            self.sending.close(error, quiet=True)
            if self._bulk is not None:
                self._bulk.sever()
        if self._closing is None:
            self._draining = drain and self.state in (State.CONNECTING, State.UP)
            self.state = State.CLOSING
            self._refuse_receives()
            self._closing = self._runtime.loop.create_task(self._run_close())
        elif self.state is State.LOST:  # and so torn down already
            self.state = State.CLOSED
            self._refuse_receives()
        return self._closing

    def _refuse_receives(self) -> None:
        error = self._closed()
        # What comes while sends leave is dropped, not left: the peer may be closing just so.
        self.receiving.close(error, drain=self._draining and self.sending.pending > 0)

    def _closed(self) -> ClosedError:
        return ClosedError("the group was closed on this side", **self._where)

    async def _run_close(self) -> None:
        if self._draining:
            await self._drain()
        quiet = not self._draining
        self._draining = False
        self._error = self._closed()
        self.sending.close(self._error, quiet=quiet)
        self._linked.set()
        if self._link is not None:
            await self._link.aclose()
        assert self._closing is not None
        self._ended(self._closing)
        await self._tear_down()
        self.state = State.CLOSED

    async def _drain(self) -> None:
        timeout = self._runtime.options.close_timeout
        try:
            async with asyncio.timeout(timeout):
                await self.sending.drain()
                self.receiving.stop_draining()
                # Nobody gets it any more, but a transfer that is cut leaves its backend in a mess.
                await self.receiving.settle()
        except TimeoutError:
            if left := self.sending.pending:
                text = "sends dropped at close: %d; %s did not take them within %g s"
            else:
                left = self.receiving.moving
                text = "transfers cut at close: %d; %s did not end them within %g s"
            log.warning(
                "group %s: " + text, self._where["group"], left, self._where["peer"], timeout
            )
        finally:
            self.receiving.stop_draining()

    async def _tear_down(self) -> None:
        """Give back everything that the group holds."""
        for verdict in self._verdicts:
            verdict.cancel()
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._link is not None:
            self._link.abort()
        await self.sending.settle(VERDICT_DELAY)
        if self._bulk is not None:
            self._bulk.sever(End.SENDING)
            if self.state is State.LOST:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._runtime.options.close_timeout):
                        await self.receiving.settle()
            await self._bulk.aclose()
        await self.sending.device.ferry.aclose()
        await self.receiving.device.ferry.aclose()
