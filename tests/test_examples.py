"""The examples, the code of the README and that of the seed document, run as a reader would.

Each example is a process of its own: it ends well, says nothing on stderr, and its last line is
known. Rejected: importing them, which tests neither the guard at their end nor what is left at
exit.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import aiocomm

from .rendezvous.boards import reserved_port
from .sources import ROOT

MEMBERS = ["trainer:0", "rollout:0"]
TIMEOUT = 300.0  # seconds; guards against hanging, nothing else
LINES = 80

LAST_LINES = {
    "blocking_worker": "twice three ones make 6",
    "own_loop": "both are done",
    "ping_pong": "1000 hits in 1000 rounds",
    "ray_ping_pong": "1000 hits in 1000 rounds",
    "ray_rollouts": "3 steps, 192 samples",
    "ray_sync_actors": "3 steps, 192 samples",
    "shared_memory": "[0.0, 1.0, 2.0]",
    "stream_tensors": "200 tensors, never more than 8 in waiting",
    "task_graph": "5 batches through three workers: 15.0",
    "timeouts_and_errors": (
        "a time-out, late, but not lost, a mismatch, the next one is intact, goodbye"
    ),
    "weight_sync": "10 trajectories back, the last weights were version 9",
}


def run(path: Path, *args: str, **environment: str) -> list[str]:
    """Lines of its standard output; it must end well and say nothing else, but that it waits."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path), *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    complaints = [line for line in done.stderr.splitlines() if not line.endswith("still waiting)")]
    assert (done.returncode, complaints) == (0, [])  # on a busy machine Ray may take its time
    return done.stdout.splitlines()


def run_example(name: str) -> list[str]:
    path = ROOT / "examples" / f"{name}.py"
    if name == "own_loop":
        with reserved_port() as port:
            return run(path, str(port))
    with on_ray() if name.startswith("ray_") else nullcontext({}) as environment:
        return run(path, **environment)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Future[list[str]]]:
    """All examples that are asked for, run two at a time: each takes seconds to import torch."""
    items = [item for item in request.session.items if item.name.startswith("test_example[")]
    with ThreadPoolExecutor(2) as pool:
        return {
            name: pool.submit(run_example, name)
            for name in (str(item.callspec.params["name"]) for item in items)
        }


def test_every_example_is_run() -> None:
    assert sorted(LAST_LINES) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", sorted(LAST_LINES))
def test_example(runs: dict[str, Future[list[str]]], name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < LINES
    assert runs[name].result()[-1] == LAST_LINES[name]


@contextmanager
def on_ray() -> Iterator[dict[str, str]]:
    """What a program that starts a Ray of its own needs to be silent, and where its files go."""
    # Ray makes Unix sockets deep in it, so its own name has to be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}


# --- the README's interface at a glance ---


def glance() -> tuple[str, str, str]:
    """Its three parts: local workers, a loop of one's own, no loop."""
    text = (ROOT / "README.md").read_text()
    local, rest = (part.partition("```")[0] for part in text.split("```python\n")[1:3])
    own, blocking = rest.split("# no event loop\n")
    return local, own, blocking


def test_glance_local_workers(tmp_path: Path) -> None:
    script = tmp_path / "glance.py"
    script.write_text(glance()[0])
    assert run(script) == ["[1024.0, 0.0]"]


@pytest.mark.asyncio
async def test_glance_own_loop() -> None:
    names: dict[str, Any] = {"aiocomm": aiocomm}
    with reserved_port() as port:
        source = glance()[1].replace("29500", str(port))
        code = compile(source, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)
        assert inspect.iscoroutine(running)
        await running
    assert names["collective"].address == aiocomm.WorkerAddress("trainer", 0)


def test_glance_blocking() -> None:
    def answer(board: aiocomm.TCPBoard) -> None:
        with aiocomm.blocking.open("rollout:0", store=board) as collective:
            group = collective.create_collective_group(MEMBERS)
            group.send({"echo": group.recv()})

    with aiocomm.TCPBoard(port=0, serve=True) as board:
        peer = threading.Thread(target=answer, args=(board,))
        peer.start()
        names: dict[str, Any] = {"aiocomm": aiocomm, "board": board, "obj": [torch.ones(2)]}
        exec(glance()[2].replace("store=...", "store=board"), names)
        peer.join(TIMEOUT)
    assert names["obj"]["echo"][0].tolist() == [1.0, 1.0]


@pytest.mark.ray
def test_readme_on_ray() -> None:
    text = (ROOT / "README.md").read_text().partition("## On Ray\n")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "readme", "torch": torch}
    try:
        exec(code, names)
        assert names["sums"] == [1024.0, 1024.0]
    finally:
        for group in ("trainers", "rollouts"):
            if group in names:
                names.pop(group).close()


# --- the two snippets of the seed document ---

OBJECTS = """
send_work = group.send(obj, async_op=True)      # AsyncWork
await send_work.async_wait()

recv_work = group.recv(async_op=True)           # AsyncWork
obj = recv_work.wait()
"""

CHAIN = """
def postprocess(buf):
    return None

w = group.recv_tensor(tensor, async_op=True)
w2 = w.then(postprocess)                        # AsyncFuncWork
w2.wait()
"""


@pytest.mark.asyncio
async def test_snippets_on_an_async_group() -> None:
    async with (
        aiocomm.TCPBoard(port=0, serve=True) as board,
        aiocomm.open(MEMBERS[0], store=board) as ours,
        aiocomm.open(MEMBERS[1], store=board) as theirs,
    ):
        group = ours.create_collective_group(MEMBERS)
        peer = theirs.create_collective_group(MEMBERS)
        await peer.send("from the peer")
        await group.send("and back")
        await peer.recv()
        assert group.statistics().unreceived == 1  # so wait() on the loop's thread need not wait
        names: dict[str, Any] = {"group": group, "obj": "from here"}
        await eval(compile(OBJECTS, "seed", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        assert names["obj"] == "from the peer"
        assert await peer.recv() == "from here"

        peer.send_tensor(torch.ones(3))
        names = {"group": group, "tensor": torch.zeros(3)}
        await asyncio.to_thread(exec, CHAIN, names)
        assert isinstance(names["w2"], aiocomm.AsyncFuncWork)
        assert names["tensor"].tolist() == [1.0, 1.0, 1.0]
        assert names["w2"].result() is None


def test_snippets_on_a_blocking_group() -> None:
    with (
        aiocomm.TCPBoard(port=0, serve=True) as board,
        aiocomm.blocking.open(MEMBERS[0], store=board) as ours,
        aiocomm.blocking.open(MEMBERS[1], store=board) as theirs,
    ):
        group = ours.create_collective_group(MEMBERS)
        peer = theirs.create_collective_group(MEMBERS)
        sent = peer.send("from the peer", async_op=True)
        names: dict[str, Any] = {"group": group, "obj": "from here"}
        # The one line that needs a loop is the one that code without a loop cannot have.
        exec(OBJECTS.replace("await send_work.async_wait()", "send_work.wait()"), names)
        assert (names["obj"], sent.wait()) == ("from the peer", None)
        assert peer.recv() == "from here"

        peer.send_tensor(torch.ones(3))
        names = {"group": group, "tensor": torch.zeros(3)}
        exec(CHAIN, names)
        assert names["tensor"].tolist() == [1.0, 1.0, 1.0]
