"""What an actor calls ``self.comm``: one runtime, whose groups are found by the peer's address.

The runtime is there at the first call and is opened behind it, so that calls take their place in
the order at once (``open_soon``). A peer that died is looked for again by the next call: a group
that is lost gives way to a new one, and what it had received whole is received first. Knows
nothing of Ray.

Rejected: asking the collective for the group at every call (it hands a lost group out once, and
what else had arrived there would be lost with it).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .address import WorkerAddress
from .collective import open_soon
from .errors import UsageError
from .options import Options
from .rendezvous.base import Store
from .session import LIVE, UP, State

if TYPE_CHECKING:
    import torch

    from .group import CollectiveGroup
    from .handles import AsyncWork

log = logging.getLogger("aiocomm")

CLOSE_GRACE = 2.0
"""Seconds beyond ``Options.close_timeout`` that closing may hold up the end of a process."""

Peer = tuple[str, int]
"""Name of a group of workers, and a rank in it."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What a launcher tells a worker about itself; None leaves it to the worker.

    Args:
        address: who it is.
        board: where the workers find one another.
        options: the settings.

    Raises:
        UsageError: one of them is something else; the text says which.
    """

    address: WorkerAddress | None = None
    board: Store | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        for what, given, kind in (
            ("address", self.address, WorkerAddress),
            ("board", self.board, Store),
            ("options", self.options, Options),
        ):
            if given is not None and not isinstance(given, kind):
                raise UsageError(
                    f"{what} {given!r} is not usable: give an aiocomm.{kind.__name__}, or leave "
                    "it out"
                )


class Comm:
    """The communication of one worker in one event loop.

    Every call of ``send``, ``recv``, ``send_tensor`` and ``recv_tensor`` takes its place in the
    order when it is called, and returns a work: see ``aiocomm.CollectiveGroup``, which has the same
    calls without the peer.

    Args:
        address: this worker's.
        board: where the workers find one another.
        options: the settings.

    Attributes:
        address: this worker's; its ``name`` and ``rank``.

    Raises:
        UsageError: no event loop is running in this thread.
    """

    def __init__(self, address: WorkerAddress, *, board: Store, options: Options) -> None:
        self.address = address
        try:
            self._collective = open_soon(address, store=board, options=options)
        except RuntimeError as error:
            raise UsageError(
                f"{address} has no event loop in this thread: use it in a coroutine, or "
                "aiocomm.worker.BlockingWorker in an actor without one"
            ) from error
        self._groups: dict[Peer, CollectiveGroup] = {}
        self._former: dict[Peer, deque[CollectiveGroup]] = {}

    def __repr__(self) -> str:
        return f"<Comm of {self._collective!r}>"

    def send(
        self, obj: object, dst_group: str, dst_rank: int, async_op: bool = True
    ) -> AsyncWork[None]:
        """Send an object to a worker; see ``aiocomm.CollectiveGroup.send``.

        Raises:
            AddressError: no worker can have that address, or it is this one.
            PayloadError: the object cannot be sent.
            ClosedError, WrongLoopError, UsageError: as there.

        Cancellation: of the work: see ``SendWork``.
        """
        return self.to((dst_group, dst_rank)).send(obj, async_op)

    def recv(self, src_group: str, src_rank: int, async_op: bool = True) -> AsyncWork[Any]:
        """Receive what a worker gave to ``send``; see ``aiocomm.CollectiveGroup.recv``.

        Raises:
            AddressError, ClosedError, WrongLoopError, UsageError: as ``send``.

        The work fails with PeerLostError when the worker dies; the next call waits for its next
        life.

        Cancellation: of the work: loses no message, see ``RecvWork``.
        """
        return self.source((src_group, src_rank)).recv(async_op)

    def send_tensor(
        self, tensor: torch.Tensor, dst_group: str, dst_rank: int, async_op: bool = True
    ) -> AsyncWork[None]:
        """Send one tensor to a worker's ``recv_tensor``.

        Raises: as ``send``.

        Cancellation: of the work: see ``SendWork``.
        """
        return self.to((dst_group, dst_rank)).send_tensor(tensor, async_op)

    def recv_tensor(
        self, tensor: torch.Tensor, src_group: str, src_rank: int, async_op: bool = True
    ) -> AsyncWork[torch.Tensor]:
        """Receive into ``tensor`` what a worker gave to ``send_tensor``.

        Raises:
            PayloadError: the buffer cannot be received into.
            AddressError, ClosedError, WrongLoopError, UsageError: as ``recv``.

        Cancellation: of the work: loses no message, see ``RecvWork``.
        """
        return self.source((src_group, src_rank)).recv_tensor(tensor, async_op)

    def group(self, name: str, rank: int) -> CollectiveGroup:
        """The group that ``send`` to that worker uses now; a new one once its peer is lost.

        Raises:
            AddressError, ClosedError, WrongLoopError: as ``send``.
        """
        address = WorkerAddress.of(name, rank)
        peer = (name, rank)
        group = self._groups.get(peer)
        while group is None or group._session.state not in LIVE:
            if group is not None and _holds(group):
                self._former.setdefault(peer, deque()).append(group)
            group = self._collective.create_collective_group([self.address, address])
            self._groups[peer] = group
        return group

    async def ready(self) -> None:
        """Be found by the other workers, which begins by itself.

        Raises:
            RendezvousError, NetworkError: that failed; the next call tries again.
            ClosedError: closed on this side.

        Cancellation: safe; the opening goes on.
        """
        await self._collective.ready()

    async def aclose(self) -> None:
        """Drain and close: see ``aiocomm.Collective.aclose``. Calls raise ClosedError from then on.

        Cancellation: the closing goes on in the background.
        """
        await self._collective.aclose()

    async def abort(self) -> None:
        """Close at once; whatever is pending fails with ClosedError. Idempotent.

        Cancellation: the closing goes on in the background.
        """
        await self._collective.abort()

    def close_from_thread(self) -> None:
        """Like ``aclose``, from a thread without a loop, whether or not the loop still runs.

        Waits for at most ``Options.close_timeout`` and a little more: a loop that is stuck does not
        hold up the end of its process.
        """
        loop = self._collective._runtime.loop
        if loop.is_closed():
            return
        limit = self._collective.options.close_timeout + CLOSE_GRACE
        try:
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(self.aclose(), loop).result(limit)
            else:  # Ray has stopped it by then, and nobody else will run it again
                loop.run_until_complete(asyncio.wait_for(self.aclose(), limit))
        except TimeoutError:
            log.warning("%r ends without a goodbye: its event loop is stuck", self)

    # --- which group a call is for; ``blocking.Comm`` asks too ---

    def linked(self, peer: Peer) -> CollectiveGroup | None:
        """The group of that peer, if it is connected and the only one; from any thread."""
        try:
            group = self._groups.get(peer)
        except TypeError:  # no name; ``group`` says so
            return None
        if group is not None and group._session.state is UP and not self._former:
            return group
        return None

    def to(self, peer: Peer) -> CollectiveGroup:
        """The group to send to that peer by."""
        return self.linked(peer) or self.group(*peer)

    def source(self, peer: Peer) -> CollectiveGroup:
        """The group to receive from that peer by: a lost one until it is empty."""
        if (group := self.linked(peer)) is not None:
            return group
        present = self.group(*peer)
        former = self._former.get(peer)
        while former:
            if _holds(former[0]):
                return former[0]
            former.popleft()
        self._former.pop(peer, None)
        return present


def _holds(group: CollectiveGroup) -> bool:
    """Whether the group is lost and still has whole messages."""
    session = group._session
    return session.state is State.LOST and session.receiving.unreceived > 0
