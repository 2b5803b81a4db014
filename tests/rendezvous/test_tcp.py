"""The TCP board over real sockets and processes: who serves, who dies, who shares."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from aiocomm.errors import (
    ClosedError,
    RendezvousError,
    RendezvousTimeout,
    UsageError,
    WouldBlockError,
)
from aiocomm.rendezvous import TCPBoard, connect, session, tcp

from ..processes import Stage, Workers

WAIT = 30.0  # seconds; guards against hanging, nothing waits that long
SOON = 2.0  # seconds by which a death must be known


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets: bound here, but not listened on, so that a board still can."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def board_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if "aiocomm" in thread.name)


async def _arrived(board: TCPBoard) -> None:
    """Wait until the calls made by now have reached the board, which takes them in order."""
    await asyncio.sleep(0)
    await board.set("other", b"")


def _descriptor(board: TCPBoard) -> connect.Descriptor:
    assert board._session is not None
    assert board._session._connection is not None
    native = board._session._connection.native
    assert native is not None
    native.borrow().close()
    return native


async def _eventually(condition: Callable[[], bool]) -> None:
    """Wait for what nothing signals: the end of a thread, or a key of the board's own."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Who serves


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
            await _arrived(client)
            assert "aiocomm-board-watch" in board_threads()
        with pytest.raises(ClosedError):
            await waiting
        raw = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        assert [key for key in raw.list_keys() if "wake" in key or "log" in key] == []
        del raw
    assert board_threads() == []


@pytest.mark.asyncio
async def test_the_watcher_leaves_when_nobody_waits() -> None:
    async with TCPBoard(port=0, serve=True) as board:
        for _ in range(2):
            with pytest.raises(RendezvousTimeout):
                await board.get("k", 0.05)
            await _eventually(lambda: "aiocomm-board-watch" not in board_threads())
        waiting = asyncio.create_task(board.get("k", WAIT))
        await board.set("k", b"v")
        assert await waiting == b"v"


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


# Death


def _serve(stage: Stage) -> None:
    with TCPBoard(port=0, serve=True) as board:
        stage.set("port", board.port)
        stage.wait_blocking("never")


async def _die() -> float:
    """Seconds from the server's death until all gets and the next calls have failed."""
    with Workers(1) as workers:
        server = workers.start(_serve)
        async with TCPBoard(port=await asyncio.to_thread(workers.wait, "port")) as board:
            waiting = [asyncio.create_task(board.get(f"k{i}", WAIT)) for i in range(8)]
            await _arrived(board)
            began = time.monotonic()
            server.kill()
            for task in waiting:
                with pytest.raises(RendezvousError, match="gone") as caught:
                    await task
                assert not isinstance(caught.value, RendezvousTimeout)
            for call in (lambda: board.get("k", WAIT), lambda: board.set("k", b"")):
                with pytest.raises(RendezvousError, match="gone"):
                    await call()
        took = time.monotonic() - began
    assert board_threads() == []
    return took


@pytest.mark.asyncio
async def test_the_death_of_the_server_is_known_soon() -> None:
    # The best of three: torch looks up a name while it reports the death, which takes 5 s when the
    # name server loses a packet.
    for _ in range(3):
        if await _die() < SOON:
            return
    pytest.fail(f"not known within {SOON} s")


@pytest.mark.asyncio
async def test_a_death_that_nobody_waited_through_is_known_to_the_next_call() -> None:
    with Workers(1) as workers:
        server = workers.start(_serve)
        port = await asyncio.to_thread(workers.wait, "port")
        async with TCPBoard(port=port) as board:
            server.kill()
            await asyncio.to_thread(server.wait)
            native = _descriptor(board)
            with pytest.raises(RendezvousError, match="gone") as caught:
                await board.set("k", b"")
        # The error, whoever keeps it, does not keep the socket.
        with pytest.raises(OSError):
            native.borrow().close()
        assert caught.value.__cause__ is not None


@pytest.mark.asyncio
async def test_a_server_that_hangs_holds_neither_get_nor_set_nor_close() -> None:
    with Workers(1) as workers:
        server = workers.start(_serve)
        port = await asyncio.to_thread(workers.wait, "port")
        board = TCPBoard(port=port, timeout=2.0)
        async with board:
            waiting = asyncio.create_task(board.get("k", 1.0))
            await _arrived(board)
            server.stop()
            began = time.monotonic()
            with pytest.raises(RendezvousTimeout, match=r"1 s .*'k'"):
                await waiting
            with pytest.raises(RendezvousTimeout, match=r"writing 'k' .* 2 s"):
                await board.set("k", b"")
            assert time.monotonic() - began < 10
            began = time.monotonic()
        assert time.monotonic() - began < 5
        await _eventually(lambda: not board_threads())


@pytest.mark.asyncio
async def test_what_listens_but_does_not_answer_is_a_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "_ANSWER", timedelta(seconds=1))
    monkeypatch.setattr(tcp, "CLOSE_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(RendezvousTimeout, match="is no board"):
            await TCPBoard(port=silent.getsockname()[1], serve=False, timeout=0.2).aopen()
        assert "left behind" in caplog.text
    await _eventually(lambda: not board_threads())


@pytest.mark.asyncio
async def test_when_the_server_closes_the_board_is_gone() -> None:
    async with TCPBoard(port=0, serve=True) as server, TCPBoard(port=server.port) as client:
        await client.set("k", b"")
        await server.aclose()
        with pytest.raises(RendezvousError, match="gone"):
            await client.get("k", WAIT)


# Notification


async def _set_late(stage: Stage, port: int, count: int) -> None:
    async with TCPBoard(port=port, timeout=WAIT) as board:
        await stage.wait("go")
        for number in range(count):
            await board.set(f"k{number}", b"%d" % number)


@pytest.mark.asyncio
async def test_hundreds_of_gets_take_two_threads() -> None:
    count = 200
    with Workers(1) as workers:
        async with TCPBoard(port=0, serve=True) as server:
            workers.start(_set_late, server.port, count)
            async with TCPBoard(port=server.port) as client:
                waiting = [asyncio.create_task(client.get(f"k{i}", WAIT)) for i in range(count)]
                await _arrived(client)
                assert board_threads() == ["aiocomm-board"] * 2 + ["aiocomm-board-watch"]
                workers.set("go")
                values = await asyncio.gather(*waiting)
                assert values == [b"%d" % i for i in range(count)]
                assert not [t for t in threading.enumerate() if t.name.startswith("asyncio_")]
            await asyncio.to_thread(workers.join)


@pytest.mark.asyncio
async def test_gets_and_sets_that_race_always_meet() -> None:
    async with (
        TCPBoard(port=0, serve=True) as server,
        TCPBoard(port=server.port) as one,
        TCPBoard(port=server.port) as two,
    ):
        for number in range(300):
            key = f"k{number}"
            results = await asyncio.gather(one.get(key, WAIT), two.set(key, b"v"))
            assert results[0] == b"v"


@pytest.mark.asyncio
async def test_a_writer_that_died_half_way_leaves_nobody_deaf() -> None:
    async with TCPBoard(port=0, serve=True) as board:
        raw = dist.TCPStore("127.0.0.1", board.port, None, False, wait_for_workers=False)
        waiting = asyncio.create_task(board.get("k", WAIT))
        await _arrived(board)
        token = raw.compare_set("aiocomm/await/k", "never", "never").decode()
        watcher = token.partition(".")[0]
        # It took the token and told the watcher, and died before it wrote the value.
        raw.set("aiocomm/await/k", "")
        raw.append(f"aiocomm/log/{watcher}", "k\0")
        raw.set(f"aiocomm/wake/{watcher}", "")
        # Until the watcher has put a new token there.
        await _eventually(lambda: raw.compare_set("aiocomm/await/k", "never", "never") != b"")
        await board.set("k", b"v")
        assert await waiting == b"v"


@pytest.mark.asyncio
async def test_a_writer_that_died_after_the_value_has_woken_the_waiter() -> None:
    async with TCPBoard(port=0, serve=True) as board:
        raw = dist.TCPStore("127.0.0.1", board.port, None, False, wait_for_workers=False)
        waiting = asyncio.create_task(board.get("k", WAIT))
        await _arrived(board)
        watcher = raw.compare_set("aiocomm/await/k", "never", "never").decode().partition(".")[0]
        raw.append(f"aiocomm/log/{watcher}", "k\0")
        raw.set(f"aiocomm/wake/{watcher}", "")  # another writer wakes it in between: too early
        await _eventually(lambda: not raw.check([f"aiocomm/wake/{watcher}"]))
        raw.multi_set(["aiocomm/value/k", f"aiocomm/wake/{watcher}"], [b"v", b""])
        assert await waiting == b"v"


@pytest.mark.asyncio
async def test_a_wait_goes_on_when_its_slice_is_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "WAIT_SLICE", timedelta(milliseconds=20))
    async with TCPBoard(port=0, serve=True) as board:
        waiting = asyncio.create_task(board.get("k", WAIT))
        await asyncio.sleep(0.2)  # ten slices
        assert not waiting.done()
        await board.set("k", b"v")
        assert await waiting == b"v"


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
        board = TCPBoard.from_env(timeout=0.1)
        if rank == "1" or agent:
            with pytest.raises(RendezvousTimeout):
                board.open()
        else:
            with board:
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


# Processes


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT * 2,
        check=False,
    )


def test_a_forked_child_gets_an_error_and_ends_and_the_parent_goes_on() -> None:
    done = _run(
        """
import asyncio, os, sys
from aiocomm.errors import WrongLoopError
from aiocomm.rendezvous import TCPBoard

async def use(board):
    await board.set("k", b"v")
    return await board.get("k", 5)

board = TCPBoard(port=0, serve=True)
board.open()
pid = os.fork()
if pid == 0:
    refused = 0
    for call in (board.open, board.close, lambda: asyncio.run(use(board)), lambda: board.host):
        try:
            call()
        except WrongLoopError:
            refused += 1
    sys.exit(refused)  # through the interpreter's end, where a store is destroyed
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), asyncio.run(use(board)))
board.close()
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("4 b'v'\n", "", 0)


def test_a_board_that_was_never_closed_does_not_hold_the_process() -> None:
    done = _run(
        """
import asyncio, threading
from aiocomm.errors import ClosedError
from aiocomm.rendezvous import TCPBoard

async def main():
    server = TCPBoard(port=0, serve=True)
    await server.aopen()
    client = TCPBoard(port=server.port)
    await client.aopen()
    task = asyncio.create_task(client.get("k", 30))
    await asyncio.sleep(0)
    await client.set("other", b"")

def work():
    async def use():
        async with TCPBoard(port=0, serve=True) as board:
            while True:
                await board.set("k", b"v")
                started.set()
    try:
        asyncio.run(use())
    except ClosedError:
        pass

asyncio.run(main())
started = threading.Event()
for _ in range(3):  # inside torch for most of the time, at the end of the interpreter too
    threading.Thread(target=work, daemon=True).start()
started.wait()
print("end")
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


@pytest.mark.asyncio
async def test_a_thread_of_the_board_logs_nothing_in_good_order(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="aiocomm"):
        async with TCPBoard(port=0, serve=True) as server, TCPBoard(port=server.port) as client:
            with pytest.raises(RendezvousTimeout):
                await client.get("k", 0.05)
            await server.set("k", b"v")
            assert await client.get("k", WAIT) == b"v"
    assert caplog.records == []
    assert capfd.readouterr().err == ""
