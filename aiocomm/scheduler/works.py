"""The works of a group's calls: handles whose cancellation reaches the lane they stand in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..handles.base import AsyncWork
from ..handles.delivered import DeliveredWork

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    import torch

    from ..device.base import Event, Stream
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
    def _whereabouts(self) -> str:
        return _whereabouts("send", self)

    @property
    def _falls_with_its_branch(self) -> bool:
        return True

    def _on_cancel(self) -> None:
        self._lane.cancelled(self)


class RecvWork(DeliveredWork):
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
    _home: Stream | None = None  # where the thread that called uses what comes on a device

    @property
    def _whereabouts(self) -> str:
        return _whereabouts("recv", self)

    def _put_back(self, delivered: Incoming) -> None:
        self._lane.give_back(self, delivered)

    def _on_cancel(self) -> None:
        self._lane.cancelled(self)


def _whereabouts(direction: str, work: SendWork | RecvWork) -> str:
    """As errors have it."""
    context = work._lane.context
    return f"group {context['group']}, direction {direction}, peer {context['peer']}"
