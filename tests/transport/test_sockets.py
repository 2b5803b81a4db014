"""Binding, connecting, tuning, and the translation of the system's errors."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket

import pytest

from aiocomm.errors import NetworkError, UsageError
from aiocomm.transport.sockets import bind_tcp, bind_unix, connect_unix, translate, tune


def test_an_error_of_the_system_in_our_words() -> None:
    cause = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    error = translate(cause, "cannot reach it", peer="b:0")
    assert type(error) is NetworkError
    assert isinstance(error, ConnectionError)
    assert str(error) == "cannot reach it: Connection refused [peer b:0]"
    assert error.__cause__ is cause
    assert str(translate(OSError("odd"), "x")) == "x: odd"


def test_a_port_in_use() -> None:
    with bind_tcp("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(NetworkError, match=f"127.0.0.1:{port}.*in use"):
            bind_tcp("127.0.0.1", port)


def test_an_address_of_another_host() -> None:
    with pytest.raises(NetworkError, match=r"192.0.2.1:0"):
        bind_tcp("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["localhost", "", "example.org", "127.0.0.1:80"])
def test_only_numeric_addresses(host: str) -> None:
    with pytest.raises(UsageError, match="numeric"):
        bind_tcp(host, 0)


def test_the_unix_socket_is_abstract() -> None:
    sock, name = bind_unix()
    assert sock is not None
    with sock:
        assert sock.getsockname() == b"\0" + name.encode()
        assert not sock.getblocking()


@pytest.mark.asyncio
async def test_a_full_backlog_is_waited_for() -> None:
    sock, name = bind_unix()
    assert sock is not None
    connected = []
    with sock:
        sock.listen(0)
        connected.append(await connect_unix(name))
        waiting = asyncio.create_task(connect_unix(name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        given_up = asyncio.create_task(connect_unix(name))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        connected.append(sock.accept()[0])
        connected.append(await waiting)
    for each in connected:
        each.close()


@pytest.mark.asyncio
async def test_nobody_listens() -> None:
    with pytest.raises(ConnectionRefusedError):
        await connect_unix(secrets.token_hex(16))


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [7.5, 1e9, float("inf")])
async def test_the_kernel_minds_a_tcp_connection(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    transport, _ = await loop.create_connection(asyncio.Protocol, *address)
    tune(transport, seconds)
    sock = transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == (
        7500 if seconds == 7.5 else 2_000_000_000
    )
    transport.abort()
    server.close()
    await server.wait_closed()
