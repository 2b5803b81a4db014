"""The messages of a channel: there and back, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiocomm
from aiocomm.channel.entries import Reason
from aiocomm.channel.messages import (
    INLINE_LIMIT,
    Ask,
    Cancel,
    Close,
    Done,
    Get,
    Granted,
    Items,
    Look,
    Packet,
    Put,
    Refused,
    Seen,
    Spoiled,
    Taken,
    Withdraw,
    as_packet,
    pack_item,
    read,
    size_of,
    unpack_item,
    write,
)
from aiocomm.errors import ProtocolError
from aiocomm.payload import pack

PACKET = Packet(b"meta", b"body")
MESSAGES = [
    Ask(1, "k", 10, 0.5, False),
    Put(1, "k", 0.5, PACKET),
    Withdraw(1),
    Get(2, "k", None, True),
    Cancel(2),
    Taken([1, 2]),
    Look(3, None),
    Close(4, True),
    Granted(1),
    Done(1),
    Refused(1, int(Reason.FULL)),
    Items(2, [PACKET, PACKET]),
    Seen(3, 7, False),
    Spoiled(2, 1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_messages_are_read_as_they_were_written(message: Any) -> None:
    came = read(write(message))
    assert type(came) is type(message)
    assert came == message


def test_the_numbers_on_the_wire_are_those_that_the_protocol_names() -> None:
    assert [write(message)[0] for message in MESSAGES] == list(range(14))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_no_class_travels(message: Any) -> None:
    assert b"aiocomm" not in pack(write(message)).meta


@pytest.mark.parametrize("wire", [None, 1, (), (13, 1), ("put", 1), (0,), (1, 2, "k", 0, 3)])
def test_what_is_no_message_is_refused(wire: Any) -> None:
    with pytest.raises(ProtocolError, match="no message of a channel"):
        read(wire)


ITEMS: list[Any] = [
    3,
    torch.arange(10),
    torch.arange(100_000),
    [torch.ones(3), torch.ones(5)],
    [torch.ones(70_000), torch.ones(5), torch.ones(0)],
    [torch.ones(1) for _ in range(1000)],
    b"x" * 300_000,
]


@pytest.mark.parametrize("item", ITEMS, ids=range(len(ITEMS)))
def test_room_is_asked_for_as_it_is_needed(item: Any) -> None:
    packed = pack_item(item)
    packet = as_packet(packed)
    assert packet.nbytes == size_of(packed)
    came = unpack_item(packet)
    assert str(came) == str(item)


def test_small_items_are_bytes_and_large_ones_stay_where_they_are() -> None:
    small, large = torch.ones(INLINE_LIMIT // 4), torch.ones(INLINE_LIMIT)
    assert isinstance(as_packet(pack_item(small)).body, bytes)
    [block] = as_packet(pack_item(large)).body
    assert isinstance(block, torch.Tensor)
    assert block.data_ptr() == large.data_ptr()


def test_aliased_memory_is_copied() -> None:
    shared = aiocomm.empty_shared((100_000,), torch.float32, aliased=True)
    [block] = as_packet(pack_item(shared)).body
    assert isinstance(block, torch.Tensor)
    assert block.data_ptr() != shared.data_ptr()


def test_a_damaged_packet_is_refused() -> None:
    meta, body = as_packet(pack_item([torch.ones(70_000), torch.ones(5)]))
    with pytest.raises(ProtocolError, match="not those that it describes"):
        unpack_item(Packet(meta, body[:1]))
