"""Who serves a board, who finds it, and at which address."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from aiocomm.errors import RendezvousError, RendezvousTimeout
from aiocomm.rendezvous import TCPBoard, connect

from ..processes import Stage, Workers
from .boards import WAIT, board_threads, reserved_port


async def _meet(stage: Stage, port: int) -> bool:
    async with TCPBoard("127.0.0.1", port, timeout=WAIT) as board:
        await stage.barrier("open")
        await board.set(f"worker/{stage.rank}", b"%d" % stage.rank)
        for rank in range(stage.count):
            assert await board.get(f"worker/{rank}", WAIT) == b"%d" % rank
        serving = board.serving
        await stage.barrier("met")
        if serving:  # the board goes with it
            for rank in range(stage.count):
                if rank != stage.rank:
                    await stage.wait(f"left/{rank}")
    stage.set(f"left/{stage.rank}")
    return serving


def test_one_of_many_serves_and_nobody_is_told_who(loop_name: str) -> None:
    with reserved_port() as port, Workers(4, loop=loop_name) as workers:
        for _ in range(4):
            workers.start(_meet, port)
        assert sorted(workers.join()) == [False, False, False, True]


@pytest.mark.asyncio
async def test_a_client_waits_for_a_server_that_comes_later() -> None:
    with reserved_port() as port:
        client = TCPBoard("127.0.0.1", port, serve=False, timeout=WAIT)
        opening = asyncio.create_task(client.aopen())
        await asyncio.sleep(0.1)  # it has been refused by then; later is only less of a test
        assert not opening.done()
        assert "opening" in repr(client)
        async with TCPBoard("127.0.0.1", port, timeout=WAIT) as server:
            await opening
            assert (server.serving, client.serving) == (True, False)
            assert "serving" in repr(server)
            assert "client" in repr(client)
            await client.aclose()


@pytest.mark.asyncio
async def test_nobody_serving_is_a_timeout_that_names_the_address() -> None:
    with reserved_port() as port:
        board = TCPBoard(port=port, serve=False, timeout=0.1)
        with pytest.raises(RendezvousTimeout, match=rf"127\.0\.0\.1:{port} within 0\.1 s"):
            await board.aopen()
    assert board_threads() == []


@pytest.mark.asyncio
async def test_cancelling_the_opening_ends_it() -> None:
    with reserved_port() as port:
        board = TCPBoard(port=port, serve=False, timeout=WAIT)
        opening = asyncio.create_task(board.aopen())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert board_threads() == []


@pytest.mark.asyncio
async def test_a_taken_port_is_an_error_for_who_must_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot serve .*:{port}"):
            await TCPBoard(port=port, serve=True, timeout=WAIT).aopen()


@pytest.mark.asyncio
async def test_who_is_not_that_host_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(host: str, port: int) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    async with TCPBoard(port=0, serve=True) as server:
        monkeypatch.setattr(connect, "_listen", elsewhere)
        async with TCPBoard(port=server.port, timeout=WAIT) as board:
            assert not board.serving


@pytest.mark.asyncio
async def test_exactly_the_address_that_was_asked_for_is_bound() -> None:
    async with TCPBoard("127.0.0.1", 0, serve=True) as board:
        assert board.port != 0
        with socket.create_connection(("127.0.0.1", board.port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", board.port))


@pytest.mark.asyncio
async def test_a_name_and_ipv6_serve_too() -> None:
    async with TCPBoard("localhost", 0, serve=True) as board:
        assert board.host == "127.0.0.1"
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with (
        TCPBoard("::1", 0, serve=True) as server,
        TCPBoard("::1", server.port, timeout=WAIT) as client,
    ):
        await server.set("k", b"v")
        assert await client.get("k", WAIT) == b"v"
        assert client.host == "::1"


@pytest.mark.asyncio
async def test_a_name_that_is_loopback_here_only_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "_resolve", lambda host, port: ["127.0.0.1"])
    async with TCPBoard("node-7", 0, serve=True):
        assert "node-7" in caplog.text
