"""How processes leave: with work in flight, in a fork, by the end of their main function.

What counts is the exit status and every word on stderr. Most scenes run in the tests' own workers,
which end as any interpreter does, and one in an interpreter that knows nothing of tests.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import aiocomm
from aiocomm import Options
from aiocomm.errors import ClosedError, WrongLoopError
from aiocomm.testing import MemoryStore

from .. import loops
from ..pairs import MEMBERS, pair
from ..processes import Stage, Workers
from .members import group_with, member

ROOT = Path(__file__).resolve().parent.parent.parent

# --- scenes: F38 ---


def run(loop: str, main: Coroutine[Any, Any, None]) -> None:
    """As ``asyncio.run`` does: what is left is cancelled, and the loop is closed."""
    with asyncio.Runner(loop_factory=loops.FACTORIES[loop]) as runner:
        runner.run(main)


def in_flight_and_never_awaited(stage: Stage, loop: str) -> None:
    async def main() -> None:
        store = MemoryStore()
        async with aiocomm.open("b:0", store=store) as b, aiocomm.open("a:0", store=store) as a:
            ours, theirs = (each.create_collective_group(MEMBERS) for each in (a, b))
            for _ in range(10):
                ours.send(torch.ones(1_000_000))
            theirs.recv()
            ours.recv()

    run(loop, main())


def left_by_an_exception(stage: Stage, loop: str) -> None:
    async def main() -> None:
        async with aiocomm.open("a:0", store=MemoryStore()) as a:
            group = a.create_collective_group(MEMBERS)
            group.send("to nobody")
            group.recv()
            raise KeyError

    with pytest.raises(KeyError):
        run(loop, main())


def never_closed(stage: Stage, loop: str) -> None:
    kept: list[Any] = []

    async def main() -> None:
        kept.append(aiocomm.open("a:0", store=MemoryStore()))
        group = (await kept[0].__aenter__()).create_collective_group(MEMBERS)
        group.send("to nobody")

    run(loop, main())


def cancelled_while_it_closes(stage: Stage, loop: str) -> None:
    async def main() -> None:
        options = Options(close_timeout=60)
        async with (
            asyncio.timeout(0.1),
            aiocomm.open("a:0", store=MemoryStore(), options=options) as a,
        ):
            a.create_collective_group(MEMBERS).send("to nobody")

    with pytest.raises(TimeoutError):
        run(loop, main())


def a_thread_still_waits(stage: Stage, loop: str) -> None:
    said: list[Any] = []
    threads: list[threading.Thread] = []

    def wait(work: Any) -> None:
        try:
            work.wait()
        except ClosedError:
            said.append("closed")

    async def main() -> None:
        async with aiocomm.open("a:0", store=MemoryStore()) as a:
            recv = a.create_collective_group(MEMBERS).recv()
            threads.append(threading.Thread(target=wait, args=(recv,)))
            threads[0].start()

    run(loop, main())
    threads[0].join()
    assert said == ["closed"]


SCENES = (
    in_flight_and_never_awaited,
    left_by_an_exception,
    never_closed,
    cancelled_while_it_closes,
    a_thread_still_waits,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_end_is_quiet(loop_name: str, scene: Any) -> None:
    with Workers(1) as workers:
        worker = workers.start(scene, loop_name, strict=scene is not never_closed)
        workers.join()
        assert (worker.stderr, worker.stdout, worker.wait()) == ("", "", 0)


def test_the_end_of_an_interpreter_of_its_own_is_quiet(loop_name: str) -> None:
    script = f"""
        from tests.system.test_close import in_flight_and_never_awaited
        in_flight_and_never_awaited(None, {loop_name!r})
    """
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert (ended.stderr, ended.stdout, ended.returncode) == ("", "", 0)


# --- a sender that leaves at once ---


async def drops_and_leaves(stage: Stage) -> None:
    async with member(stage, serve=1) as collective:
        group = group_with(collective, 1)
        group.send("small")
        group.send_tensor(group_tensor())


def group_tensor() -> torch.Tensor:
    return torch.arange(1_000_000)


async def stays(stage: Stage) -> int:
    async with member(stage, serve=1) as collective:
        group = group_with(collective, 0)
        assert await group.recv() == "small"
        got = await group.recv_tensor(torch.zeros(1_000_000, dtype=torch.int64))
        assert torch.equal(got, group_tensor())
        with pytest.raises(aiocomm.errors.PeerClosedError):
            await group.recv()
        return 1


def test_a_sender_that_drops_its_works_and_leaves(loop_name: str) -> None:  # F14
    with Workers(2, loop=loop_name) as workers:
        workers.start(drops_and_leaves)
        receiver = workers.start(stays)
        workers.join()
        assert receiver.result() == 1


# --- fork ---


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_child_is_told_at_once_and_the_parent_goes_on() -> None:  # F42
    async with pair("link") as (a, b):
        await asyncio.gather(a.send(1), b.recv())
        collective = aiocomm.current("a:0")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # no more of Python's machinery than needed, and never back to pytest
            said = []
            for call in (
                lambda: a.send(1),
                a.recv,
                lambda: collective.create_collective_group(MEMBERS),
            ):
                try:
                    call()
                    said.append("nothing")
                except WrongLoopError as error:
                    said.append("forked" if "forked" in str(error) else str(error))
                except BaseException as error:
                    said.append(repr(error))
            os.write(writer, ",".join(said).encode())
            os._exit(0)
        os.close(writer)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert os.read(reader, 4096) == b"forked,forked,forked"
        os.close(reader)
        await asyncio.gather(b.send("the parent is fine"), a.recv())
