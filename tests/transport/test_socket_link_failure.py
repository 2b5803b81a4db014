"""Links whose peer is found to be gone by a write, and peers that are processes of their own."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest

from aiocomm.errors import PeerClosedError, PeerLostError
from aiocomm.options import Options
from aiocomm.transport.base import FrameKind, Link
from aiocomm.transport.endpoint import Endpoint
from aiocomm.transport.frames import encode
from aiocomm.transport.link import Heart, dial

from ..pairs import until
from ..processes import Stage, Workers
from .links import HELLO, Recorder, by_way, listening, raw_peer

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


# --- a process that stops, dies or leaves ---


async def _serve(stage: Stage, way: str) -> list[str]:
    handler = Recorder()
    options = Options(heartbeat_interval=0.02, peer_timeout=60.0)
    async with listening(options=options, connected=lambda link: link.attach(handler)) as listener:
        stage.set("endpoint", by_way(listener.endpoint, way).to_bytes())
        return [type(await handler.loss()).__name__]


@each_way
@pytest.mark.asyncio
async def test_a_stopped_process_is_lost_after_the_time_out(way: str) -> None:
    with Workers(1) as workers:
        worker = workers.start(_serve, way)
        endpoint = Endpoint.from_bytes(await asyncio.to_thread(workers.wait, "endpoint"))
        link: Any = await dial(endpoint, HELLO, heart=Heart(Options()))
        handler = Recorder()
        link.attach(handler)

        def beat() -> None:
            link.beat(0.05, 0.4)

        for _ in range(12):  # longer than the time-out, by a clock that waits for the peer's beats
            heard = link.statistics.bytes_in
            await until(lambda: link.statistics.bytes_in > heard)  # noqa: B023
            beat()
        assert handler.losses == []
        worker.stop()
        while not handler.losses:
            beat()
            await asyncio.sleep(0)
        loss = await handler.loss()
        assert type(loss) is PeerLostError
        assert "silent" in str(loss)
        worker.resume()
        assert await asyncio.to_thread(workers.join) == [["PeerLostError"]]
        await link.aclose()


@each_way
@pytest.mark.asyncio
async def test_a_killed_process_is_lost_at_once(way: str) -> None:
    options = Options(peer_timeout=60.0)
    with Workers(1) as workers:
        worker = workers.start(_serve, way)
        endpoint = Endpoint.from_bytes(await asyncio.to_thread(workers.wait, "endpoint"))
        link = await dial(endpoint, HELLO, heart=Heart(options), options=options)
        handler = Recorder()
        link.attach(handler)
        worker.kill()
        async with asyncio.timeout(10):
            assert type(await handler.loss()) is PeerLostError
        await link.aclose()


@pytest.mark.parametrize("leave", ["aclose", "abort"])
@each_way
@pytest.mark.asyncio
async def test_a_process_that_closes_is_told_from_one_that_dies(way: str, leave: str) -> None:
    with Workers(1) as workers:
        workers.start(_serve, way)
        endpoint = Endpoint.from_bytes(await asyncio.to_thread(workers.wait, "endpoint"))
        link = await dial(endpoint, HELLO, heart=Heart(Options()))
        if leave == "aclose":
            await link.aclose()
        else:
            link.abort()
            await link.aclose()
        expected = "PeerClosedError" if leave == "aclose" else "PeerLostError"
        assert await asyncio.to_thread(workers.join) == [[expected]]
