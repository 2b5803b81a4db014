"""A bulk route over a process group of two: how it queues transfers, breaks and closes.

The half of the Gloo and the NCCL route that is the same for both, on the event loop. What blocks is
in the pair, the group of two, which has threads of its own for that. May not know what a pair is
made of, how a chunk is handed to it, nor by what it is known to be done: that is the other half.

Rejected: an object that a route owns in place of a base class. It and the route would call each
other for every chunk, and the state, the error and the queue would be a part of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

from .route_end import RouteEnd, State
from .transfer import Transfer

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    import torch

log = logging.getLogger(__name__)

# Seconds after which a broken transfer is failed though the backend has not let go of its buffers.
# They are held until then; it touches those of the CPU no more once its connection is shut down.
SEVER_GRACE = 0.25
# Seconds that aclose waits for the backend to end the group; the rest goes on in a thread.
CLOSE_GRACE = 2.0


class Pair(Protocol):
    """What a route needs of its pair to open."""

    def start(self, done: Callable[[BaseException | None], None]) -> None:
        """Construct it in a thread, which calls ``done`` with None or the error at its end."""


class PairRoute(RouteEnd):
    """One direction of one group, over a pair; see ``RouteEnd``, also for its other arguments.

    Args:
        sending: which side it is.

    Attributes:
        chunk: bytes that are issued at a time, at most; None: those of ``transfer.py``.
    """

    chunk: ClassVar[int | None] = None
    _pair: Pair

    def __init__(
        self,
        label: str,
        *,
        sending: bool,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[str, bytes], None],
        timeout: float,
    ) -> None:
        super().__init__(label, loop=loop, publish=publish, timeout=timeout)
        self.sending = sending
        self._closed: asyncio.Future[None] = loop.create_future()
        self._closer: threading.Thread | None = None
        self._waiting: deque[Transfer] = deque()  # with chunks left to issue
        self._active: deque[Transfer] = deque()  # not done, in order; keeps the buffers
        self._taken = 0  # chunks that the peer has said to have, where it says so
        self._scratch: torch.Tensor | None = None  # where discarded bytes go
        self._grace: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        side = "sends" if self.sending else "receives"
        kind, pending = type(self).__name__, len(self._active)
        return f"<{kind} {self.label!r} {side} {self._state.value} pending={pending}>"

    # Opening

    async def _set_up(self) -> None:
        """Construct the group, in a thread, which ends by itself when this is cancelled."""
        constructed: asyncio.Future[None] = self._loop.create_future()

        def settle(error: BaseException | None) -> None:
            if constructed.done():  # the route has failed meanwhile
                return
            if error is None:
                constructed.set_result(None)
            else:
                constructed.set_exception(error)

        self._pair.start(lambda error: self._post(partial(settle, error)))
        await constructed

    def _publish_from_thread(self, key: str, value: bytes) -> None:
        self._loop.call_soon_threadsafe(self._publish_on_loop, key, value)

    def _publish_on_loop(self, key: str, value: bytes) -> None:
        if self._state is State.CLOSED:
            return
        try:
            self._publish(key, value)
        except Exception as error:
            self._fail(self._reason(f"could not reach its peer: {error}", error))

    # Transfers

    def _queue(
        self,
        blocks: Sequence[torch.Tensor],
        sizes: Sequence[int],
        *,
        scratch: bool = False,
        keep: object = None,
    ) -> asyncio.Future[None]:
        """Queue what a call is to move, as in ``Transfer``."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._state is not State.OPEN:
            future.set_exception(self._refusal())
            return future
        transfer = Transfer(blocks, sizes, future, scratch=scratch, chunk=self.chunk)
        transfer.keep = keep
        self._active.append(transfer)
        if transfer.issued:
            self._finish_done()  # nothing else will tell
        else:
            self._waiting.append(transfer)
            self._pump()
        return future

    def _pump(self) -> None:
        """Issue the next chunks of what waits, as many as may be under way."""
        waiting = self._waiting
        while waiting and self._may_issue():
            transfer = waiting[0]
            try:
                self._issue(transfer, transfer.next_chunk())
            except RuntimeError as error:
                return self._break("broke", error)
            transfer.outstanding += 1
            if transfer.issued:
                waiting.popleft()

    @abstractmethod
    def _may_issue(self) -> bool:
        """Whether one more chunk may be under way."""

    @abstractmethod
    def _issue(self, transfer: Transfer, chunk: torch.Tensor) -> None:
        """Hand a chunk to the pair; ``_chunk_done`` is called later, not within this call.

        Raises:
            RuntimeError: the backend refuses.
        """

    def _chunk_done(self, transfer: Transfer, error: BaseException | None) -> None:
        transfer.outstanding -= 1
        if error is not None:
            self._break("broke", error)
        else:
            self._pump()
        self._finish_done()

    def _finish_done(self) -> None:
        active = self._active
        if self._error is not None:
            # In no order: whatever the backend has let go of.
            self._active = deque(transfer for transfer in active if transfer.outstanding)
            for transfer in active:
                if not transfer.outstanding:
                    self._finish(transfer)
        else:
            taken = self._taken
            while active:
                transfer = active[0]
                if transfer.outstanding or not transfer.issued or transfer.last > taken:
                    break
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

    async def aclose(self) -> None:
        """Close: what is pending fails, what is done still reaches the peer. Bounded, idempotent.

        Leaves no thread or socket, unless the backend takes longer to end the group: a thread of
        its own waits for that then.

        Cancellation: the closing goes on in its thread.
        """
        self.sever()
        if self._closer is None:  # there was nothing to close
            return
        ended, _ = await asyncio.wait([self._closed], timeout=CLOSE_GRACE)
        if ended:
            self._closer.join(0.1)  # its last act was to say so
        else:
            text = "%r: %s has not ended the group yet; it goes on in a thread"
            log.warning(text, self, self.backend)

    def _drop(self) -> None:
        self._waiting.clear()
        if self._opening is not None:
            closed = partial(self._closed.set_result, None)
            opening = not self._opening.done()
            self._closer = self._end_pair(lambda: self._post(closed), opening=opening)
        if self._active:
            self._grace = self._loop.call_later(SEVER_GRACE, self._fail_active)
        self._finish_done()

    @abstractmethod
    def _end_pair(self, done: Callable[[], None], *, opening: bool) -> threading.Thread:
        """Begin to end the pair, which may not be there yet.

        Returns:
            The thread that does it, and calls ``done`` as the last thing it does.
        """

    def _fail_active(self) -> None:
        # The buffers stay held until the backend has let go of them.
        for transfer in self._active:
            if not transfer.future.done():
                transfer.future.set_exception(self._refusal())

    def _post(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call)
