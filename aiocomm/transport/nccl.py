"""The NCCL route: bulk bytes between two GPUs as two-member broadcasts in a stream of the route's.

This is what lives on the event loop beside ``PairRoute``: chunks and their pace, and memory; what
blocks is in ``NcclPair``. May not know of links, messages or payloads. The stream waits for the
caller's at the call, so what was queued there before ``send`` is in what is sent; nothing waits on
the host. A chunk is done when the event behind it is; chunks, and so futures, complete in order.

As over Gloo the sender issues a chunk only when the receiver has said that it has issued the same
one: no kernel spins until the peer's user calls ``recv``, and the time-out of one tells a stalled
peer. A send is done when the receiver has it all, so that nothing is cut off when the group is
aborted at the end.

Small buffers of a message are joined by one kernel into blocks of up to 32 MiB, large ones go as
they are. Rejected: ``_group_start`` and ``_group_end`` around a message's broadcasts (torch records
their events before ``_group_end`` launches them), and one transfer for all (a copy of large ones).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ..device import here
from ..errors import RouteError
from ..packing import plan_device, scatter, sizes_of
from .completion import poller_of
from .device_blocks import bring_over, gather_on_device, give_away
from .device_meeting import Meeting
from .nccl_flow import Flow
from .nccl_pair import NcclPair
from .pair_route import PairRoute
from .route_end import SETUP_TIMEOUT
from .transfer import MIB

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Sequence

    import torch

    from ..device.base import Event
    from ..options import Options
    from .transfer import Transfer

CHUNK = 64 * MIB
"""Bytes of one broadcast: some 200 us of a fast link, to 20 us that issuing it takes; and the most
that is held to drop a message."""


class NcclRoute(PairRoute):
    """One direction of one group over NCCL; see ``PairRoute``, also for what is not named here.

    Args:
        index: the device of this side.
        options: of the runtime.
    """

    name: Final = "nccl"
    survives: Final = False
    trails: Final = False  # a send is done when all of it has come
    backend = "NCCL"
    chunk = CHUNK
    _pair: NcclPair

    def __init__(
        self,
        label: str,
        *,
        sending: bool,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        index: int,
        options: Options,
        timeout: float = SETUP_TIMEOUT,
    ) -> None:
        super().__init__(label, sending=sending, loop=loop, publish=publish, timeout=timeout)
        self.index = index
        self._device = device = here.accelerator
        self._poller = poller_of(loop)
        self._stream = device.stream(index, high_priority=options.high_priority)
        rank, later = 0 if sending else 1, self._publish_from_thread
        self._pair = NcclPair(device, label, rank, self._stream, later, timeout, options)
        self._meeting = Meeting(loop, label, self._publish_on_loop)
        self._flow = Flow(
            label,
            sending=sending,
            loop=loop,
            publish=self._publish_on_loop,
            stall_timeout=options.stall_timeout,
            stalled=self._stalled,
        )

    # Opening

    def deliver(self, key: str, value: bytes) -> None:
        """Take in what the peer's route has published; on the loop, before ``open`` too.

        Raises:
            ProtocolError: it is more than any NCCL pair publishes, or no count of chunks.
        """
        if key == self._meeting.key:
            self._meeting.deliver(value)
        elif not self._flow.hears(key):
            self._pair.store.deliver(key, value)
        else:
            self._flow.heard(key, value)
            self._taken = self._flow.taken
            self._pump()
            self._finish_done()

    async def _set_up(self) -> None:
        """Exchange which chips the two are, and see whether NCCL can join them; then do so."""
        if self._device.process_group is None:
            raise RouteError("this torch has no NCCL: install one that is built with CUDA")
        own = self._device.identity(self.index)
        peer = await self._meeting.meet(own)
        if peer.uuid == own.uuid:
            raise RouteError(f"both sides are on one GPU ({own.uuid}), which NCCL refuses")
        if peer.model != own.model:
            raise RouteError(
                f"the GPUs are of different models ({own.model} here, {peer.model} there)"
            )
        await super()._set_up()

    # Moving bytes

    def send(
        self, buffers: Sequence[torch.Tensor], *, after: Event, envelope: Callable[[bytes], None]
    ) -> asyncio.Future[None]:
        """Send one message; see ``DeviceSendingRoute``.

        Returns:
            A future that completes when the receiver has it all; with RouteError when the route
            breaks, is severed, or is not open, with DeviceError when the device fails.

        Cancellation: of the future does not stop the transfer; the buffers stay held.
        """
        envelope(b"")
        self._device.wait(self._stream, after)
        near = bring_over(self._device, buffers, self._stream, after)
        plan = plan_device(sizes_of(buffers))
        blocks, besides = gather_on_device(self._device, plan, near, self._stream)
        return self._queue(blocks, sizes_of(blocks), keep=(buffers, near, besides))

    def receive(
        self, body: bytes, block: torch.Tensor, *, after: Event | None
    ) -> asyncio.Future[None]:
        """Fill the block with what the peer sends next. Otherwise as ``send``."""
        if after is not None:
            self._device.wait(self._stream, after)
        return self._queue([block], [block.numel()])

    def fetch(
        self, body: bytes, sizes: Sequence[int]
    ) -> tuple[Sequence[torch.Tensor], asyncio.Future[None]]:
        """Receive buffers of these sizes into fresh memory. Otherwise as ``send``."""
        blocks = plan_device(sizes)
        memory = [self._device.allocate(block.nbytes, self._stream) for block in blocks]
        future = self._queue(memory, [block.nbytes for block in blocks])
        future.add_done_callback(lambda _: give_away(self._device, memory, self.index))
        return scatter(blocks, memory, sizes), future

    def discard(self, body: bytes, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Take the next message, and drop it; at most one chunk is held."""
        blocks = [block.nbytes for block in plan_device(sizes)]
        longest = min(self.chunk, max(blocks, default=0))
        if self._scratch is None or self._scratch.numel() < longest:
            self._scratch = self._device.allocate(longest, self._stream)
        return self._queue([self._scratch], blocks, scratch=True)

    def _may_issue(self) -> bool:
        return self._flow.may_issue

    def _issue(self, transfer: Transfer, chunk: torch.Tensor) -> None:
        held = self._pair.broadcast(chunk)
        event = self._device.record(self._stream)
        number = self._flow.issue()
        if self.sending:
            transfer.last = number
        done = self._poller.watch(event, keep=(transfer, chunk, held))
        done.add_done_callback(partial(self._event_done, transfer))

    def _event_done(self, transfer: Transfer, end: asyncio.Future[None]) -> None:
        self._flow.finish()
        self._chunk_done(transfer, end.exception())

    def _stalled(self) -> None:
        text = "stands still: nothing has arrived for the seconds of Options.stall_timeout"
        self._fail(self._reason(text))

    def _finish_done(self) -> None:
        super()._finish_done()
        if not self._active:
            self._flow.stop()

    def _end_pair(self, done: Callable[[], None], *, opening: bool) -> threading.Thread:
        return self._pair.cut_in_thread(self._refusal(), done)
