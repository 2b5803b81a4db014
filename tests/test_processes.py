"""The helpers that the other tests rest on: workers, loops, and the search for leftovers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import tempfile
import threading
import time
import warnings

import pytest
import uvloop

from . import loops
from .leaks import Snapshot
from .processes import Stage, WorkerDied, WorkerDirty, Workers, WorkersTimeout, run_workers


@pytest.mark.asyncio
async def test_loop_is_the_one_asked_for_and_in_debug_mode(request: pytest.FixtureRequest) -> None:
    loop = asyncio.get_running_loop()
    asked = request.node.callspec.id
    assert isinstance(loop, uvloop.Loop) == (asked == "uvloop")
    assert loops.name_of(loop) == asked
    assert loop.get_debug()


@pytest.mark.asyncio
async def test_an_unretrieved_exception_is_a_complaint(complaints: list[loops.Context]) -> None:
    asyncio.get_running_loop().create_future().set_exception(ZeroDivisionError("lost"))
    gc.collect()
    assert [repr(context["exception"]) for context in complaints] == ["ZeroDivisionError('lost')"]
    assert "ZeroDivisionError: lost" in loops.describe(complaints[0])
    complaints.clear()


@pytest.mark.asyncio
async def test_stragglers_are_tasks_that_do_not_end() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(event.wait(), name="waits")
    assert ["waits" in line for line in await loops.stragglers()] == [True]
    event.set()
    await task
    assert await loops.stragglers() == []


def test_leftovers_are_named() -> None:
    before = Snapshot.take()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="lingers")
    thread.start()
    left, right = socket.socketpair()
    handle, path = tempfile.mkstemp(prefix="forgotten")
    found = "\n".join(before.left(tight=True, grace=0))
    end.set()
    thread.join()
    left.close()
    right.close()
    os.close(handle)
    os.unlink(path)
    assert "lingers" in found
    assert found.count("open socket:") == 2
    assert "temporary file forgotten" in found
    assert "native threads" in found
    assert before.left(tight=True) == []


def test_shared_memory_and_child_processes_are_named() -> None:
    before = Snapshot.take()
    path = f"/dev/shm/aiocomm-test-{os.getpid()}"
    with open(path, "wb"):
        found = before.left(grace=0)
    os.unlink(path)
    assert found == [f"shared memory {path}"]
    reading, writing = os.pipe()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", "input()"],
        {},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, reading, 0),
            (os.POSIX_SPAWN_CLOSE, writing),
        ],
    )
    found = before.left(grace=0)
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)
    assert [f"child process {child}" in line for line in found] == [True]


async def _meet(stage: Stage, text: str) -> tuple[int, int, str, str]:
    await stage.barrier("met")
    return stage.rank, os.getpid(), text, loops.name_of(asyncio.get_running_loop())


def test_workers_are_processes_that_meet_and_return(loop_name: str) -> None:
    with Workers(3, loop=loop_name) as workers:
        started = [workers.start(_meet, text) for text in "abc"]
        results = workers.join()
    assert results == [(n, started[n].pid, "abc"[n], loop_name) for n in range(3)]
    assert len({os.getpid(), *(worker.pid for worker in started)}) == 4


@pytest.mark.asyncio
async def test_workers_run_the_loop_of_the_test() -> None:
    results = await asyncio.to_thread(run_workers, _meet, 1, "x", loop=None)
    assert results[0][3] == "uvloop"  # a thread has no running loop
    with Workers(1) as workers:
        workers.start(_meet, "x")
        results = await asyncio.to_thread(workers.join)
    assert results[0][3] == loops.name_of(asyncio.get_running_loop())


async def _relay(stage: Stage) -> int:
    value = await stage.wait(f"to {stage.rank}")
    stage.set(f"to {stage.rank + 1}", value + 1)
    return int(value)


def _relay_blocking(stage: Stage) -> int:
    value = stage.wait_blocking(f"to {stage.rank}")
    stage.set(f"to {stage.rank + 1}", value + 1)
    return int(value)


@pytest.mark.parametrize("function", [_relay, _relay_blocking])
def test_values_reach_workers_and_the_test(function: object) -> None:
    with Workers(2) as workers:
        workers.start(function)  # type: ignore[arg-type]
        workers.set("to 0", 5)
        assert workers.wait("to 1") == 6
        workers.start(function)  # type: ignore[arg-type]  # late: it finds what was set before
        assert workers.wait("to 2") == 7
        assert workers.join() == [5, 6]


async def _fail(stage: Stage) -> None:
    if stage.rank == 1:
        raise KeyError("broken")
    await stage.wait("never")


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="broken") as raised:
        run_workers(_fail)
    assert 'raise KeyError("broken")' in str(raised.value.__cause__)


def test_waiting_for_a_value_raises_what_failed_a_worker() -> None:
    with Workers(2) as workers:
        workers.start(_fail)
        workers.start(_fail)
        with pytest.raises(KeyError, match="broken"):
            workers.wait("never")


async def _raise_unpicklable(stage: Stage) -> None:
    error = RuntimeError("odd")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def test_an_exception_that_cannot_be_pickled_comes_as_text() -> None:
    with pytest.raises(WorkerDied, match="RuntimeError: odd"):
        run_workers(_raise_unpicklable, 1)


def _hang(stage: Stage) -> None:
    stage.set("hangs")
    threading.Event().wait()


def test_the_time_out_kills_and_shows_stacks() -> None:
    with Workers(1) as workers:
        worker = workers.start(_hang)
        workers.wait("hangs")
        workers._deadline = time.monotonic()  # time is up
        workers._poke()
        with pytest.raises(WorkersTimeout, match="in _hang"):
            workers.join()
        assert worker.status == -9


def test_kill_stop_and_resume_reach_the_process() -> None:
    with Workers(2) as workers:
        victim = workers.start(_hang)
        other = workers.start(_relay)
        workers.wait("hangs")
        other.stop()
        victim.kill()
        assert victim.wait() == -9
        with pytest.raises(WorkerDied, match="ended with -9"):
            victim.result()
        other.resume()
        workers.set("to 1", 3)
        assert workers.join() == [None, 3]


async def _leave_task(stage: Stage) -> None:
    stage.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[attr-defined]


async def _leave_exception(stage: Stage) -> None:
    asyncio.get_running_loop().create_future().set_exception(ValueError("lost"))


async def _leave_socket(stage: Stage) -> None:
    stage.socket = socket.socket()  # type: ignore[attr-defined]


async def _leave_warning(stage: Stage) -> None:
    socket.socket()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_leave_task, "task <Task"),
        (_leave_exception, "ValueError: lost"),
        (_leave_socket, "open socket:"),
        (_leave_warning, "ResourceWarning: unclosed"),
    ],
)
def test_what_a_worker_leaves_behind_is_a_failure(function: object, text: str) -> None:
    with Workers(1) as workers:
        worker = workers.start(function, grace=0.0)  # type: ignore[arg-type]
        with pytest.raises(WorkerDirty, match=text):
            workers.join()
        assert worker.status == 0
    with Workers(1) as workers:
        worker = workers.start(function, strict=False)  # type: ignore[arg-type]
        assert workers.join() == [None]
        assert any(text in complaint for complaint in worker.complaints)


def _write(stage: Stage) -> str:
    print("out", flush=True)
    print("err", file=sys.stderr, flush=True)
    with pytest.raises(UserWarning, match="is an error"):
        warnings.warn("is an error", stacklevel=1)
    return os.environ["AIOCOMM_TEST"]


def test_streams_are_kept_apart_and_the_environment_is_the_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOCOMM_TEST", "here")
    with Workers(1) as workers:
        worker = workers.start(_write)
        assert workers.join() == ["here"]
    assert (worker.stdout, worker.stderr) == ("out\n", "err\n")
