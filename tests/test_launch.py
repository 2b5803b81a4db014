"""Local workers: results by rank, the reason of a failure, and nothing left whoever dies.

The workers are started anew, as users' are; each imports torch, so there are few of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import launch
from aiocomm.errors import PeerLostError, UsageError, WouldBlockError
from aiocomm.launch import RemoteTraceback, run_local

from .processes import Stage, Workers

PAIR = ["worker:0", "worker:1"]
# As it was while this file was imported: in a worker, before its own code began.
INTERRUPTS_HELD = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class Needy(Exception):
    """Cannot be made again from its args, so it does not survive pickling."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


MUCH = 4 << 20  # bytes, more than any pipe holds


async def exchange(collective: aiocomm.Collective, rank: int, weight: float) -> tuple[int, float]:
    os.kill(os.getpid(), signal.SIGINT)  # a terminal's interrupt is the parent's business
    group = collective.create_collective_group(PAIR)
    sent = group.send({"rank": rank, "data": torch.full((3,), weight)})
    got = await group.recv()
    await sent
    return got["rank"], float(got["data"].sum())


async def ring(collective: aiocomm.Collective, rank: int, count: int) -> int:
    def group(other: int) -> aiocomm.CollectiveGroup:
        return collective.create_collective_group([f"worker:{rank}", f"worker:{other % count}"])

    sent = group(rank + 1).send(rank)
    got = await group(rank - 1).recv()
    await sent
    return int(got)


async def one_fails_last(collective: aiocomm.Collective, rank: int) -> None:
    first, second = (collective.create_collective_group(PAIR, name) for name in ("1", "2"))
    await asyncio.gather(first.ready(), second.ready())
    if rank == 1:
        await first.abort()
        with pytest.raises(PeerLostError):
            await second.recv()  # until the other has failed for the loss of the first
        raise KeyError("the reason")
    await first.recv()


async def one_is_killed(collective: aiocomm.Collective, rank: int) -> None:
    group = collective.create_collective_group(PAIR)
    await group.ready()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await group.recv()


async def leave(collective: aiocomm.Collective, rank: int) -> None:
    sys.exit(3)


async def return_much(collective: aiocomm.Collective, rank: int) -> bytes:
    return bytes(MUCH)


async def raise_much(collective: aiocomm.Collective, rank: int) -> None:
    raise ValueError("x" * MUCH)


async def return_a_lock(collective: aiocomm.Collective, rank: int) -> object:
    return threading.Lock()


async def raise_what_cannot_travel(collective: aiocomm.Collective, rank: int) -> None:
    raise Needy("for ", "want of a nail")


async def cancel_itself(collective: aiocomm.Collective, rank: int) -> None:
    work = collective.create_collective_group(["worker:0", "other:0"]).recv()
    work.cancel()
    await work


async def one_stays(collective: aiocomm.Collective, rank: int) -> None:
    if rank == 1:
        await asyncio.Event().wait()


async def report_and_stay(collective: aiocomm.Collective, rank: int, port: int) -> None:
    """Hold a connection to the test for as long as this process lives."""
    group = collective.create_collective_group(PAIR)
    await group.ready()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"!" if INTERRUPTS_HELD else b"interrupts could have ended it")
    await group.recv()


async def report_and_resist(collective: aiocomm.Collective, rank: int, port: int) -> None:
    launch.ORPHAN_GRACE = 0.2
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"!")
    forever = asyncio.get_running_loop().create_future()
    while True:
        try:
            await asyncio.shield(forever)
        except asyncio.CancelledError:
            sock.sendall(b"?")


def test_results_come_by_rank_and_a_board_that_was_given_stays_open() -> None:
    with aiocomm.TCPBoard(port=0, serve=True) as board:
        assert run_local(exchange, 2, 2.0, store=board) == [(1, 6.0), (0, 6.0)]
        assert board.serving


def test_what_a_worker_ends_with_may_be_large() -> None:
    assert run_local(return_much, 2) == [bytes(MUCH)] * 2
    with pytest.raises(ValueError, match="xxx") as caught:
        run_local(raise_much, 1)
    assert len(str(caught.value)) == MUCH


def test_a_worker_that_dies_in_the_middle_of_its_report_is_a_dead_one() -> None:
    workers = object.__new__(launch._Workers)
    here, there = multiprocessing.Pipe()
    dead: Any = SimpleNamespace(join=lambda timeout: None, exitcode=-9)
    workers._pipes, workers._processes = [here], [dead]
    with here:
        with there:
            os.write(there.fileno(), struct.pack("!i", MUCH) + b"the beginning")
        report = workers._report_of(0)
    assert report.error is not None
    assert "worker:0 died without a word (exit code -9)" in str(pickle.loads(report.error))


def test_four_workers_in_a_ring() -> None:
    assert run_local(ring, 4, 4) == [3, 0, 1, 2]


def test_the_reason_goes_before_the_losses_that_it_caused() -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        run_local(one_fails_last, 2)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert 'raise KeyError("the reason")' in str(caught.value.__cause__)


def test_a_killed_worker_goes_before_the_losses_that_it_caused() -> None:
    with pytest.raises(PeerLostError, match=r"worker:1 died without a word \(exit code -9\)"):
        run_local(one_is_killed, 2)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (leave, PeerLostError, "worker:0 died without a word (exit code 3)"),
        (return_a_lock, TypeError, "cannot pickle"),
        (raise_what_cannot_travel, RuntimeError, "Needy: for want of a nail"),
        (cancel_itself, RuntimeError, "worker:0 let a cancellation of its own escape"),
    ],
)
def test_ends_of_a_single_worker(function: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        run_local(function, 1)
    assert text in str(caught.value)


async def forks_and_dies(collective: aiocomm.Collective, rank: int, path: Path) -> None:
    leave_a_child(path)


def leave_a_child(path: Path) -> None:
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    path.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_whose_pipe_outlives_it_in_a_child_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "child"
    try:
        with pytest.raises(PeerLostError, match="worker:0 died without a word"):
            run_local(forks_and_dies, 1, path)
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)


def test_a_time_out_names_who_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def patient(pipes: list[Any], timeout: float) -> list[Any]:
        assert timeout <= 5
        return wait(pipes) if len(pipes) == 4 else []  # time is up once one of the two is done

    monkeypatch.setattr(launch, "wait", patient)
    with pytest.raises(TimeoutError, match=r"^not done within 5 s: worker:1$"):
        run_local(one_stays, 2, timeout=5.0)


def _not_a_coroutine(collective: aiocomm.Collective, rank: int) -> None: ...


@pytest.mark.parametrize("function", [lambda collective, rank: None, _not_a_coroutine, None])
def test_only_coroutine_functions(function: Any) -> None:
    with pytest.raises(UsageError, match="is not a coroutine function: write 'async def'"):
        run_local(function, 1)


@pytest.mark.asyncio
async def test_where_a_loop_runs_it_is_refused() -> None:
    with pytest.raises(WouldBlockError, match="run_local waits for its workers"):
        run_local(exchange, 2)


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2"])
def test_only_positive_numbers_of_workers(n: Any) -> None:
    with pytest.raises(UsageError, match="workers cannot be started"):
        run_local(exchange, n, 1.0)


def test_what_pickle_does_not_take_is_refused_before_anything_starts() -> None:
    async def local(collective: aiocomm.Collective, rank: int) -> None: ...

    with pytest.raises(UsageError, match="define the function at the top of a module"):
        run_local(local, 2)
    with pytest.raises(UsageError, match="pass what pickle takes"):
        run_local(exchange, 2, threading.Lock())


class Watch:
    """Connections that workers hold while they live."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._held: list[socket.socket] = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._held):
            sock.close()

    def started(self) -> None:
        while len(self._held) < self._count:
            sock = self._listener.accept()[0]
            self._held.append(sock)
            assert sock.recv(1) == b"!"

    def ended(self, timeout: float = 30.0) -> None:
        """Wait until every one of them is gone."""
        with selectors.DefaultSelector() as selector:
            for sock in self._held:
                selector.register(sock, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(timeout)
                assert ready, "workers are left"
                for key, _ in ready:
                    if _is_over(key.fileobj):
                        selector.unregister(key.fileobj)


def _is_over(sock: Any) -> bool:
    try:
        return sock.recv(64) == b""
    except ConnectionResetError:
        return True


def start_two(stage: Stage, function: Callable[..., Any], port: int) -> str:
    # A suite that runs in the background of a shell has inherited that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_local(function, 2, port)
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def test_an_interrupted_parent_ends_its_workers() -> None:
    with Watch(2) as watch, Workers(1) as workers:
        parent = workers.start(start_two, report_and_stay, watch.port)
        watch.started()
        parent.signal(signal.SIGINT)
        assert workers.join() == ["interrupted"]
        watch.ended()


@pytest.mark.parametrize("function", [report_and_stay, report_and_resist])
def test_workers_end_when_their_parent_is_killed(function: Any) -> None:
    with Watch(2) as watch, Workers(1) as workers:
        parent = workers.start(start_two, function, watch.port)
        watch.started()
        parent.kill()
        watch.ended()
