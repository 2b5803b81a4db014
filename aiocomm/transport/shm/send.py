"""The sending end of a shared-memory route.

Messages go through a ring, piece by piece, and the receiver copies them out while more is copied
in. A large one for which the receiver has no memory yet is copied whole into a segment of its own
and lent. What lies in shared memory already is not copied here at all. Small messages are copied
on the loop, at once; large ones by the copying thread. What is done with the bytes at the other
end is in ``receive.py``, what the two say to each other in ``wire.py``.

Nothing waits but for room in the ring, and that comes back whatever the user of the peer does with
what is lent: a message that no segment is left for goes through the ring.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ...errors import AiocommError, ProtocolError
from ...packing import LARGE, aligned, lay_out, sizes_of, spans_of
from ...runtime import COPY_LIMIT
from ..base import FrameKind
from .copies import OffLoop, copy
from .end import ShmEnd
from .mailbox import Courier
from .memory import SenderMemory
from .outbound import Outbound, Span
from .shared import REGISTRY, Shared
from .wire import RING_NUMBER, Op, Piece, pack_ring, unpack_mailbox, unpack_numbers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ..base import Frame, Link
    from .copies import Range

log = logging.getLogger("aiocomm")


class ShmSender(ShmEnd[Outbound]):
    """The sending end (the ``SendingRoute`` protocol).

    Args:
        label, link, loop, publish, off_loop: see ``ShmEnd``.
        shm_bytes: as in ``Options``.
    """

    waits_for = "mailbox"

    def __init__(
        self,
        label: str,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        *,
        publish: Callable[[str, bytes], None],
        off_loop: OffLoop,
        shm_bytes: int,
    ) -> None:
        super().__init__(label, link, loop, publish=publish, off_loop=off_loop)
        self._shm_bytes = shm_bytes
        self._memory: SenderMemory | None = None
        self._pieces = 0
        self._pumping = False
        self._out: dict[int, Callable[[], None]] = {}  # what to do when a piece comes back

    async def open(self) -> None:
        """Make the ring and hand it to the peer.

        Raises:
            RouteError: there is no shared memory, or no way to hand it over.

        Cancellation: what was made is dropped.
        """
        self._check_place()
        memory = self._memory = SenderMemory(
            self._loop,
            self._shm_bytes,
            off_loop=self._off_loop,
            forget=lambda number: self._tell(Piece(Op.FORGET, number, 0, 0)),
            room=self._pump,
        )
        name, token = unpack_mailbox(await self._said)
        memory.connect(Courier(name, token))
        self._publish(f"{self._label}/ring", pack_ring(memory.ring_bytes, memory.lend_limit))

    # Sending

    def staged_bytes(self, buffers: Sequence[torch.Tensor]) -> int:
        """Nothing: buffers are packed where they are copied anyway."""
        return 0

    def stage(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The buffers themselves."""
        return buffers

    def send(
        self, staged: Sequence[torch.Tensor], *, envelope: Callable[[bytes], None], lend: bool
    ) -> asyncio.Future[None]:
        """Send 1-D uint8 CPU buffers as one message.

        Done when they are copied; those in shared memory, when the peer has copied them, and those
        that are aliased at once.

        Cancellation: the message goes out all the same.
        """
        offsets, total = lay_out(sizes_of(staged))
        parts = [
            (offset, offset + size, pointer)
            for offset, (pointer, size) in zip(offsets, spans_of(staged), strict=True)
            if size
        ]
        job = Outbound(staged, parts, total, self._loop.create_future(), lend)
        if self._error is not None:
            envelope(b"")
            job.done.set_exception(self._refusal())
        elif not total:
            envelope(b"")
            job.done.set_result(None)
        else:
            job.envelope = envelope
            self._open[job] = None
            self._jobs.append(job)
            self._pump()
        return job.done

    def place(self, buffers: Sequence[torch.Tensor]) -> bytes | None:
        """Copy a small message into the ring, unless another one is before it or room is short."""
        memory = self._memory
        if self._jobs or self._copies.busy or self._error is not None or memory is None:
            return None
        offsets, total = lay_out(sizes_of(buffers))
        if not 0 < total <= min(COPY_LIMIT, memory.piece_limit):
            return None
        if total >= LARGE and any(shared_part(*span, total) for span in spans_of(buffers)):
            return None
        place = memory.take(total)
        if place is None:
            return None
        offset, address = place
        copy(
            (address + start, pointer, size)
            for start, (pointer, size) in zip(offsets, spans_of(buffers), strict=True)
        )
        self._out[self._pieces] = partial(memory.give_back, offset)
        self._pieces += 1
        return Piece(Op.COPY, RING_NUMBER, offset, total).pack()

    def _pump(self) -> None:
        # What is announced lets the lane send the next message, which comes back here.
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._jobs:
                job = self._jobs[0]
                if not job.begun:
                    self._begin(job)
                if not job.spans:
                    self._jobs.popleft()
                elif not self._advance(job, job.spans[0]):
                    return
        finally:
            self._pumping = False

    def _begin(self, job: Outbound) -> None:
        assert self._memory is not None
        job.begun = True
        start = 0
        for first, last, address in job.parts:
            found = shared_part(address, last - first, job.total)
            number = self._memory.number_of(found[0]) if found is not None else None
            if found is not None and number is not None:
                if start < first:
                    job.spans.append(Span(start, first))
                op = Op.ALIAS if found[0].aliased else Op.COPY
                job.spans.append(Span(first, last, Piece(op, number, found[1], last - first)))
                start = aligned(last)
        if not start and job.lend and job.total > COPY_LIMIT and self._lend(job):
            return
        if start < job.total:
            job.spans.append(Span(start, job.total))

    def _lend(self, job: Outbound) -> bool:
        assert self._memory is not None
        lent = self._memory.lend(job.total)
        if lent is None:
            return False
        ranges = job.ranges(0, job.total, lent.segment.address)
        piece = Piece(Op.LEND, lent.number, 0, job.total)
        job.open += 1
        self._copy(job, ranges, piece, partial(self._memory.take_back, lent))
        return True

    def _advance(self, job: Outbound, span: Span) -> bool:
        """Send the next piece of a span; False when it has to wait."""
        if span.piece is not None:
            if self._copies.busy:  # what is being copied is announced first
                return False
            job.open += 1
            self._end_span(job)
            if span.piece.op is Op.ALIAS:  # nothing is read that its owner has to wait for
                self._announce(job, span.piece, lambda: None)
                self._settled(job)
            else:
                self._announce(job, span.piece, lambda: self._settled(job))
            return True
        memory = self._memory
        assert memory is not None
        start = max(job.position, span.start)
        nbytes = min(memory.piece_limit, span.end - start)
        place = memory.take(nbytes)
        if place is None:
            return False
        offset, address = place
        job.position = start + nbytes
        job.open += 1
        if job.position == span.end:
            self._end_span(job)
        piece = Piece(Op.COPY, RING_NUMBER, offset, nbytes)
        ranges = job.ranges(start, job.position, address)
        back = partial(memory.give_back, offset)
        if job.total <= COPY_LIMIT and not self._copies.busy:
            copy(ranges)
            self._announce(job, piece, back)
            self._settled(job)
        else:
            self._copy(job, ranges, piece, back)
        return True

    def _end_span(self, job: Outbound) -> None:
        job.spans.popleft()
        if not job.spans:
            self._jobs.popleft()

    def _copy(
        self, job: Outbound, ranges: Iterator[Range], piece: Piece, back: Callable[[], None]
    ) -> None:
        def copied() -> None:
            self._announce(job, piece, back)
            self._settled(job)
            if self._jobs:
                self._pump()

        self._copies.submit(ranges, copied)

    def _announce(self, job: Outbound, piece: Piece, back: Callable[[], None]) -> None:
        self._out[self._pieces] = back
        self._pieces += 1
        envelope, job.envelope = job.envelope, None
        if envelope is not None:
            envelope(piece.pack())
        else:
            self._tell(piece)

    def _tell(self, piece: Piece) -> None:
        try:
            self._link.send(FrameKind.CHUNK, 0, piece.pack())
        except AiocommError as error:
            # The link is down and about to say so to the group, which severs this route then.
            log.debug("%r: a piece was not announced: %s", self, error)

    def _settled(self, job: Outbound) -> None:
        job.open -= 1
        if job.open or job.spans:
            return
        del self._open[job]
        if not job.done.done():
            job.done.set_result(None)

    def grant_received(self, frame: Frame) -> None:
        """The peer gives pieces back.

        Raises:
            ProtocolError: they are not with it.
        """
        if self._error is not None:
            return
        for number in unpack_numbers(frame.head):
            back = self._out.pop(number, None)
            if back is None:
                raise ProtocolError(f"the peer gives back piece {number}, which it does not have")
            back()
        if self._jobs:
            self._pump()

    # Ending

    @property
    def survives(self) -> bool:
        """Nobody gives the memory back any more."""
        return False

    def _drop(self) -> None:
        self._out.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def shared_part(address: int, nbytes: int, total: int) -> tuple[Shared, int] | None:
    """The user's segment in which a buffer lies and where, if it is to be sent from there.

    A small message goes through the ring all the same, as two cores copy it faster than one.
    """
    found = REGISTRY.find(address, nbytes) if nbytes >= LARGE else None
    return found if found is not None and (found[0].aliased or total > COPY_LIMIT) else None
