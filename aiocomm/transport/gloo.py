"""The Gloo route: bulk bytes between two CPUs as two-member broadcasts, each an awaitable.

Gloo's isend and irecv have no future, its broadcast has one, so a one-way process group of two
carries each direction. This is the half that lives on the event loop: order, chunks, buffers,
errors; what blocks is in ``GlooPair``, and both together are the only place that knows of Gloo. May
not know of links, messages or payloads: Gloo's own rendezvous goes through ``publish`` and
``deliver``. Large blocks go in chunks, so that a discarded message costs little memory; a window
of them is in flight, so that Gloo never runs dry and issuing never holds the loop for long.

The sender issues a chunk only when the receiver has said that it has issued the same one. So no
operation waits for the peer's user, and the time-out of one tells a stalled connection. That is
needed since Gloo forgets the operation in the middle of its payload when the connection breaks
(``signalException`` in its tcp/pair.cc leaves it out): nothing but its own time-out ends it. What
the receiver says is a count, told once for all that it issued in one turn of its loop. Gloo's two
threads may end operations out of order; futures complete in order nevertheless. Rejected: no
time-out (a thread, and the caller's buffers, would be lost with every peer that dies in the middle
of a chunk), and one without that count (it would break the route of a peer that is merely slow to
receive). How else the forgotten operation might be ended, and why not, stands in docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from ..errors import AiocommError, ProtocolError, RouteError, UsageError
from .blocks import BlockRoute
from .completion import Completions
from .gloo_pair import GlooPair, first_line
from .gloo_transfer import MIB, Transfer, longest_chunk, pack_count, parse_count

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

# What a receiver issues ahead: enough to outlast a loop that is busy for some 50 ms, few enough
# that issuing them (20 to 50 us each) does not hold the loop. A sender follows.
WINDOW_CHUNKS = 32
WINDOW_BYTES = 256 * MIB
# Bytes between two wake-ups of the loop (one for each MiB took a fifth of the rate), and the
# seconds after which a slow or stalled peer's ends are told one by one nevertheless.
ANNOUNCE_BYTES = 4 * MIB
ANNOUNCE_LATE = 0.02
# Seconds after which a broken transfer is failed though Gloo has not ended it: it touches its
# buffers no more once the connection is shut down, but holds them until its own time-out.
SEVER_GRACE = 0.25
# Seconds that aclose waits for what Gloo has not ended; the rest goes on in a thread.
CLOSE_GRACE = 2.0


class _State(enum.Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class GlooRoute(BlockRoute):
    """One direction of one group over Gloo; used on its loop's thread only.

    Args:
        label: the same on both sides, unique on the link; the keys to publish begin with it.
        sending: which side it is.
        loop: the loop it belongs to.
        local_host: numeric address to bind; ``GLOO_SOCKET_IFNAME`` wins where set.
        publish: hands a key and value to the peer's route (``deliver``), in order; on the loop.
        timeout: seconds for ``open``; ``stall_timeout``: as in ``Options``.
    """

    name: Final = "gloo"

    def __init__(
        self,
        label: str,
        *,
        sending: bool,
        local_host: str,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        timeout: float = 300.0,
        stall_timeout: float = 30.0,
    ) -> None:
        self.label = label
        self.sending = sending
        self._timeout = timeout
        self._loop = loop
        self._publish = publish
        rank, publish_later = 0 if sending else 1, self._publish_from_thread
        self._pair = GlooPair(label, rank, local_host, publish_later, timeout, stall_timeout)
        self._state = _State.NEW
        self._opened: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._error: AiocommError | None = None  # why it is closed, if not by aclose
        self._waiting: deque[Transfer] = deque()  # with chunks left to issue
        self._active: deque[Transfer] = deque()  # not done, in order; keeps the buffers
        self._completions = Completions(loop, self._chunk_done)
        self._ready_key = f"{label}/ready"
        self._ready = 0  # chunks that the receiver has issued, as far as the sender knows
        self._round = 0  # bytes since the last one to be announced, in this turn of the loop
        self._late: asyncio.TimerHandle | None = None
        self._issued = 0  # chunks so far
        self._chunks = 0  # in flight
        self._bytes = 0
        self._scratch: torch.Tensor | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._closer: threading.Thread | None = None
        # An interpreter that exits would wait for ever for a group with an operation pending.
        self._finalizer = weakref.finalize(self, self._pair.give_up)

    def __repr__(self) -> str:
        side = "sends" if self.sending else "receives"
        return f"<GlooRoute {self.label!r} {side} {self._state.value} pending={len(self._active)}>"

    # Opening

    def deliver(self, key: str, value: bytes) -> None:
        """Take in what the peer's route has published; on the loop, before ``open`` too.

        Raises:
            ProtocolError: it is more than any Gloo pair publishes, or no count of chunks.
        """
        if key != self._ready_key:
            self._pair.store.deliver(key, value)
            return
        if not self.sending:
            raise ProtocolError(f"the peer's end of {self!r} says what only a receiver can say")
        self._ready = parse_count(value, self._ready)
        self._pump()

    async def open(self) -> None:
        """Construct the group, in a thread; both sides must do so. A second call waits along.

        Raises:
            RouteError: it could not be set up, in time or at all, or the route was severed or
                closed; the reason is in the text and chained.

        Cancellation: severs the route; the thread ends by itself.
        """
        if self._opened is None:
            self._opened = self._loop.create_future()
            if self._state is _State.NEW:
                self._state = _State.OPENING
                self._pair.start(lambda error: self._post(lambda: self._constructed(error)))
            else:
                self._opened.set_exception(self._refusal())
        try:
            async with asyncio.timeout(self._timeout):
                # Not to be cancelled by one of several waiters before sever has said why.
                await asyncio.shield(self._opened)
        except TimeoutError as error:
            reason = RouteError(
                f"the Gloo route {self.label!r} was not set up in {self._timeout:g} s: "
                "the peer does not open its side or cannot be reached"
            )
            self._fail(reason)
            raise reason from error
        except asyncio.CancelledError:
            self.sever()
            raise

    def _publish_from_thread(self, key: str, value: bytes) -> None:
        self._loop.call_soon_threadsafe(self._publish_on_loop, key, value)

    def _publish_on_loop(self, key: str, value: bytes) -> None:
        if self._state is _State.CLOSED:
            return
        try:
            self._publish(key, value)
        except Exception as error:
            reason = RouteError(f"the Gloo route {self.label!r} could not reach its peer: {error}")
            reason.__cause__ = error
            self._fail(reason)

    def _constructed(self, error: BaseException | None) -> None:
        if self._state is not _State.OPENING:
            return
        if error is not None:
            reason = RouteError(f"the Gloo route {self.label!r} could not be set up: {error}")
            reason.__cause__ = error
            self._fail(reason)
            return
        self._state = _State.OPEN
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)

    # Moving bytes

    def send_blocks(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Queue blocks; the order of calls is the order on the wire. Never blocks.

        Args:
            blocks: uint8, 1-D, contiguous, CPU; any sizes, of which the peer must know.

        Returns:
            A future that completes when the buffers are free; with RouteError when the route
            breaks, is severed, or is not open.

        Cancellation: of the future does not stop the transfer; the buffers stay held.
        """
        if not self.sending:
            raise UsageError(f"{self!r} cannot send")
        return self._queue(blocks, [block.numel() for block in blocks])

    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Fill blocks with what the peer sends next, sizes alike. Otherwise as ``send_blocks``."""
        if self.sending:
            raise UsageError(f"{self!r} cannot receive")
        return self._queue(blocks, [block.numel() for block in blocks])

    def discard_blocks(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Take the next blocks, of these sizes in bytes, and drop them; at most 16 MiB are held."""
        if self.sending:
            raise UsageError(f"{self!r} cannot receive")
        longest = longest_chunk(sizes)
        if self._scratch is None or self._scratch.numel() < longest:
            self._scratch = torch.empty(longest, dtype=torch.uint8)
        return self._queue((self._scratch,), sizes, scratch=True)

    def _queue(
        self, blocks: Sequence[torch.Tensor], sizes: Sequence[int], *, scratch: bool = False
    ) -> asyncio.Future[None]:
        future = self._loop.create_future()
        if self._state is not _State.OPEN:
            future.set_exception(self._refusal())
            return future
        transfer = Transfer(blocks, sizes, future, scratch=scratch)
        self._active.append(transfer)
        if transfer.issued:
            self._finish_done()  # nothing else will tell
        else:
            self._waiting.append(transfer)
            self._pump()
        return future

    def _pump(self) -> None:
        waiting = self._waiting
        while waiting and self._may_issue():
            transfer = waiting[0]
            chunk = transfer.next_chunk()
            length = chunk.numel()
            try:
                work = self._pair.broadcast(chunk)
            except RuntimeError as error:
                return self._broken(error)
            self._completions.add(work, (transfer, length))
            transfer.outstanding += 1
            self._issued += 1
            self._chunks += 1
            self._bytes += length
            if transfer.issued:
                waiting.popleft()
            if not self._round:
                self._loop.call_soon(self._end_round)
            self._round += length
            if self._round >= ANNOUNCE_BYTES:
                self._completions.announce()
                self._round = 1

    def _may_issue(self) -> bool:
        if self.sending:
            return self._issued < self._ready
        return self._chunks < WINDOW_CHUNKS and self._bytes < WINDOW_BYTES

    def _end_round(self) -> None:
        self._round = 0
        self._completions.announce()
        if self._late is None:
            self._late = self._loop.call_later(ANNOUNCE_LATE, self._announce_late)
        if not self.sending:
            self._publish_on_loop(self._ready_key, pack_count(self._issued))

    def _announce_late(self) -> None:
        self._late = None
        self._completions.announce_all()

    def _chunk_done(self, chunk: tuple[Transfer, int], error: BaseException | None) -> None:
        transfer, length = chunk
        transfer.outstanding -= 1
        self._chunks -= 1
        self._bytes -= length
        if error is not None:
            self._broken(error)
        elif self._waiting:
            self._pump()
        self._finish_done()

    def _finish_done(self) -> None:
        active = self._active
        if self._error is not None:
            # In no order: whatever Gloo has let go of.
            self._active = deque(transfer for transfer in active if transfer.outstanding)
            for transfer in active:
                if not transfer.outstanding:
                    self._finish(transfer)
        else:
            while active and not active[0].outstanding and active[0].issued:
                self._finish(active.popleft())
        if not self._active:
            self._scratch = None
            if self._grace is not None:
                self._grace.cancel()

    def _finish(self, transfer: Transfer) -> None:
        transfer.release()
        if transfer.future.done():
            return
        if self._error is None:
            transfer.future.set_result(None)
        else:
            transfer.future.set_exception(self._refusal())

    # Ending

    def sever(self) -> None:
        """Drop everything: what is pending fails soon, whatever the peer does. Never blocks.

        A pending future fails when Gloo has let go of its buffers or can touch them no more.
        """
        self._fail(RouteError(f"the Gloo route {self.label!r} was severed on this side"))

    async def aclose(self) -> None:
        """Close: what is pending fails, what is done still reaches the peer. Bounded, idempotent.

        Leaves no thread or socket, unless Gloo holds a broken chunk (``Options.stall_timeout``).

        Cancellation: the closing goes on in its thread.
        """
        if self._state is _State.NEW:
            self._state = _State.CLOSED
            self._finalizer.detach()
        else:
            self.sever()
        if self._closed is None or self._closer is None:
            return
        try:
            async with asyncio.timeout(CLOSE_GRACE):
                await asyncio.shield(self._closed)
        except TimeoutError:
            log.warning("%r broke in the middle of a chunk: Gloo holds it a while longer", self)
        else:
            self._closer.join(0.1)  # its last act was to say so

    def _refusal(self) -> AiocommError:
        if self._error is None:
            return RouteError(f"the Gloo route {self.label!r} is not open")
        return self._error.again()

    def _broken(self, error: BaseException) -> None:
        reason = RouteError(f"the Gloo route {self.label!r} broke: {first_line(error)}")
        reason.__cause__ = error
        self._fail(reason)

    def _fail(self, reason: AiocommError) -> None:
        if self._state is _State.CLOSED:
            return
        was, self._state, self._error = self._state, _State.CLOSED, reason
        self._waiting.clear()
        if was is _State.NEW:
            self._finalizer.detach()
        else:
            if self._chunks or was is _State.OPENING:
                self._pair.cut(reason)
            self._start_closing()  # without a cut, what was sent still reaches the peer
        if self._active:
            self._grace = self._loop.call_later(SEVER_GRACE, self._fail_active)
        self._finish_done()
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(self._refusal())
            self._opened.exception()  # whoever waits sees it; nobody may be waiting

    def _fail_active(self) -> None:
        # The buffers stay in _active until Gloo has let go of them.
        for transfer in self._active:
            if not transfer.future.done():
                transfer.future.set_exception(self._refusal())

    def _start_closing(self) -> None:
        closed = self._closed = self._loop.create_future()

        def mark() -> None:
            if not closed.done():
                closed.set_result(None)

        self._closer = self._pair.close_in_thread(lambda: self._post(mark))

    def _post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call)
