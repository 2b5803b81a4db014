"""The receiving end of a shared-memory route.

Pieces come in order and belong to the messages that were asked for, in order; a piece that comes
before anybody asked waits, and holds its part of the sender's ring. A message that is lent whole
becomes tensors over the sender's segment, which is given back when the last of them dies; so that
a user who keeps what came never stops the sender, no more than half of what can be lent is kept
so, and the rest is copied out. Small pieces are copied on the loop, large ones by the copying
thread. The sending end is in ``send.py``, what the two say to each other in ``wire.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...errors import AiocommError, ProtocolError, RouteError
from ...packing import aligned, lay_out
from ...packing_places import Laid
from ...runtime import COPY_LIMIT
from ..base import FrameKind
from .copies import OffLoop, copy
from .end import ShmEnd
from .inbound import Block, Came, HeldPiece, Inbound, blocks_for, whole_messages
from .leases import Leases
from .mailbox import Mailbox
from .receipts import Receipts
from .wire import RING_NUMBER, Op, Piece, pack_mailbox, pack_numbers, unpack_ring

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from ..base import Frame, Link
    from .segment import Segment

log = logging.getLogger("aiocomm")

_UINT8 = torch.uint8


class ShmReceiver(ShmEnd[Inbound]):
    """The receiving end (the ``ReceivingRoute`` protocol); see ``ShmEnd`` for its arguments."""

    waits_for = "ring"

    def __init__(
        self,
        label: str,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        *,
        publish: Callable[[str, bytes], None],
        off_loop: OffLoop,
    ) -> None:
        super().__init__(label, link, loop, publish=publish, off_loop=off_loop)
        self._mailbox: Mailbox | None = None
        self._receipts = Receipts(loop, self._say)
        self._leases = Leases(loop, self._receipts.add_at_once)
        self._segments: dict[int, Segment] = {}
        self._waiting: deque[Came] = deque()  # for a job
        self._came = 0  # pieces so far

    async def open(self) -> None:
        """Take the sender's ring in.

        Raises:
            RouteError: it cannot be handed over, or mapped.

        Cancellation: what was made is dropped.
        """
        self._check_place()
        mailbox = self._mailbox = Mailbox()
        self._publish(f"{self._label}/mailbox", pack_mailbox(mailbox.name, mailbox.token))
        self._receipts.ring_bytes, self._leases.limit = unpack_ring(await self._said)
        mailbox.accept()
        self._collect(RING_NUMBER)

    # Receiving

    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        """Take the next message into 1-D uint8 CPU memory.

        Cancellation: the bytes come in all the same.
        """
        job = Inbound(0, self._loop.create_future())
        if blocks:
            (memory,) = blocks
            job.total = memory.nbytes
            job.blocks = [Block(0, job.total, memory)]
        return self._enter(job)

    def fetch(self, sizes: Sequence[int]) -> tuple[Sequence[torch.Tensor], asyncio.Future[None]]:
        """Take the next message, in the sender's segment where it lends one.

        Cancellation: the bytes come in all the same.
        """
        offsets, total = lay_out(sizes)
        buffers = Laid([], offsets, sizes)
        job = Inbound(total, self._loop.create_future(), blocks_for(sizes, offsets), buffers)
        return buffers, self._enter(job)

    def discard(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        """Drop the next message.

        Cancellation: the bytes come in and are dropped all the same.
        """
        return self._enter(Inbound(lay_out(sizes)[1], self._loop.create_future()))

    def hold(self, body: bytes, sizes: Sequence[int]) -> HeldPiece | None:
        """The first piece of a message, which came in its envelope; see ``chunk_received``.

        A small message that is all there stays where it is until somebody wants it.
        """
        if self._error is not None:
            return None
        piece = Piece.unpack(body)
        total = lay_out(sizes)[1]
        if piece.op is not Op.COPY or piece.nbytes != total or total > COPY_LIMIT:
            self._piece_received(piece)
            return None
        came = self._come(piece)
        if came is None:
            return None
        return HeldPiece(came.segment, piece, partial(self._give_back, came))

    def chunk_received(self, frame: Frame) -> None:
        """The next piece.

        Raises:
            ProtocolError: it does not lie where the peer says, or is more than was announced.
        """
        if self._error is None:
            self._piece_received(Piece.unpack(frame.head))

    def _piece_received(self, piece: Piece) -> None:
        if piece.op is Op.FORGET:
            segment = self._segments.pop(piece.segment, None)
            if segment is not None:
                self._off_loop(_unmap, [segment])
            return
        came = self._come(piece)
        if came is not None:
            self._waiting.append(came)
            self._advance()

    def _come(self, piece: Piece) -> Came | None:
        """Number a piece, and find the segment in which it lies.

        Where that cannot be mapped the route is over, which is no fault of the peer's: None.
        """
        if piece.segment not in self._segments:
            try:
                self._collect(piece.segment)
            except RouteError as error:
                self._sever(error.message)
                return None
        segment = self._segments[piece.segment]
        if not 0 < piece.nbytes <= segment.nbytes - piece.offset:
            raise ProtocolError("a piece of the peer does not lie in its segment")
        came = Came(piece, self._came, segment)
        self._came += 1
        return came

    def _enter(self, job: Inbound) -> asyncio.Future[None]:
        if self._error is not None:
            job.done.set_exception(self._refusal())
        elif not job.total:
            job.whole()
            job.done.set_result(None)
        else:
            self._open[job] = None
            self._jobs.append(job)
            try:
                self._advance()
            except ProtocolError as error:
                # A piece that came before anybody asked: who asks now may be the user, and is told
                # by his work like of any transfer that broke.
                self._sever(error.message)
        return job.done

    def _collect(self, number: int) -> None:
        assert self._mailbox is not None
        while number not in self._segments:
            found = self._mailbox.collect()
            if found is None:
                raise ProtocolError(f"the peer names segment {number}, which it has not shared")
            self._segments[found[0]] = found[1]

    def _advance(self) -> None:
        while self._jobs and self._waiting:
            job = self._jobs[0]
            came = self._waiting.popleft()
            nbytes = came.piece.nbytes
            if nbytes > job.total - job.position:
                raise ProtocolError("the peer sends more bytes than it has announced")
            start = job.position
            job.position = min(job.total, aligned(start + nbytes))
            if job.position == job.total:
                self._jobs.popleft()
            self._take(job, came, start)

    def _take(self, job: Inbound, came: Came, start: int) -> None:
        piece = came.piece
        if job.buffers is not None and job.blocks and self._keep(job, came, start):
            return
        if not job.may_end(start + piece.nbytes):
            raise ProtocolError("the peer leaves bytes of its message out")
        address = came.segment.address + piece.offset
        try:
            ranges = job.ranges(start, start + piece.nbytes, address)
        except (MemoryError, RuntimeError) as error:
            self._no_memory(job, error)
            ranges = []

        def copied() -> None:
            job.open -= 1
            self._give_back(came)
            self._settle(job)

        job.open += 1
        if not ranges:
            copied()
        elif job.total <= COPY_LIMIT and not self._copies.busy:
            copy(ranges)
            copied()
        else:
            self._copies.submit(ranges, copied)

    def _keep(self, job: Inbound, came: Came, start: int) -> bool:
        """Make tensors over the piece itself; False where it is to be copied."""
        piece, segment = came.piece, came.segment
        if piece.op is Op.ALIAS:
            block = next((each for each in job.blocks if each.start == start), None)
            if block is None or block.end != start + piece.nbytes:
                raise ProtocolError("the peer aliases what is no buffer of its message")
            view = segment.view[piece.offset : piece.offset + piece.nbytes]
            block.memory = torch.frombuffer(view, dtype=_UINT8)
            self._give_back(came)
            self._settle(job)
            return True
        if piece.op is not Op.LEND or piece.nbytes != job.total:
            return False
        view = segment.view[piece.offset : piece.offset + piece.nbytes]
        if not self._leases.begin(view, came.number):
            return False
        job.over(view)
        self._settle(job)
        return True

    def _settle(self, job: Inbound) -> None:
        if job.open or job not in self._open or (job.position < job.total and not job.torn):
            return
        del self._open[job]
        if job.done.done():
            return
        if job.torn:
            job.done.set_exception(RouteError("the peer was gone before it had sent it all"))
            return
        if job.buffers is not None and not job.buffers.memory:
            job.whole()
        job.done.set_result(None)

    def _no_memory(self, job: Inbound, error: BaseException) -> None:
        job.blocks, job.buffers = (), None  # the rest of it is dropped
        if not job.done.done():
            job.done.set_exception(error)

    def _give_back(self, came: Came) -> None:
        if self._error is not None:  # what is held may be let go of much later: no timer for that
            return
        if came.piece.segment == RING_NUMBER:
            self._receipts.add(came.number, came.piece.nbytes)
        else:
            self._receipts.add_at_once(came.number)

    def _say(self, numbers: list[int]) -> None:
        if self._error is not None:
            return
        try:
            self._link.send(FrameKind.GRANT, 0, pack_numbers(numbers))
        except AiocommError as error:
            # The link is down and about to say so to the group, which severs this route then.
            log.debug("%r: pieces were not given back: %s", self, error)

    # Ending

    @property
    def survives(self) -> bool:
        """Whatever was announced lies in memory that this process has mapped."""
        return True

    def end(self, upcoming: Iterable[Sequence[int]]) -> int | None:
        """Fail the messages of which a part was not announced.

        Args:
            upcoming: sizes of the buffers of each message that nobody has asked for yet.

        Returns:
            How many of these can be asked for as ever; None after ``sever``.
        """
        if self._error is not None:
            return None
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:  # no piece waits while there is one
            job.torn = True
            self._settle(job)
        return whole_messages(self._waiting, upcoming)

    def _sever(self, reason: str) -> None:
        self._receipts.close()
        super()._sever(reason)

    def _drop(self) -> None:
        self._waiting.clear()
        segments = list(self._segments.values())
        self._segments.clear()
        if segments:
            self._off_loop(_unmap, segments)
        if self._mailbox is not None:
            self._mailbox.close()


def _unmap(segments: list[Segment]) -> None:
    """Takes some 10 ms for 256 MiB; those with a tensor in them go with the last one."""
    segments.clear()
