"""A group of two members: what users send and receive with.

Only the calls and what they promise; ``session.py`` is what happens behind them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .device import here
from .errors import UsageError
from .payload import as_bytes, pack, pack_tensor, spec_of
from .scheduler import RecvWork, SendWork
from .stats import GroupStatistics

if TYPE_CHECKING:
    import torch

    from .address import WorkerAddress
    from .handles import AsyncWork
    from .runtime import Runtime
    from .session import Session


class CollectiveGroup:
    """Two workers that exchange tensors and objects, in strict order in each direction.

    Made by ``Collective.create_collective_group``. Every call of ``send``, ``recv``,
    ``send_tensor`` and ``recv_tensor`` takes its place in the order when it is called, not when
    its work is awaited. The two directions never wait for each other.

    All four may be called on the loop's own thread, and from threads without a loop.

    Attributes:
        name: of the group.
        members: both addresses, by rank.
        rank: of this worker, 0 or 1.
        peer: address of the other member.
    """

    def __init__(
        self,
        runtime: Runtime,
        session: Session,
        *,
        name: str,
        members: tuple[WorkerAddress, WorkerAddress],
        rank: int,
    ) -> None:
        self.name = name
        self.members = members
        self.rank = rank
        self.peer = members[1 - rank]
        self._runtime = runtime
        self._session = session

    def __repr__(self) -> str:
        session = self._session
        return (
            f"<CollectiveGroup {self.name!r} rank {self.rank} of {self.members[0]}, "
            f"{self.members[1]}: {session.state.value}, {session.sending.pending} sends and "
            f"{session.receiving.pending} recvs pending>"
        )

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
        if not async_op:
            raise _would_block()
        packed = pack(obj)
        if packed.device is not None:
            packed.device.ready = here.mark(packed.device.index)
        work, lane = SendWork(loop=self._runtime.loop), self._session.sending
        work._lane = lane
        self._session.enter(lane.submit, work, packed)
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
        if not async_op:
            raise _would_block()
        work, lane = RecvWork(loop=self._runtime.loop), self._session.receiving
        work._lane = lane
        if here.in_use():
            index = self._runtime.options.device
            if index is None or index < here.accelerator.count():  # else no tensor can come there
                work._home = here.stream_here(index)
        self._session.enter(lane.submit, work)
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
        if not async_op:
            raise _would_block()
        packed = pack_tensor(tensor)
        if packed.device is not None:
            packed.device.ready = here.mark(packed.device.index)
        work, lane = SendWork(loop=self._runtime.loop), self._session.sending
        work._lane = lane
        self._session.enter(lane.submit, work, packed)
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
        if not async_op:
            raise _would_block()
        memory = as_bytes(tensor)
        work, lane = RecvWork(loop=self._runtime.loop), self._session.receiving
        work._lane = lane
        work._buffer, work._bytes, work._spec = tensor, memory, spec_of(tensor)
        if work._spec.device_type != "cpu" and memory.numel():
            work._ready = here.mark(here.device_of(memory).index)
        self._session.enter(lane.submit, work)
        return work

    async def ready(self) -> None:
        """Connect to the peer, and set up the bulk route of the sending direction.

        Raises:
            RendezvousTimeout: the peer did not appear in time.
            PeerLostError, HandshakeError, RouteError: it appeared, and then this.
            ClosedError: closed on this side.

        Cancellation: safe; what was begun goes on for the next call.
        """
        await self._session.ready()

    def statistics(self) -> GroupStatistics:
        """What went where so far."""
        session = self._session
        route = session.bulk_route
        return GroupStatistics(
            group=self.name,
            peer=str(self.peer),
            state=session.state.value,
            sent=session.sending.traffic.snapshot(),
            received=session.receiving.traffic.snapshot(),
            pending_sends=session.sending.pending,
            pending_recvs=session.receiving.pending,
            unreceived=session.receiving.unreceived,
            bulk_route=route.name if route is not None else None,
            device_route=session.device_route,
        )

    async def aclose(self) -> None:
        """Drain and close: pending sends leave, within ``close_timeout``, then goodbye.

        Receives that wait fail with ClosedError; what the peer sends until the sends have left is
        taken and dropped. Idempotent.

        Raises:
            WrongLoopError: called in another event loop.

        Cancellation: the closing goes on in the background.
        """
        self._runtime.check_loop()
        await asyncio.shield(self._session.close(drain=True))

    async def abort(self) -> None:
        """Close at once: whatever is pending fails with ClosedError. Idempotent.

        Raises:
            WrongLoopError: called in another event loop.

        Cancellation: the closing goes on in the background.
        """
        self._runtime.check_loop()
        await asyncio.shield(self._session.close(drain=False))


def _would_block() -> UsageError:
    return UsageError(
        "async_op=False would stop the event loop: await the work, or use the same call of "
        "aiocomm.blocking.CollectiveGroup"
    )
