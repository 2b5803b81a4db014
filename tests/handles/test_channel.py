"""Calls of Ray as handles, on a real Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from aiocomm.errors import ClosedError, UsageError
from aiocomm.handles import channel as module
from aiocomm.handles.channel import AsyncChannelWork

from .. import loops
from ..absent import import_without
from ..pairs import until
from ..processes import run_workers

LOOPS = ["uvloop"]  # it is on Ray; what differs by loop shows in the tests of the other works

on_ray = pytest.mark.ray("called")


class UsersError(Exception):
    """One of the user's own."""


class Called:
    """An async actor whose calls wait at a gate until it is opened, for good."""

    def __init__(self) -> None:
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.cancelled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def wait(self, gate: str) -> str:
        self.begun[gate].set()
        try:
            await self.gates[gate].wait()
        except asyncio.CancelledError:
            self.cancelled[gate].set()
            raise
        return gate

    async def open(self, gate: str) -> None:
        self.gates[gate].set()

    async def when_begun(self, gate: str) -> None:
        await self.begun[gate].wait()

    async def when_cancelled(self, gate: str) -> None:
        await self.cancelled[gate].wait()

    async def fail(self) -> None:
        raise UsersError("on purpose")


@pytest.fixture(scope="module")
def called(cluster: None) -> Iterator[Any]:
    made: Any = ray.remote(num_cpus=0)(Called)
    actor: Any = made.options(max_concurrency=20_000).remote()
    ray.get(actor.open.remote(""))
    yield actor
    ray.kill(actor)


@pytest.fixture
def gate() -> str:
    """A gate of the test's own."""
    return secrets.token_hex(4)


@on_ray
@pytest.mark.asyncio
async def test_a_call_is_awaited_chained_and_waited_for(called: Any, gate: str) -> None:
    work = AsyncChannelWork(called.wait.remote(gate))
    longer = work.then(lambda value: value + "!")
    waited = asyncio.create_task(asyncio.to_thread(work.wait, 20))
    await AsyncChannelWork(called.when_begun.remote(gate))
    assert not work.done()
    await AsyncChannelWork(called.open.remote(gate))
    assert await work == gate
    assert await longer == f"{gate}!"
    assert await waited == gate
    assert work.done()


@on_ray
@pytest.mark.asyncio
async def test_the_remote_error_arrives_as_what_it_is(called: Any) -> None:
    work = AsyncChannelWork(called.fail.remote())
    with pytest.raises(UsersError, match="on purpose"):
        await work
    with pytest.raises(RayTaskError):
        await work.then(lambda _: None)


@on_ray
@pytest.mark.asyncio
async def test_a_failure_that_nobody_awaits_is_reported_once(
    called: Any, complaints: list[Any]
) -> None:
    AsyncChannelWork(called.fail.remote())  # nobody keeps it (F41)
    await until(lambda: gc.collect() >= 0 and complaints)
    assert [isinstance(each["exception"], UsersError) for each in complaints] == [True]
    complaints.clear()


@on_ray
@pytest.mark.asyncio
async def test_cancelling_the_work_cancels_the_call(called: Any, gate: str) -> None:
    work = AsyncChannelWork(called.wait.remote(gate))
    await AsyncChannelWork(called.when_begun.remote(gate))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await work
    assert work.cancelled()
    assert not work.cancel()
    await AsyncChannelWork(called.when_cancelled.remote(gate))


@on_ray
@pytest.mark.asyncio
async def test_a_task_that_waits_for_its_turn_never_runs(
    called: Any, gate: str, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    ref = _touch.remote(str(mark), called.wait.remote(gate))
    AsyncChannelWork(ref).cancel()
    with pytest.raises(TaskCancelledError):
        await AsyncChannelWork(ref)
    await AsyncChannelWork(called.open.remote(gate))
    assert not mark.exists()


@ray.remote(num_cpus=0)
def _touch(path: str, _: object) -> None:
    Path(path).touch()


@on_ray
@pytest.mark.asyncio
async def test_that_somebody_else_cancels_is_an_error(called: Any, gate: str) -> None:
    ref = called.wait.remote(gate)
    work = AsyncChannelWork(ref)
    await AsyncChannelWork(called.when_begun.remote(gate))
    ray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        await work


@on_ray
@pytest.mark.asyncio
async def test_ten_thousand_pending_calls_cost_no_thread(called: Any, gate: str) -> None:
    ref = called.wait.remote(gate)
    first = AsyncChannelWork(ref)
    threads, native = threading.active_count(), len(os.listdir("/proc/self/task"))
    works = [AsyncChannelWork(ref) for _ in range(10_000)]
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/task")) <= native + 10  # Ray may start some of its own
    for work in works[::2]:
        work._ref = None  # one call for all: cancelling the handle is not to cancel that
        work.cancel()  # and then it completes (F37)
    await AsyncChannelWork(called.open.remote(gate))
    assert await first == gate
    assert set(await asyncio.gather(*works[1::2])) == {gate}


@on_ray
def test_a_loop_that_closes_first_is_no_fault(called: Any, gate: str, loop_name: str) -> None:
    complaints: list[Any] = []

    async def leave() -> Any:
        return [AsyncChannelWork(called.wait.remote(gate)) for _ in range(2)]

    with asyncio.Runner(loop_factory=lambda: loops.make(loop_name, complaints)) as runner:
        works = runner.run(leave())
    refs = [work._ref for work in works]
    ray.get(called.open.remote(gate))
    assert ray.get(refs) == [gate, gate]  # and the closed loop has been told (F38)
    assert not any(work.done() for work in works)
    assert complaints == []
    assert not works[0].cancel()


@on_ray
@pytest.mark.asyncio
async def test_the_death_of_an_actor_fails_its_calls(cluster: None) -> None:
    actor: Any = ray.remote(num_cpus=0)(Called).remote()
    work = AsyncChannelWork(actor.wait.remote("never"))
    await AsyncChannelWork(actor.when_begun.remote("never"))
    ray.kill(actor)
    with pytest.raises(RayActorError):
        await work


@on_ray
@pytest.mark.asyncio
async def test_only_references_will_do() -> None:
    with pytest.raises(UsageError, match=r"3 is no ObjectRef: give what the remote\(\)"):
        AsyncChannelWork(3)
    work = AsyncChannelWork(ray.put("an object that is no call's"))
    assert await work == "an object that is no call's"


@on_ray
@pytest.mark.asyncio
async def test_when_ray_is_shut_down_what_waits_fails(
    called: Any, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [AsyncChannelWork(called.wait.remote(gate)) for _ in range(2)]
    works[0].cancel()
    monkeypatch.setattr(module, "connection", lambda: None)  # test_handle.py does shut one down
    with pytest.raises(ClosedError, match=r"ray.shutdown\(\) was called .* after ray.init\(\)"):
        await works[1]
    assert asyncio.get_running_loop() not in module._watches


def test_without_ray_the_import_says_what_to_install() -> None:
    names = ("aiocomm.handles.channel", "aiocomm.channel", "aiocomm.channel.actor")
    (errors,) = run_workers(import_without, 1, "ray", *names)
    assert [name for name, _ in errors] == ["MissingPackageError"] * 3
    assert all("pip install 'aiocomm[ray]'" in text for _, text in errors)
    assert sum("channels need ray, which is not installed" in text for _, text in errors) == 2
