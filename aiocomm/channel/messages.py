"""What a channel's clients and its server say to each other, as messages of their group.

Both read and write them here alone. On the wire a message is a plain tuple that starts with its
code: a class in the pickle would cost as much as the message. An item travels as a ``Packet``: the
bytes of a message of aiocomm, which the server hands on as they came, and which ``unpack_item`` at
the consumer alone looks into. Rejected: the item itself in the message of the client (the server
would unpickle it, and need its classes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PayloadError, ProtocolError
from ..packing import gather, inline, lay_out, plan, scatter, sizes_of
from ..payload import Kind, buffer_sizes, pack, unpack, unpack_body
from ..transport.shm.shared import REGISTRY

if TYPE_CHECKING:
    import torch

    from ..payload import Packed

INLINE_LIMIT = 16 * 1024
"""Bytes of tensors up to which an item is one piece of bytes: copied twice more, yet cheaper."""
MOST_INLINE = 64
"""Buffers up to which it may be: of tiny ones the padding alone could outgrow the limit."""


class Packet(NamedTuple):
    """An item on its way.

    Attributes:
        meta: what it is, as in any message.
        body: its buffers in one piece, or the blocks that carry them.
    """

    meta: bytes
    body: bytes | list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """What it takes of the channel's room."""
        body = self.body
        size = len(body) if isinstance(body, bytes) else sum(block.nbytes for block in body)
        return len(self.meta) + size


# --- from clients ---


class Ask(NamedTuple):
    """May I put an item of this size?"""

    number: int
    key: str
    nbytes: int
    weight: float
    nowait: bool


class Put(NamedTuple):
    """Here it is; where no bound is to be asked about, without an ``Ask`` before."""

    number: int
    key: str
    weight: float
    packet: Packet


class Withdraw(NamedTuple):
    """It will not come."""

    number: int


class Get(NamedTuple):
    """One item, or a batch of the target's weight."""

    number: int
    key: str
    target: float | None
    nowait: bool


class Cancel(NamedTuple):
    """That get waits no more; if it was served, what it got goes back."""

    number: int


class Taken(NamedTuple):
    """What these gets were given has arrived and was taken."""

    numbers: list[int]


class Spoiled(NamedTuple):
    """Of what that get was given, the item at this place cannot be rebuilt; the others go back."""

    number: int
    place: int


class Look(NamedTuple):
    """How many items are there, under a key or in all?"""

    number: int
    key: str | None


class Close(NamedTuple):
    """Let nothing in any more; ``drop`` what is there."""

    number: int
    drop: bool


# --- from the server ---


class Granted(NamedTuple):
    """There is room: put."""

    number: int


class Done(NamedTuple):
    """A put is in the queue, or the channel is closed."""

    number: int


class Refused(NamedTuple):
    """A put or get comes to nothing; ``reason`` is a ``queue.Reason``."""

    number: int
    reason: int


class Items(NamedTuple):
    """What a get is given."""

    number: int
    packets: list[Packet]


class Seen(NamedTuple):
    """The answer to ``Look``."""

    number: int
    queued: int
    full: bool


FromClient = Ask | Put | Withdraw | Get | Cancel | Taken | Spoiled | Look | Close
FromServer = Granted | Done | Refused | Items | Seen
Message = FromClient | FromServer

# The code of a message on the wire is its place here. Append only.
_CLASSES: tuple[Any, ...] = (
    *(Ask, Put, Withdraw, Get, Cancel, Taken, Look, Close),
    *(Granted, Done, Refused, Items, Seen),
    Spoiled,
)
_CODES = {cls: code for code, cls in enumerate(_CLASSES)}
_PUT, _ITEMS = _CODES[Put], _CODES[Items]


def write(message: Message) -> tuple[Any, ...]:
    """A message as what a group sends."""
    if isinstance(message, Put):
        return (_PUT, *message[:-1], tuple(message.packet))
    if isinstance(message, Items):
        return (_ITEMS, message.number, [tuple(packet) for packet in message.packets])
    return (_CODES[type(message)], *message)


def read(wire: Any) -> Message:
    """A message that a group received.

    Raises:
        ProtocolError: it is none.
    """
    try:
        code, *values = wire
        if code == _PUT:
            values[-1] = Packet(*values[-1])
        elif code == _ITEMS:
            values[-1] = [Packet(*packet) for packet in values[-1]]
        message: Message = _CLASSES[code](*values)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProtocolError(
            f"no message of a channel ({error}): are both sides of one version of aiocomm?"
        ) from error
    return message


# --- items ---


def pack_item(item: object) -> Packed:
    """An item as a message; nothing is copied.

    Raises:
        PayloadError: it cannot be sent, or lies on a device.
    """
    packed = pack(item)
    if packed.device is not None:
        raise PayloadError(
            "the item has tensors on a device, and a channel holds them in the memory of the host: "
            "put item.cpu(), or send it through a group"
        )
    return packed


def as_packet(packed: Packed) -> Packet:
    """A message as a packet: small buffers copied, large ones as they lie."""
    buffers = packed.buffers
    if _small(packed):
        return Packet(packed.meta, inline(buffers))
    blocks = plan(sizes_of(buffers))
    return Packet(packed.meta, [_unaliased(block) for block in gather(blocks, buffers)])


def size_of(packed: Packed) -> int:
    """What the packet of a message will take of the channel's room."""
    sizes = sizes_of(packed.buffers)
    if _small(packed):
        return len(packed.meta) + lay_out(sizes)[1]
    return len(packed.meta) + sum(block.nbytes for block in plan(sizes))


def unpack_item(packet: Packet) -> Any:
    """The item.

    Raises:
        DecodeError: it cannot be rebuilt here; the cause is chained.
        ProtocolError: the packet is damaged.
    """
    meta, body = packet
    if isinstance(body, bytes):
        return unpack_body(meta, body)
    sizes = buffer_sizes(Kind.OBJECT, meta)
    blocks = plan(sizes)
    if [block.nbytes for block in blocks] != [block.nbytes for block in body]:
        raise ProtocolError("the blocks of an item are not those that it describes")
    return unpack(meta, scatter(blocks, body, sizes))


def _small(packed: Packed) -> bool:
    return packed.nbytes <= INLINE_LIMIT and len(packed.buffers) <= MOST_INLINE


def _unaliased(block: torch.Tensor) -> torch.Tensor:
    """The block, or a copy of one that the consumer would share with the producer for good."""
    found = REGISTRY.find(block.data_ptr(), block.nbytes)
    return block.clone() if found is not None and found[0].aliased else block
