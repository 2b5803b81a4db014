"""The TCP board as its users call it: opening, closing, arguments, the environment."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from typing import Any

import pytest
import torch.distributed as dist

from aiocomm.errors import ClosedError, RendezvousTimeout, UsageError, WouldBlockError
from aiocomm.rendezvous import TCPBoard

from ..processes import Stage, Workers
from .boards import WAIT, arrived, board_threads, reserved_port

# Opening and closing


@pytest.mark.asyncio
async def test_nothing_happens_at_construction() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        TCPBoard(port=silent.getsockname()[1])
        TCPBoard("no.such.host.invalid")
        assert board_threads() == []


def test_plain_code_may_host_it() -> None:
    with TCPBoard(port=0, serve=True) as board:
        assert board.serving
        port = board.port
        with TCPBoard(port=port, timeout=WAIT), board:
            pass

        async def use() -> bytes:
            async with board:
                await board.set("k", b"v")
                return await board.get("k", WAIT)

        assert asyncio.run(use()) == b"v"
        assert board.serving
    assert board_threads() == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    board.close()


@pytest.mark.asyncio
async def test_plain_calls_are_refused_on_a_loop() -> None:
    board = TCPBoard(port=0, serve=True)
    with pytest.raises(WouldBlockError, match="aopen"):
        board.open()
    with pytest.raises(WouldBlockError, match="aclose"):
        board.close()


def test_a_plain_open_in_vain_is_a_timeout() -> None:
    with reserved_port() as port, pytest.raises(RendezvousTimeout, match=str(port)):
        TCPBoard(port=port, serve=False, timeout=0.1).open()
    assert board_threads() == []


@pytest.mark.asyncio
async def test_several_open_at_once_and_close_at_once() -> None:
    board = TCPBoard(port=0, serve=True)
    await asyncio.gather(*(board.aopen() for _ in range(5)))
    assert board_threads() == ["aiocomm-board"]
    await asyncio.gather(*(board.aclose() for _ in range(4)))
    await board.set("k", b"v")
    await board.aclose()
    assert board_threads() == []


@pytest.mark.asyncio
async def test_the_port_can_be_served_again_at_once() -> None:
    with reserved_port() as port:
        board = TCPBoard(port=port, timeout=WAIT)
        for _ in range(5):
            closing = None
            async with board:
                assert board.serving
                closing = asyncio.create_task(board.aclose())
                await asyncio.sleep(0)
                await board.aopen()
                assert board.serving
                await closing


@pytest.mark.asyncio
@pytest.mark.tight
async def test_nothing_is_left_after_the_close() -> None:
    async with TCPBoard(port=0, serve=True) as server:
        async with TCPBoard(port=server.port) as client:
            waiting = asyncio.create_task(client.get("k", WAIT))
            await arrived(client)
            assert "aiocomm-board-watch" in board_threads()
        with pytest.raises(ClosedError):
            await waiting
        raw = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        assert [key for key in raw.list_keys() if "wake" in key or "log" in key] == []
        del raw
    assert board_threads() == []


def test_a_board_travels_as_its_address() -> None:
    board = TCPBoard("127.0.0.1", 1234, serve=None, timeout=5)
    assert repr(pickle.loads(pickle.dumps(board))) == "<TCPBoard 127.0.0.1:1234 closed>"
    with TCPBoard(port=0, serve=True) as server, pickle.loads(pickle.dumps(server)) as copy:
        assert copy.port == server.port
        assert not copy.serving


# Bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"host": ""}, "host"),
        ({"host": None}, "host"),
        ({"host": " a"}, "host"),
        ({"host": "0.0.0.0"}, "others"),
        ({"host": "::"}, "others"),
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"port": "29500"}, "port"),
        ({"port": True}, "port"),
        ({"port": 0}, "serve=True"),
        ({"port": 0, "serve": False}, "serve=True"),
        ({"serve": "yes"}, "serve"),
        ({"timeout": 0}, "time-out"),
        ({"timeout": -1}, "negative"),
        ({"timeout": float("inf")}, "time-out"),
        ({"timeout": "1"}, "time-out"),
    ],
)
def test_an_unusable_argument_is_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TCPBoard(**arguments)


# The environment


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "70000"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "-1"}, "RANK"),
    ],
)
def test_an_unusable_environment_names_the_variable(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TCPBoard.from_env(environ)


@pytest.mark.parametrize("rank", [None, "0", "1"])
@pytest.mark.parametrize("agent", [False, True])
def test_who_may_serve_by_the_environment(
    rank: str | None, agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        if rank == "1" or agent:
            with pytest.raises(RendezvousTimeout):
                TCPBoard.from_env(timeout=0.1).open()
        else:
            with TCPBoard.from_env(timeout=WAIT) as board:
                assert (board.serving, board.port) == (True, port)


@pytest.mark.asyncio
async def test_a_torch_store_on_the_port_is_shared_under_a_prefix() -> None:
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent.set("k", "torch's")
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "RANK": "0"}
    async with TCPBoard.from_env(environ, timeout=WAIT) as board:
        assert not board.serving
        waiting = asyncio.create_task(board.get("k", WAIT))
        await board.set("k", b"ours")
        assert await waiting == b"ours"
        assert agent.get("k") == b"torch's"
        ours = set(agent.list_keys()) - {"k", "init/"}
        assert ours
        assert all(key.startswith("aiocomm/") for key in ours)
    del agent


async def _beside_torch(stage: Stage, port: int, board_first: bool) -> tuple[bool, bytes]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(stage.rank),
        WORLD_SIZE=str(stage.count),
        GLOO_SOCKET_IFNAME="lo",
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    board = TCPBoard.from_env(timeout=WAIT)
    if board_first:
        await board.aopen()
    await asyncio.to_thread(dist.init_process_group, "gloo")
    if not board_first:
        await board.aopen()
    await board.set(f"w{stage.rank}", b"%d" % stage.rank)
    value = await board.get(f"w{1 - stage.rank}", WAIT)
    serving = board.serving
    await stage.barrier("met")
    if stage.rank == 0:
        await stage.wait("left")
    await board.aclose()
    dist.destroy_process_group()
    stage.set("left") if stage.rank else None
    return serving, value


@pytest.mark.parametrize("board_first", [True, False])
def test_it_shares_the_port_with_init_process_group(board_first: bool) -> None:
    with reserved_port() as port, Workers(2) as workers:
        for _ in range(2):
            workers.start(_beside_torch, port, board_first, strict=False)
        assert workers.join() == [(board_first, b"1"), (False, b"0")]
