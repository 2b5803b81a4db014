"""What came of one message, where its bytes lie, and how it becomes a value.

The bytes of a message lie in one of four places: in the body of its envelope, in the sender's own
memory (both in one process), in memory that its route holds for it, or in buffers that a bulk route
has filled.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError
from ..packing import outline
from ..payload import (
    Kind,
    TensorSpec,
    as_bytes,
    assemble,
    buffer_sizes,
    tensor_spec,
    unpack,
    unpack_body,
)
from .envelope import BY_DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ..entries import Incoming, Post
    from ..errors import AiocommError
    from ..payload_table import Table
    from ..transport.base import Held
    from .envelope import Envelope
    from .schemas import KeptSchemas

# Python 3.11 takes 60 ns to find a member in its enum, and 5 to find a global.
TENSOR = Kind.TENSOR

UNBUILT: Any = object()


def fits(post: Post, message: Incoming) -> bool:
    """Whether a call of recv asks for what a message brings."""
    arrival: Arrival = message.owner
    if arrival.kind is TENSOR:
        return bool(post.owner._spec == arrival.spec)
    return post.owner._spec is None


@dataclass(slots=True)
class Unbuildable:
    """In place of the value of a message of which it is known why there can be none."""

    error: AiocommError


@dataclass(slots=True)
class Arrival:
    """One message on the receiving side."""

    kind: Kind
    meta: bytes
    body: Any  # bytes of the buffers; in one process, a tuple of the buffers themselves
    nbytes: int  # of the whole message, for the counters; 0 once counted
    sizes: tuple[int, ...] = ()  # of the buffers; bulk only, as the next
    buffers: Sequence[torch.Tensor] = field(default_factory=tuple)  # in memory of the message's own
    held: Held | None = None  # memory of its route that it lies in, whole
    value: Any = UNBUILT  # built already, for a call that was cancelled then
    spec: TensorSpec | None = None
    table: Table | None = None  # of the meta, if it was read already, and the stream to it
    stream: bytes | memoryview = b""
    far: int = 0  # as in its envelope

    @classmethod
    def of(cls, envelope: Envelope, body: Any, schemas: KeptSchemas) -> tuple[Arrival, int]:
        """The arrival, and the bytes of its buffers.

        Raises:
            ProtocolError: its meta is not sound.
        """
        arrival = cls(envelope.kind, envelope.meta, body, envelope.charge)
        if envelope.kind is Kind.TENSOR:
            arrival.spec = tensor_spec(envelope.meta)
        elif envelope.number >= 0:
            arrival.table, arrival.stream = schemas.read(envelope)
        if envelope.far:
            return arrival, arrival._measure_far(envelope)
        if envelope.bulk:
            arrival.sizes = arrival._sizes()
            size = sum(arrival.sizes)
            arrival.nbytes += size
            return arrival, size
        if isinstance(body, tuple):
            size = sum(buffer.numel() for buffer in body)
            arrival.nbytes = len(envelope.meta) + size  # the charge leaves large ones out
            return arrival, size
        return arrival, len(body)

    @property
    def by_device(self) -> bool:
        """Whether its bytes come by a route for memory of a device."""
        return self.far & BY_DEVICE != 0

    @property
    def in_process(self) -> bool:
        """Whether the bytes lie in the sender's memory."""
        return isinstance(self.body, tuple)

    def rebuild(self) -> Any:
        """The object that was sent.

        Raises:
            DecodeError: it cannot be rebuilt here.
            ProtocolError: its meta is not sound.
        """
        if self.value is not UNBUILT:
            if isinstance(self.value, Unbuildable):
                raise self.value.error
            return self.value
        body = self.body if self.held is None else self.held.view
        if self.sizes and self.held is None:
            buffers = self.buffers
        elif isinstance(body, tuple):
            buffers = body
        elif self.table is None:
            return unpack_body(self.meta, body)
        else:
            buffers = outline(body, self.table.sizes)
        if self.table is None:
            return unpack(self.meta, buffers)
        return assemble(self.table, self.stream, buffers)

    def release(self) -> None:
        """Nobody wants the bytes any more."""
        if self.held is not None:
            self.held.release()

    def _measure_far(self, envelope: Envelope) -> int:
        """Take in what an envelope says of a message for a device. Returns its bytes."""
        self.far = envelope.far
        if isinstance(self.body, tuple):
            total: int = sum(buffer.numel() for buffer in self.body)
            self.nbytes = len(envelope.meta) + total
            return total
        self.sizes = self._sizes()
        size = sum(self.sizes)
        self.nbytes += size if envelope.bulk else 0
        return size

    def _sizes(self) -> tuple[int, ...]:
        if self.spec is not None:
            return (self.spec.nbytes,)
        if self.table is not None:
            return tuple(self.table.sizes)
        return buffer_sizes(self.kind, self.meta)

    def fill(self, buffer: torch.Tensor) -> None:
        """Copy a single tensor into a buffer of its spec.

        Raises:
            ProtocolError: the bytes are not as many as its shape says.
        """
        if self.buffers or self.in_process:
            as_bytes(buffer).copy_(self.buffers[0] if self.buffers else self.body[0])
        elif self.held is not None:
            ctypes.memmove(buffer.data_ptr(), self.held.address, buffer.nbytes)
        elif len(self.body) != buffer.nbytes:
            raise ProtocolError("the bytes of a tensor are not as many as its shape says")
        else:
            ctypes.memmove(buffer.data_ptr(), self.body, len(self.body))
