"""Links whose peer is found to be gone by a write."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from aiocomm.errors import PeerClosedError, PeerLostError
from aiocomm.transport.base import FrameKind, Link
from aiocomm.transport.frames import encode

from .links import Recorder, listening, raw_peer

each_way = pytest.mark.parametrize("way", ["unix", "tcp"])


@each_way
@pytest.mark.parametrize("goodbye", [False, True])
@pytest.mark.asyncio
async def test_what_came_before_a_write_finds_the_peer_gone_is_not_lost(
    way: str, goodbye: bool, caplog: pytest.LogCaptureFixture
) -> None:
    linked_up: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    async with (
        listening(connected=linked_up.set_result) as listener,
        raw_peer(listener, way) as peer,
    ):
        await peer.prove(listener)
        link = await linked_up
        handler = Recorder(lambda frame: link.send(FrameKind.GRANT, 0))  # it answers each
        link.attach(handler)
        frames = [encode(FrameKind.CHUNK, n, b"", bytes(5000)) for n in range(8)]
        with socket.socket(fileno=os.dup(peer.socket.fileno())) as gone:
            gone.send(b"".join([*frames, *([encode(FrameKind.GOODBYE, 0)] if goodbye else [])]))
            gone.shutdown(socket.SHUT_RDWR)
        for _ in range(20):  # the loop would complain of those that follow the first
            link.send(FrameKind.CREDIT, 0)
        loss = await handler.loss()
        assert type(loss) is (PeerClosedError if goodbye else PeerLostError)
        assert [frame.sequence for frame in handler.frames] == list(range(8))
        assert not [each for each in caplog.records if each.name == "asyncio"]
        await link.aclose()
