"""The receiving end of a cuda_ipc route: the device copies out of the sender's memory.

Copies go in a stream of the route's, which waits for the sender's event on the device: the host
waits for nothing. Messages are done in order, and the sender is told how many are, once for all of
a turn of the loop. Memory of the sender is mapped off the loop and never under the hands of a copy
unmapped; a message that is dropped needs neither.

Rejected: to give the receiver the sender's memory itself. It would be the receiver's for as long as
it likes, and a completed send would no longer mean that the memory is the sender's again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from ...errors import AiocommError, DeviceError, ProtocolError
from ...packing import plan_device, scatter
from ..device_blocks import give_away
from ..route_end import SETUP_TIMEOUT, State
from ..transfer import pack_count
from .end import CudaIpcEnd
from .mappings import Mappings
from .wire import parse_body, parse_offer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ...device.base import Event
    from ..shm.copies import OffLoop
    from .wire import Piece

SEVER_GRACE = 0.25
"""Seconds after which a broken copy is failed though the device has not let go of it."""
CLOSE_GRACE = 2.0
"""Seconds that aclose waits for the device and the driver."""


class _Landing:
    """One message, from the call that takes it."""

    __slots__ = ("after", "copying", "done", "future", "pieces", "slot", "targets")

    def __init__(
        self,
        slot: int,
        pieces: Sequence[Piece],
        targets: Sequence[torch.Tensor],
        after: Event | None,
        future: asyncio.Future[None],
    ) -> None:
        self.slot = slot
        self.pieces = pieces
        self.targets = targets
        self.after = after
        self.future = future
        self.copying = False  # the device has it
        self.done = False


class CudaIpcReceiver(CudaIpcEnd):
    """See ``DeviceReceivingRoute``.

    Args:
        label: as in ``CudaIpcEnd``, as are those that are not named here.
        off_loop: see ``Runtime.off_loop``.
        stall_timeout: as in ``Options``.
    """

    def __init__(
        self,
        label: str,
        *,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        index: int,
        off_loop: OffLoop,
        stall_timeout: float,
        timeout: float = SETUP_TIMEOUT,
    ) -> None:
        super().__init__(label, loop=loop, publish=publish, index=index, timeout=timeout)
        self._mappings = Mappings(self._device, self.index, self._loop, off_loop)
        self._stall_timeout = stall_timeout
        self._events: Sequence[Event] = ()
        self._offered: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting: deque[_Landing] = deque()  # for memory to be mapped
        self._active: deque[_Landing] = deque()  # not done, in order, those that wait included
        self._mapping = False
        self._copied = 0  # messages
        self._telling = False
        self._moved_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._settled: asyncio.Event | None = None

    @property
    def pending(self) -> int:
        """Messages that are not done."""
        return len(self._active)

    async def _exchange(self) -> None:
        handles, probe = parse_offer(await self._offered)
        self._events = [self._device.open_event(handle, self._stream) for handle in handles]
        tried: asyncio.Future[None] = self._loop.create_future()

        def then(error: BaseException | None) -> None:
            if tried.done():  # severed meanwhile
                return
            if error is None:
                tried.set_result(None)
            else:
                tried.set_exception(error)

        self._mappings.map([probe], then)
        await tried

    def _heard(self, key: str, value: bytes) -> None:
        if key != self._offer_key or self._offered.done():
            raise ProtocolError(f"the sending end of cuda_ipc says {key!r}")
        self._offered.set_result(value)

    # Receiving

    def receive(
        self, body: bytes, block: torch.Tensor, *, after: Event | None
    ) -> asyncio.Future[None]:
        """Fill the block with the next message; see ``DeviceReceivingRoute``.

        Returns:
            A future that completes when the device has copied it; with RouteError when the route
            breaks, is severed or is not open, with DeviceError when the device fails.

        Cancellation: of the future does not stop the copy; the memory stays held.
        """
        return self._take(body, [block], after)

    def fetch(
        self, body: bytes, sizes: Sequence[int]
    ) -> tuple[Sequence[torch.Tensor], asyncio.Future[None]]:
        """Receive buffers of these sizes into fresh memory. Otherwise as ``receive``."""
        blocks = plan_device(sizes)
        memory = [self._device.allocate(block.nbytes, self._stream) for block in blocks]
        future = self._take(body, memory, None)
        future.add_done_callback(lambda _: give_away(self._device, memory, self.index))
        return scatter(blocks, memory, sizes), future

    def discard(self, body: bytes, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drop the next message. Otherwise as ``receive``."""
        return self._take(body, None, None)

    def _take(
        self, body: bytes, targets: Sequence[torch.Tensor] | None, after: Event | None
    ) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        if self._state is State.OPEN:
            try:
                slot, pieces = parse_body(body)
                if slot >= len(self._events):
                    raise ProtocolError(f"the peer names event {slot} of {len(self._events)}")
                if targets is None:
                    pieces = []
                elif [each.nbytes for each in pieces] != [each.numel() for each in targets]:
                    raise ProtocolError("the peer's bytes are not as many as its message has")
            except ProtocolError as error:
                self._fail(error)
        if self._state is not State.OPEN:
            future.set_exception(self._refusal())
            return future
        landing = _Landing(slot, pieces, targets or (), after, future)
        if not self._active:
            self._moved_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._stall_timeout, self._look)
        self._active.append(landing)
        self._waiting.append(landing)
        self._pump()
        return future

    def _pump(self) -> None:
        while self._waiting and not self._mapping and self._state is State.OPEN:
            landing = self._waiting[0]
            lacking = self._mappings.lacks(each.handle for each in landing.pieces)
            if lacking:
                self._mapping = True
                self._mappings.map(lacking, self._mapped)
                return
            self._waiting.popleft()
            try:
                self._begin(landing)
            except (AiocommError, RuntimeError) as error:
                return self._break("broke", error)
        self._settle()

    def _mapped(self, error: BaseException | None) -> None:
        self._mapping = False
        if error is not None:
            self._break("broke", error)
        else:
            self._pump()

    def _begin(self, landing: _Landing) -> None:
        if not landing.pieces:  # it is dropped
            landing.done = True
            return
        device, stream = self._device, self._stream
        if landing.after is not None:
            device.wait(stream, landing.after)
        device.wait(stream, self._events[landing.slot])
        landing.copying = True
        sources = [self._mappings.use(each.handle) for each in landing.pieces]
        try:
            for piece, source, target in zip(landing.pieces, sources, landing.targets, strict=True):
                if piece.offset + piece.nbytes > source.nbytes:
                    raise ProtocolError("the peer's bytes lie past the end of its memory")
                device.copy_in(target, source, piece.offset, stream)
        finally:  # what was queued before an error holds its memory too
            self._follow(landing)

    def _follow(self, landing: _Landing) -> None:
        try:
            event = self._device.record(self._stream)
        except DeviceError:  # nothing of it is carried out any more
            self._let_go(landing)
            raise
        done = self._poller.watch(event, keep=landing)
        done.add_done_callback(partial(self._landed, landing))

    def _let_go(self, landing: _Landing) -> None:
        for piece in landing.pieces:
            self._mappings.let_go(piece.handle)
        landing.pieces, landing.targets = (), ()
        landing.copying = False

    def _landed(self, landing: _Landing, end: asyncio.Future[None]) -> None:
        self._let_go(landing)
        landing.done = True
        error = end.exception()
        if error is not None:
            self._break("broke", error)
        self._settle()

    def _settle(self) -> None:
        active = self._active
        if self._error is not None:
            self._active = deque(each for each in active if each.copying)
            for each in active:
                if not each.copying:
                    self._refuse(each)
        else:
            while active and active[0].done:
                landing = active.popleft()
                self._copied += 1
                self._moved_at = self._loop.time()
                if not landing.future.done():
                    landing.future.set_result(None)
                if not self._telling:
                    self._telling = True
                    self._loop.call_soon(self._tell)  # once for all of a turn
        if not self._active:
            self._stop()

    def _tell(self) -> None:
        self._telling = False
        if self._state is State.OPEN:
            self._publish(self._done_key, pack_count(self._copied))

    def _look(self) -> None:
        self._watch = None
        left = self._moved_at + self._stall_timeout - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            text = "stands still: nothing was copied for the seconds of Options.stall_timeout"
            self._fail(self._reason(text))

    # Ending

    def _refuse(self, landing: _Landing) -> None:
        if not landing.future.done():
            landing.future.set_exception(self._refusal())

    def _drop(self) -> None:
        self._waiting.clear()
        self._events = ()
        self._mappings.close()
        if self._active:
            self._grace = self._loop.call_later(SEVER_GRACE, self._refuse_active)
        self._settle()

    def _refuse_active(self) -> None:
        # The buffers stay with the poller until the device has let go of them.
        for landing in self._active:
            self._refuse(landing)

    def _stop(self) -> None:
        for timer in (self._watch, self._grace):
            if timer is not None:
                timer.cancel()
        self._watch = self._grace = None
        if self._settled is not None:
            self._settled.set()

    async def aclose(self) -> None:
        """Close: what is pending fails, and the sender's memory is unmapped.

        Bounded: what the device has not let go of by then is unmapped when it has. Idempotent.

        Cancellation: the rest happens by itself.
        """
        self.sever()
        try:
            async with asyncio.timeout(CLOSE_GRACE):
                if self._active:
                    self._settled = asyncio.Event()
                    await self._settled.wait()
                while jobs := self._mappings.jobs:
                    await asyncio.wait(jobs)
        except TimeoutError:
            pass  # the device hangs; its memory cannot be taken from it
