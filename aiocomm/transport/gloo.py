"""The Gloo route: bulk bytes between two CPUs as two-member broadcasts, each an awaitable.

Gloo's isend and irecv have no future, its broadcast has one, so a one-way process group of two
carries each direction. This is what lives on the event loop beside ``PairRoute``: chunks and their
pace; what blocks is in ``GlooPair``, and both together are the only place that knows of Gloo. May
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

import weakref
from typing import TYPE_CHECKING, Final

import torch

from ..errors import ProtocolError, UsageError
from .blocks import BlockRoute
from .completion import Completions
from .gloo_pair import GlooPair
from .pair_route import PairRoute
from .route_end import SETUP_TIMEOUT
from .transfer import MIB, longest_chunk, pack_count, parse_count

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Sequence

    from .transfer import Transfer

# What a receiver issues ahead: enough to outlast a loop that is busy for some 50 ms, few enough
# that issuing them (20 to 50 us each) does not hold the loop. A sender follows.
WINDOW_CHUNKS = 32
WINDOW_BYTES = 256 * MIB
# Bytes between two wake-ups of the loop (one for each MiB took a fifth of the rate), and the
# seconds after which a slow or stalled peer's ends are told one by one nevertheless.
ANNOUNCE_BYTES = 4 * MIB
ANNOUNCE_LATE = 0.02


class GlooRoute(PairRoute, BlockRoute):
    """One direction of one group over Gloo; see ``PairRoute``, also for what is not named here.

    Args:
        local_host: numeric address to bind; ``GLOO_SOCKET_IFNAME`` wins where set.
        stall_timeout: as in ``Options``.
    """

    name: Final = "gloo"
    trails: Final = True  # its bytes have a connection of their own
    backend = "Gloo"
    _pair: GlooPair

    def __init__(
        self,
        label: str,
        *,
        sending: bool,
        local_host: str,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        timeout: float = SETUP_TIMEOUT,
        stall_timeout: float = 30.0,
    ) -> None:
        super().__init__(label, sending=sending, loop=loop, publish=publish, timeout=timeout)
        rank, later = 0 if sending else 1, self._publish_from_thread
        self._pair = GlooPair(label, rank, local_host, later, timeout, stall_timeout)
        self._completions = Completions(loop, self._ended)
        self._ready_key = f"{label}/ready"
        self._ready = 0  # chunks that the receiver has issued, as far as the sender knows
        self._round = 0  # bytes since the last one to be announced, in this turn of the loop
        self._late: asyncio.TimerHandle | None = None
        self._issued = 0  # chunks so far
        self._chunks = 0  # in flight
        self._bytes = 0
        # An interpreter that exits would wait for ever for a group with an operation pending.
        weakref.finalize(self, self._pair.give_up)

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

    def _may_issue(self) -> bool:
        if self.sending:
            return self._issued < self._ready
        return self._chunks < WINDOW_CHUNKS and self._bytes < WINDOW_BYTES

    def _issue(self, transfer: Transfer, chunk: torch.Tensor) -> None:
        length = chunk.numel()
        self._completions.add(self._pair.broadcast(chunk), (transfer, length))
        self._issued += 1
        self._chunks += 1
        self._bytes += length
        if not self._round:
            self._loop.call_soon(self._end_round)
        self._round += length
        if self._round >= ANNOUNCE_BYTES:
            self._completions.announce()
            self._round = 1

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

    def _ended(self, chunk: tuple[Transfer, int], error: BaseException | None) -> None:
        transfer, length = chunk
        self._chunks -= 1
        self._bytes -= length
        self._chunk_done(transfer, error)

    def _end_pair(self, done: Callable[[], None], *, opening: bool) -> threading.Thread:
        if self._chunks or opening:
            self._pair.cut(self._refusal())
        return self._pair.close_in_thread(done)  # without a cut, what was sent still arrives
