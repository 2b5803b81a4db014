"""Segments come to the mailbox of the peer, and of nobody else."""

from __future__ import annotations

import os
import socket

import pytest

from aiocomm.errors import ProtocolError, RouteError
from aiocomm.transport.shm.mailbox import Courier, Mailbox
from aiocomm.transport.shm.segment import Segment


def connected() -> tuple[Courier, Mailbox]:
    mailbox = Mailbox()
    courier = Courier(mailbox.name, mailbox.token)
    mailbox.accept()
    return courier, mailbox


def caller(mailbox: Mailbox) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(b"\0" + mailbox.name.encode())
    return sock


def test_segments_arrive_in_order_under_their_numbers() -> None:
    courier, mailbox = connected()
    assert mailbox.collect() is None
    for number in (7, 3):
        segment = Segment.create(4096 * number)
        segment.view[0] = number
        courier.send(number, segment)
        segment.forget_descriptor()
    courier.close()  # what was sent is with the peer all the same
    for number in (7, 3):
        found = mailbox.collect()
        assert found is not None
        assert (found[0], found[1].nbytes, found[1].view[0]) == (number, 4096 * number, number)
    assert mailbox.collect() is None
    mailbox.close()


def test_who_does_not_show_the_token_is_turned_away() -> None:
    mailbox = Mailbox()
    silent, wrong, longer = (caller(mailbox) for _ in range(3))
    wrong.send(bytes(len(mailbox.token)))
    longer.send(mailbox.token + b"x")
    with pytest.raises(RouteError, match="courier has not come"):
        mailbox.accept()
    for sock in (silent, wrong, longer):
        sock.settimeout(5)
        assert sock.recv(1) == b""
        sock.close()
    mailbox.close()


def test_the_peer_is_found_behind_others_and_nobody_comes_after() -> None:
    mailbox = Mailbox()
    silent = caller(mailbox)
    courier = Courier(mailbox.name, mailbox.token)
    mailbox.accept()
    courier.send(1, Segment.create(4096))
    assert mailbox.collect() is not None
    with pytest.raises(RouteError, match="cannot be reached: Connection refused"):
        Courier(mailbox.name, mailbox.token)
    silent.close()
    courier.close()
    mailbox.close()
    mailbox.close()


def test_what_is_no_segment_is_refused_and_its_descriptors_are_closed() -> None:
    mailbox = Mailbox()
    sock = caller(mailbox)
    sock.send(mailbox.token)
    mailbox.accept()
    reading, writing = os.pipe()
    for label, descriptors in ((b"short", [writing]), (bytes(12), [writing, writing]), (b"x", [])):
        socket.send_fds(sock, [label], descriptors)
        with pytest.raises(ProtocolError, match="no memory"):
            mailbox.collect()
    os.close(writing)
    assert os.read(reading, 1) == b""  # no copy of it is left
    os.close(reading)
    sock.close()
    mailbox.close()


def test_a_full_mailbox_is_an_error_and_not_a_wait() -> None:
    courier, mailbox = connected()
    segment = Segment.create(4096)
    with pytest.raises(RouteError, match="cannot be handed over"):
        for number in range(100_000):
            courier.send(number, segment)
    found = mailbox.collect()
    assert found is not None
    assert found[0] == 0
    courier.close()
    mailbox.close()


def test_a_closed_mailbox_is_an_error() -> None:
    courier, mailbox = connected()
    mailbox.close()
    with pytest.raises(RouteError, match="cannot be handed over"):
        courier.send(1, Segment.create(4096))
    courier.close()
