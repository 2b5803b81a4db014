"""The bulk route of each direction: agreed on with the peer, opened, and closed.

A direction may have two, one for memory of the host and one for memory of a device; each is agreed
on by itself. The sender proposes routes in turn, the best first. Both ends set the proposed one up
at the same time; it is used once both say so, else the sender warns with the reason and proposes
the next. This happens on the first bulk message of a kind, and never again.

ROUTE frames::

    sender    OPEN   name            set up the receiving end of this route
    receiver  READY  name            it is set up
    receiver  FAILED name, reason    it cannot be set up here
    sender    DROP   name, reason    set up there, not here: forget it
    either    BROKEN name, reason    it broke in the middle; the direction is over

STORE frames carry a route's name and the keys by which its two ends find each other; CHUNK and
GRANT belong to the route that was agreed on. Which end of a direction a frame is for follows from
who sent it; for STORE frames the sequence field says it. Knows nothing of messages and their order.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import TYPE_CHECKING, Any, cast

from .errors import AiocommError, ProtocolError, RouteError
from .loops import join
from .transport.base import FrameKind
from .transport.select import (
    candidates,
    device_candidates,
    eager_limit,
    is_device_route,
    make_device_route,
    make_route,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .runtime import Runtime
    from .transport.base import Frame, Link, ReceivingRoute, Route, SendingRoute
    from .transport.device_base import DeviceReceivingRoute, DeviceSendingRoute

log = logging.getLogger("aiocomm")


class Step(enum.IntEnum):
    """The first byte of a ROUTE frame."""

    OPEN = 1
    READY = 2
    FAILED = 3
    DROP = 4
    BROKEN = 5


class End(enum.IntEnum):
    """One end of a direction, as this member sees it."""

    SENDING = 0
    RECEIVING = 1

    @property
    def opposite(self) -> End:
        """The same direction as the peer sees it."""
        return End(1 - self)


class BulkRoutes:
    """Both ends of bulk that one member has in a group.

    Args:
        runtime: the loop and the options.
        link: carries the frames.
        group: name of the group, the same on both sides.
        rank: 0 or 1 in the group.
        opened: told when the receiving end is set up.
        opened_device: the same for that of a device.
        broken: told when the peer says that an end of its broke.
    """

    def __init__(
        self,
        runtime: Runtime,
        link: Link,
        group: str,
        rank: int,
        *,
        opened: Callable[[ReceivingRoute], None],
        opened_device: Callable[[DeviceReceivingRoute], None],
        broken: Callable[[End, RouteError], None],
    ) -> None:
        self._runtime = runtime
        self._link = link
        self._group = group
        self._rank = rank
        self._names = candidates(runtime.options.route, same_host=link.same_host)
        self._opened = opened
        self._opened_device = opened_device
        self._broken = broken
        self._ends: dict[tuple[End, bool], Route] = {}  # by end, and whether it is a device's
        self._made: list[Route] = []  # every route ever made, for the closing
        self._answers: dict[str, asyncio.Future[str | None]] = {}  # to what is proposed, by name
        self._opening: asyncio.Task[Any] | None = None
        self._opening_device: asyncio.Task[Any] | None = None
        self._accepting: set[asyncio.Task[None]] = set()
        self._over = False  # the sending end was severed: nothing more is proposed

    async def open(self) -> SendingRoute:
        """The sending end; set up on the first call.

        Raises:
            RouteError: none of the candidates can be set up, or the group ended meanwhile.

        Cancellation: the set-up goes on for the next call.
        """
        if self._opening is None:
            self._opening = self._runtime.loop.create_task(self._propose_all(self._names))
        route: SendingRoute = await join(self._opening, _cut)
        return route

    async def open_device(self, index: int) -> DeviceSendingRoute:
        """The same for memory of a device.

        Args:
            index: the device on which the first such message is.

        Raises:
            RouteError: none of the candidates can be set up; nobody was warned yet.

        Cancellation: the set-up goes on for the next call.
        """
        if self._opening_device is None:
            names = device_candidates(self._runtime.options.device_route)
            self._opening_device = self._runtime.loop.create_task(self._propose_all(names, index))
        route: DeviceSendingRoute = await join(self._opening_device, _cut)
        return route

    @property
    def eager_limit(self) -> int:
        """Bytes up to which a message rides in its envelope; opening a route may change it."""
        name = self._names[0] if self.sending is None else self.sending.name
        return eager_limit(self._runtime.options.eager_limit, name)

    @property
    def sending(self) -> SendingRoute | None:
        """The sending end, where it is set up."""
        route: SendingRoute | None = _outcome(self._opening)
        return route

    @property
    def sending_device(self) -> DeviceSendingRoute | None:
        """The same for memory of a device."""
        route: DeviceSendingRoute | None = _outcome(self._opening_device)
        return route

    def frame_received(self, frame: Frame) -> None:
        """A ROUTE, STORE, CHUNK or GRANT frame.

        Raises:
            ProtocolError: it makes no sense here.
        """
        if frame.kind is FrameKind.ROUTE:
            self._step_received(frame.head)
        elif frame.kind is FrameKind.STORE:
            self._key_received(End(frame.sequence & 1).opposite, frame)
        elif frame.kind is FrameKind.CHUNK:
            self._framed(End.RECEIVING).chunk_received(frame)
        else:
            self._framed(End.SENDING).grant_received(frame)

    def break_end(self, end: End, reason: str) -> None:
        """A transfer of this end failed: sever it and tell the peer."""
        self._tell(Step.BROKEN, "", f"{end.name} {reason}")
        self.sever(end)

    def sever(self, end: End | None = None) -> None:
        """Make pending transfers (of one end, or of both) fail soon, whatever the peer does.

        A sending end that is being set up fails too, and is not proposed again.
        """
        self._over = self._over or end is not End.RECEIVING
        for (this, _), route in self._ends.items():
            if end is None or this is end:
                route.sever()

    def peer_gone(self, *, goodbye: bool) -> None:
        """Sever what cannot go on without the peer.

        Args:
            goodbye: it closed, and may have taken whole what was sent to it; what it sent itself
                may still come, where its route trails.
        """
        self._over = True
        for (end, _), route in self._ends.items():
            if route.survives or (goodbye and (end is End.SENDING or route.trails)):
                continue
            route.sever()

    async def aclose(self) -> None:
        """Sever and close whatever was set up.

        Cancellation: a route may be left open; call it again.
        """
        openings = (self._opening, self._opening_device)
        tasks = [*self._accepting, *(opening for opening in openings if opening)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # whoever waited for it may be gone: it is no news
        self.sever()
        await asyncio.gather(*(route.aclose() for route in self._made))

    # --- the sending end ---

    async def _propose_all(self, names: Sequence[str], index: int | None = None) -> Route:
        reasons = []
        for name in names:
            if self._over:
                raise RouteError("the sending end is severed", group=self._group)
            reason = await self._propose(name, index)
            if reason is None:
                return self._ends[End.SENDING, index is not None]
            reasons.append(f"{name}: {reason}")
            # Of a device's routes each is for some placements only, so that one is left is no news.
            if name != names[-1] and index is None and not self._over:
                log.warning(
                    "group %s: route %s cannot be set up, falling back to the next one: %s",
                    self._group,
                    name,
                    reason,
                )
        raise RouteError(f"no bulk route can be set up ({'; '.join(reasons)})", group=self._group)

    async def _propose(self, name: str, index: int | None) -> str | None:
        """Set one route up on both sides. Returns why not, or None."""
        task = asyncio.current_task()
        assert task is not None
        try:
            route = self._make(name, End.SENDING, index)
        except AiocommError as error:
            return str(error)
        answer = self._answers[name] = self._runtime.loop.create_future()
        self._tell(Step.OPEN, name)
        opening = asyncio.ensure_future(route.open())
        # What the peer says may end the wait, and so may the failure of this end.
        answer.add_done_callback(
            lambda said: opening.cancel() if not said.cancelled() and said.result() else None
        )
        try:
            await opening
            reason: str | None = await answer
            return reason
        except AiocommError as error:
            if task.cancelling():  # the group closes: no further proposals
                raise
            self._tell(Step.DROP, name, str(error))
            return str(error)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and not task.cancelling():
                return f"the peer says: {answer.result()}"
            raise
        finally:
            opening.cancel()
            answer.cancel()
            del self._answers[name]

    # --- the receiving end ---

    def _accept(self, name: str) -> None:
        # Made here and now, not in the task: the peer's keys may be in the very next frame.
        try:
            route = self._make(name, End.RECEIVING)
        except AiocommError as error:
            self._tell(Step.FAILED, name, str(error))
            return
        task = self._runtime.loop.create_task(self._open_accepted(name, route))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _open_accepted(self, name: str, route: Route) -> None:
        try:
            await route.open()
        except Exception as error:  # whatever it is, the sender waits for the answer
            self._tell(Step.FAILED, name, str(error) or repr(error))
        else:
            far = is_device_route(name)
            if self._ends[End.RECEIVING, far] is route:  # else another was proposed meanwhile
                if far:
                    self._opened_device(cast("DeviceReceivingRoute", route))
                else:
                    self._opened(cast("ReceivingRoute", route))
                self._tell(Step.READY, name)

    # --- both ---

    def _make(self, name: str, end: End, index: int | None = None) -> Route:
        def publish(key: str, value: bytes) -> None:
            self._link.send(FrameKind.STORE, end, f"{name}\0{key}".encode(), value)

        far = is_device_route(name)
        previous = self._ends.get((end, far))
        if previous is not None:
            previous.sever()
        sender = self._rank if end is End.SENDING else 1 - self._rank
        label, options = f"{self._group}/{name}/{sender}", self._runtime.options
        route: Route
        if far:
            route = make_device_route(
                name,
                label=label,
                loop=self._runtime.loop,
                sending=end is End.SENDING,
                publish=publish,
                off_loop=self._runtime.off_loop,
                index=index,
                options=options,
            )
        else:
            route = make_route(
                name,
                label=label,
                link=self._link,
                loop=self._runtime.loop,
                sending=end is End.SENDING,
                publish=publish,
                off_loop=self._runtime.off_loop,
                shm_bytes=options.shm_bytes,
                stall_timeout=options.stall_timeout,
            )
        self._ends[end, far] = route
        self._made.append(route)
        return route

    def _key_received(self, end: End, frame: Frame) -> None:
        try:
            name, _, key = bytes(frame.head).decode().partition("\0")
        except ValueError as error:
            raise ProtocolError("a key of the peer cannot be read") from error
        route: Any = self._ends.get((end, is_device_route(name)))
        # What a route said that was dropped here meanwhile is not for the one after it.
        if route is not None and route.name == name and hasattr(route, "deliver"):
            route.deliver(key, bytes(frame.body))

    def _framed(self, end: End) -> Any:
        """The route whose frames come over the link itself."""
        route = self._ends.get((end, False))
        handles = "chunk_received" if end is End.RECEIVING else "grant_received"
        if not hasattr(route, handles):
            raise ProtocolError("the peer sends frames of a route that was not agreed on")
        return route

    def _step_received(self, head: bytes) -> None:
        try:
            step = Step(head[0])
            name, _, reason = bytes(head[1:]).decode().partition("\0")
        except (IndexError, ValueError) as error:
            raise ProtocolError("a route frame of the peer cannot be read") from error
        if step is Step.OPEN:
            self._accept(name)
        elif step is Step.BROKEN:
            end = End.RECEIVING if reason.startswith("SENDING") else End.SENDING
            self.sever(end)
            self._broken(end, RouteError(f"the peer says: {reason}", group=self._group))
        elif step is Step.DROP:
            route = self._ends.get((End.RECEIVING, is_device_route(name)))
            if route is not None and route.name == name:
                route.sever()
        else:
            # An answer to an earlier proposal may still come after this side has dropped it.
            answer = self._answers.get(name)
            if answer is not None and not answer.done():
                answer.set_result(None if step is Step.READY else reason or "no reason given")

    def _tell(self, step: Step, name: str, reason: str = "") -> None:
        try:
            self._link.send(FrameKind.ROUTE, 0, bytes((step,)) + f"{name}\0{reason}".encode())
        except AiocommError as error:
            log.debug("group %s: the link is down (%s): %s", self._group, step.name, error)


def _cut() -> RouteError:
    return RouteError("the group ended before its route was set up")


def _outcome(opening: asyncio.Task[Any] | None) -> Any:
    """The route that was opened; None where it is not, or not yet."""
    if opening is None or not opening.done() or opening.cancelled() or opening.exception():
        return None
    return opening.result()
