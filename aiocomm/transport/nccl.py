"""The NCCL route: bulk bytes between two GPUs as two-member broadcasts in a stream of the route's.

This is the half that lives on the event loop: order, chunks, buffers, errors; what blocks is in
``NcclPair``. May not know of links, messages or payloads. The stream waits for the caller's at the
call, so what was queued there before ``send`` is in what is sent; nothing waits on the host. A
chunk is done when the event behind it is; chunks, and so futures, complete in order.

As over Gloo the sender issues a chunk only when the receiver has said that it has issued the same
one: no kernel spins until the peer's user calls ``recv``, and the time-out of one tells a stalled
peer. A send is done when the receiver has it all, so that nothing is cut off when the group is
aborted at the end.

Small buffers of a message are joined by one kernel into blocks of up to 32 MiB, large ones go as
they are. Rejected: ``_group_start`` and ``_group_end`` around a message's broadcasts (torch records
their events before ``_group_end`` launches them), and one transfer for all (a copy of large ones).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..device import here
from ..errors import AiocommError, DeviceError, RouteError
from ..packing import plan_device, scatter, sizes_of
from .completion import poller_of
from .device_blocks import bring_over, gather_on_device, give_away
from .device_meeting import Meeting
from .gloo_pair import first_line
from .gloo_transfer import MIB, Transfer
from .nccl_flow import Flow
from .nccl_pair import NcclPair

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    import torch

    from ..device.base import Event
    from ..options import Options

log = logging.getLogger(__name__)

CHUNK = 64 * MIB
"""Bytes of one broadcast: some 200 us of a fast link, to 20 us that issuing it takes; and the most
that is held to drop a message."""
# Seconds after which a broken transfer is failed though the device has not let go of it, and that
# aclose waits for the abort; the rest goes on in a thread.
SEVER_GRACE, CLOSE_GRACE = 0.25, 2.0


class _State(enum.Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class NcclRoute:
    """One direction of one group over NCCL; used on its loop's thread only.

    Args:
        label: the same on both sides, unique on the link; the keys to publish begin with it.
        sending: which side it is.
        loop: the loop it belongs to.
        publish: hands a key and value to the peer's route (``deliver``), in order; on the loop.
        index: the device of this side.
        options: of the runtime.
        timeout: seconds for ``open``.
    """

    name: Final = "nccl"
    survives: Final = False

    def __init__(
        self,
        label: str,
        *,
        sending: bool,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        index: int,
        options: Options,
        timeout: float = 300.0,
    ) -> None:
        self.label = label
        self.sending = sending
        self.index = index
        self._loop = loop
        self._publish = publish
        self._timeout = timeout
        self._device = device = here.accelerator
        self._poller = poller_of(loop)
        self._stream = device.stream(index, high_priority=options.high_priority)
        rank, later = 0 if sending else 1, self._publish_from_thread
        self._pair = NcclPair(device, label, rank, self._stream, later, timeout, options)
        self._state = _State.NEW
        self._opened: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] | None = None
        self._error: AiocommError | None = None  # why it is closed, if not by aclose
        self._waiting: deque[Transfer] = deque()  # with chunks left to issue
        self._active: deque[Transfer] = deque()  # not done, in order
        self._meeting = Meeting(loop, label, self._publish_on_loop)
        self._flow = Flow(
            label,
            sending=sending,
            loop=loop,
            publish=self._publish_on_loop,
            stall_timeout=options.stall_timeout,
            stalled=self._stalled,
        )
        self._scratch: torch.Tensor | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._closer: threading.Thread | None = None

    def __repr__(self) -> str:
        side = "sends" if self.sending else "receives"
        return f"<NcclRoute {self.label!r} {side} {self._state.value} pending={len(self._active)}>"

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
            self._pump()
            self._finish_done()

    async def open(self) -> None:
        """Construct and connect the group, in a thread; both sides must do so.

        Raises:
            RouteError: it could not be set up, in time or at all, the two devices cannot be joined,
                or the route was severed or closed; the reason is in the text and chained.

        Cancellation: severs the route; the thread ends by itself.
        """
        if self._state is not _State.NEW:
            raise self._refusal()
        self._state = _State.OPENING
        try:
            async with asyncio.timeout(self._timeout):
                await self._meet()
                self._pair.start(lambda error: self._post(lambda: self._constructed(error)))
                await self._opened
        except TimeoutError as error:
            text = f"was not set up in {self._timeout:g} s: the peer does not open its side"
            self._fail(RouteError(f"the NCCL route {self.label!r} {text}"))
            raise self._refusal() from error
        except AiocommError as error:
            self._fail(error)
            raise
        except asyncio.CancelledError:
            self.sever()
            raise

    async def _meet(self) -> None:
        """Exchange which chips the two are, and see whether NCCL can join them."""
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

    def _publish_from_thread(self, key: str, value: bytes) -> None:
        self._loop.call_soon_threadsafe(self._publish_on_loop, key, value)

    def _publish_on_loop(self, key: str, value: bytes) -> None:
        if self._state is _State.CLOSED:
            return
        try:
            self._publish(key, value)
        except Exception as error:
            self._break("could not reach its peer", error)

    def _constructed(self, error: BaseException | None) -> None:
        if self._state is not _State.OPENING:
            return
        if error is not None:
            self._break("could not be set up", error)
        else:
            self._state = _State.OPEN
            self._opened.set_result(None)

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
        longest = min(CHUNK, max(blocks, default=0))
        if self._scratch is None or self._scratch.numel() < longest:
            self._scratch = self._device.allocate(longest, self._stream)
        return self._queue([self._scratch], blocks, scratch=True)

    def _queue(
        self,
        blocks: Sequence[torch.Tensor],
        sizes: Sequence[int],
        *,
        scratch: bool = False,
        keep: object = None,
    ) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        if self._state is not _State.OPEN:
            future.set_exception(self._refusal())
            return future
        transfer = Transfer(blocks, sizes, future, scratch=scratch, chunk=CHUNK)
        transfer.keep = keep
        self._active.append(transfer)
        self._waiting.append(transfer)
        self._pump()
        return future

    def _pump(self) -> None:
        waiting = self._waiting
        while waiting and self._flow.may_issue:
            transfer = waiting[0]
            chunk = transfer.next_chunk()
            try:
                held = self._pair.broadcast(chunk)
                event = self._device.record(self._stream)
            except RuntimeError as error:
                return self._break("broke", error)
            transfer.outstanding += 1
            transfer.last = self._flow.issue()
            done = self._poller.watch(event, keep=(transfer, chunk, held))
            done.add_done_callback(partial(self._chunk_done, transfer))
            if transfer.issued:
                waiting.popleft()

    def _chunk_done(self, transfer: Transfer, end: asyncio.Future[None]) -> None:
        transfer.outstanding -= 1
        self._flow.finish()
        error = end.exception()
        if error is not None:
            self._break("broke", error)
        elif self._state is _State.OPEN:
            self._pump()
        self._finish_done()

    def _stalled(self) -> None:
        text = "stands still: nothing has arrived for the seconds of Options.stall_timeout"
        self._fail(RouteError(f"the NCCL route {self.label!r} {text}"))

    # Ending

    def _finish_done(self) -> None:
        active = self._active
        if self._error is not None:
            # In no order: whatever the device has let go of.
            self._active = deque(transfer for transfer in active if transfer.outstanding)
            for transfer in active:
                if not transfer.outstanding:
                    self._finish(transfer)
        else:
            while active and self._is_done(active[0]):
                self._finish(active.popleft())
        if not self._active:
            self._scratch = None
            self._flow.stop()
            if self._grace is not None:
                self._grace.cancel()

    def _is_done(self, transfer: Transfer) -> bool:
        if transfer.outstanding or not transfer.issued:
            return False
        return not self.sending or transfer.last <= self._flow.taken

    def _finish(self, transfer: Transfer) -> None:
        transfer.release()
        if transfer.future.done():
            return
        if self._error is None:
            transfer.future.set_result(None)
        else:
            transfer.future.set_exception(self._refusal())

    def sever(self) -> None:
        """Drop everything: what is pending fails soon, whatever the peer does. Never blocks.

        A pending future fails when the device has let go of its buffers, or a moment later.
        """
        self._fail(RouteError(f"the NCCL route {self.label!r} was severed on this side"))

    async def aclose(self) -> None:
        """Close: what is pending fails. Bounded, idempotent; leaves no thread.

        Cancellation: the closing goes on in its thread.
        """
        self.sever()
        if self._closed is None or self._closer is None:
            return
        try:
            async with asyncio.timeout(CLOSE_GRACE):
                await asyncio.shield(self._closed)
        except TimeoutError:
            log.warning("%r: NCCL has not ended the group yet; it goes on in a thread", self)
        else:
            self._closer.join(0.1)  # its last act was to say so

    def _refusal(self) -> AiocommError:
        if self._error is None:
            return RouteError(f"the NCCL route {self.label!r} is not open")
        return self._error.again()

    def _break(self, what: str, error: BaseException) -> None:
        if isinstance(error, DeviceError):
            self._fail(error)
            return
        reason = RouteError(f"the NCCL route {self.label!r} {what}: {first_line(error)}")
        reason.__cause__ = error
        self._fail(reason)

    def _fail(self, reason: AiocommError) -> None:
        if self._state is _State.CLOSED:
            return
        was, self._state, self._error = self._state, _State.CLOSED, reason
        self._waiting.clear()
        if was is not _State.NEW:
            self._start_closing(reason)
        if self._active:
            self._grace = self._loop.call_later(SEVER_GRACE, self._fail_active)
        self._finish_done()
        self._meeting.fail(self._refusal())
        if not self._opened.done():
            self._opened.set_exception(self._refusal())
            self._opened.exception()  # whoever waits sees it; nobody may be waiting

    def _fail_active(self) -> None:
        # The buffers stay with the poller until the device has let go of them.
        for transfer in self._active:
            if not transfer.future.done():
                transfer.future.set_exception(self._refusal())

    def _start_closing(self, reason: AiocommError) -> None:
        closed = self._closed = self._loop.create_future()
        mark = partial(closed.set_result, None)
        self._closer = self._pair.cut_in_thread(reason, lambda: self._post(mark))

    def _post(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call)
