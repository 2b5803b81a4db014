"""The works of a group's calls: handles whose cancellation reaches the lane they stand in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..handles.base import AsyncWork

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from ..device.base import Event
    from ..entries import Incoming, Outgoing, Post
    from ..payload import Packed, TensorSpec
    from .recv import RecvLane
    from .send import SendLane


class SendWork(AsyncWork[None]):
    """A message on its way out; completes when its buffers are the caller's again.

    Cancellation: not started yet, it is taken back; started, it finishes in the background and
    its buffers stay in use until then.
    """

    _lane: SendLane
    _entry: Outgoing
    _packed: Packed | None = None
    _host: asyncio.Task[Sequence[torch.Tensor]] | None = None  # its bytes, on their way to the host

    @property
    def _falls_with_its_branch(self) -> bool:
        return True

    def _on_cancel(self) -> None:
        self._lane.cancelled(self)


class RecvWork(AsyncWork[Any]):
    """A call of recv that waits for its message.

    Cancellation: loses no message. What would have come here goes to the next call of recv, even
    when it had been delivered already and neither the awaiting task nor the function of ``then``
    had run yet. A function that has begun has the message. A buffer given to
    ``recv_tensor`` may be written to until a transfer that was under way has ended.
    """

    _lane: RecvLane
    _entry: Post
    _buffer: torch.Tensor | None = None
    _bytes: torch.Tensor  # the memory of the buffer
    _spec: TensorSpec | None = None
    _ready: Event | None = None  # of a buffer on a device: it may be written to from then on
    _delivered: Incoming | None = None  # until somebody took the result
    _given_back: bool = False
    _parked: int = 0  # awaiting tasks that were not woken yet
    _claims: int = 0  # branches that were not cancelled before they began

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the message.

        Cancellation: see the class.
        """
        self._parked += not self.done()
        try:
            value = yield from _work_await(self)
        except asyncio.CancelledError:
            self._give_back()
            raise
        if self._given_back:  # by another task that awaited it
            raise asyncio.CancelledError(_GIVEN_BACK)
        self._delivered = None
        return value

    def result(self) -> Any:
        """The object, or the buffer; CancelledError when its message went to another call."""
        if self._given_back:
            raise asyncio.CancelledError(_GIVEN_BACK)
        if self._parked:
            # asyncio asks once for each task that it wakes, before the task runs. That one may
            # still be cancelled, and then the message is nobody's.
            self._parked -= 1
        else:
            self._delivered = None
        return _work_result(self) if self._traceback is not None else _future_result(self)

    @property
    def _falls_with_its_branch(self) -> bool:
        return True

    def _claim(self) -> None:
        self._claims += 1

    def _unclaim(self) -> None:
        self._claims -= 1
        if not self._claims and not self._parked:
            self._give_back()  # where it was delivered: its branches were all that waited

    def _give_back(self) -> None:
        message, self._delivered = self._delivered, None
        if message is not None:
            self._given_back = True
            self._lane.give_back(self, message)

    def _on_cancel(self) -> None:
        self._lane.cancelled(self)


# As in ``handles/base.py``: these are on the path of every message.
_work_await, _work_result = AsyncWork.__await__, AsyncWork.result
_future_result = asyncio.Future.result

_GIVEN_BACK = "cancelled; its message went to the next call of recv"
