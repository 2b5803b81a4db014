"""The sending end of a cuda_ipc route: says where the bytes lie, and holds them until told.

Small buffers of a message are joined by one kernel, large ones stay where they are: nothing else
is copied here. An event is recorded behind them that the receiver's stream waits for, out of a ring
of ``SLOTS`` whose handles were told once: one event for all would make a message wait for what
was queued for a later one, and one for each message would be made and opened each time.

A send is done when the receiver says that its device has copied the bytes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ...errors import AiocommError, ProtocolError, RouteError
from ...packing import plan_device, sizes_of
from ..device_blocks import bring_over, gather_on_device
from ..route_end import SETUP_TIMEOUT, State
from ..transfer import parse_count
from .end import CudaIpcEnd
from .wire import Piece, pack_body, pack_offer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import torch

    from ...device.base import Event, SharedEvent

SLOTS = 32
"""Messages that are on their way at a time: what is sent after them waits for a receipt."""
SEVER_GRACE = 0.25
"""Seconds that memory is held after a failure: the peer's device reads it until the peer hears."""


class _Parcel:
    """One message, from ``send`` to its receipt."""

    __slots__ = ("after", "buffers", "envelope", "future", "joined", "slot")

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        after: Event,
        envelope: Callable[[bytes], None],
        future: asyncio.Future[None],
    ) -> None:
        self.buffers = buffers
        self.joined: Sequence[torch.Tensor] = ()
        self.after = after
        self.envelope = envelope
        self.future = future
        self.slot = -1


class CudaIpcSender(CudaIpcEnd):
    """See ``DeviceSendingRoute``; the arguments are those of ``CudaIpcEnd``."""

    def __init__(
        self,
        label: str,
        *,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        index: int,
        timeout: float = SETUP_TIMEOUT,
    ) -> None:
        super().__init__(label, loop=loop, publish=publish, index=index, timeout=timeout)
        self._events: Sequence[SharedEvent] = ()
        self._probe: torch.Tensor | None = None
        self._free: deque[int] = deque()  # events that no message has
        self._waiting: deque[_Parcel] = deque()  # for one of them
        self._active: deque[_Parcel] = deque()  # told to the peer, in order
        self._taken = 0  # messages that the peer has said to be copied
        self._finished = 0  # of these, those that were told to their senders

    @property
    def pending(self) -> int:
        """Messages that are not done."""
        return len(self._waiting) + len(self._active)

    async def _exchange(self) -> None:
        device = self._device
        self._probe = device.allocate(1, self._stream)
        handle, _ = device.export(self._probe)
        self._events = [device.shared_event(self.index) for _ in range(SLOTS)]
        self._free.extend(range(SLOTS))
        self._publish(self._offer_key, pack_offer([each.handle for each in self._events], handle))

    def _heard(self, key: str, value: bytes) -> None:
        if key != self._done_key:
            raise ProtocolError(f"the receiving end of cuda_ipc says {key!r}")
        self._taken = parse_count(value, self._taken)
        if self._state is not State.OPEN:
            return
        if self._taken - self._finished > len(self._active):
            raise ProtocolError("the peer says that it has copied more than there was")
        while self._finished < self._taken:
            self._finish(self._active.popleft())
        self._pump()

    def send(
        self, buffers: Sequence[torch.Tensor], *, after: Event, envelope: Callable[[bytes], None]
    ) -> asyncio.Future[None]:
        """Send one message; see ``DeviceSendingRoute``.

        Raises:
            RouteError: no other process can reach this memory, and nothing was sent.

        Cancellation: of the future does not stop the transfer; the buffers stay held.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        if self._state is not State.OPEN:
            future.set_exception(self._refusal())
            return future
        parcel = _Parcel(buffers, after, envelope, future)
        if self._waiting or not self._free:
            for block in plan_device(sizes_of(buffers)):
                if len(block.parts) == 1:
                    self._device.export(buffers[block.parts[0][0]])  # a refusal comes now
            self._waiting.append(parcel)
        else:
            self._start(parcel)
        return future

    def _pump(self) -> None:
        while self._waiting and self._free and self._state is State.OPEN:
            try:
                self._start(self._waiting[0])
            except (AiocommError, RuntimeError) as error:
                return self._break("broke", error)
            self._waiting.popleft()

    def _start(self, parcel: _Parcel) -> None:
        device, stream, buffers = self._device, self._stream, parcel.buffers
        device.wait(stream, parcel.after)
        near = bring_over(device, buffers, stream, parcel.after)
        blocks, besides = gather_on_device(device, plan_device(sizes_of(buffers)), near, stream)
        memory = buffers, near, besides, blocks
        try:
            pieces = [Piece(*device.export(block), block.numel()) for block in blocks]
        except RouteError:  # what was queued to join them still reads them
            self._hold(device.record(stream), memory)
            raise
        slot = parcel.slot = self._free.popleft()
        event = self._events[slot].record(stream)
        parcel.joined = blocks
        self._active.append(parcel)
        self._hold(event, memory)
        parcel.envelope(pack_body(slot, pieces))

    def _hold(self, event: Event, memory: object) -> None:
        """Hold what the stream reads until it has come past, and hear of an error of the device."""
        self._poller.watch(event, keep=memory).add_done_callback(self._reached)

    def _reached(self, end: asyncio.Future[None]) -> None:
        error = end.exception()
        if error is not None:
            self._break("broke", error)

    def _finish(self, parcel: _Parcel) -> None:
        self._finished += 1
        self._free.append(parcel.slot)
        parcel.buffers = parcel.joined = ()
        if not parcel.future.done():
            parcel.future.set_result(None)

    def _drop(self) -> None:
        told = [(parcel.buffers, parcel.joined) for parcel in self._active]
        if told:  # given out again at once, it would be other bytes that the peer takes for these
            self._loop.call_later(SEVER_GRACE, told.clear)
        for parcel in (*self._active, *self._waiting):
            parcel.buffers = parcel.joined = ()
            if not parcel.future.done():
                parcel.future.set_exception(self._refusal())
        self._active.clear()
        self._waiting.clear()
        self._free.clear()
        self._events, self._probe = (), None

    async def aclose(self) -> None:
        """Close: what is pending fails. Idempotent; never waits.

        Cancellation: safe.
        """
        self.sever()
