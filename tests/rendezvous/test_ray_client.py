"""How a Ray board outlives its actor: kills, owners that die, many who make one at once."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
from typing import Any

import pytest
import ray

from aiocomm.errors import RendezvousError
from aiocomm.rendezvous import ray_client
from aiocomm.rendezvous.ray import RayBoard

from ..rounds import rounds
from .boards import WAIT

pytestmark = pytest.mark.ray
LOOPS = ["uvloop"]  # each test starts processes; what is awaited is the same on both


@ray.remote(num_cpus=0)
class Owner:
    """A process that makes a board."""

    async def open(self, name: str, key: str) -> int:
        self.board = RayBoard(name, timeout=WAIT)
        await self.board.aopen()
        await self.board.set(key, b"theirs")
        return os.getpid()


@pytest.mark.asyncio
async def test_no_ray_is_started_where_it_was_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def shut_down(*_: object, **__: object) -> None:
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        raise ValueError("no such actor")

    site = ray_client.RaySite("late", None, WAIT)
    client = ray_client.RayClient(site, asyncio.get_running_loop(), RendezvousError)
    client._life = ray_client.connection()  # as when it was opened
    monkeypatch.setattr(ray, "get_actor", shut_down)
    with pytest.raises(RendezvousError, match=r"ray\.shutdown"):
        client._find_or_make("tests")


@pytest.mark.asyncio
async def test_an_actor_of_that_name_that_is_no_board_is_named() -> None:
    other: Any = Owner.options(name="somebody").remote()  # type: ignore[attr-defined]
    board = RayBoard("somebody", timeout=WAIT)
    with pytest.raises(RendezvousError, match=r"'somebody' in namespace 'tests' is no board"):
        await board.aopen()
    ray.kill(other)


def kill(name: str) -> None:
    ray.kill(ray.get_actor(name))


@pytest.mark.asyncio
async def test_the_death_of_the_actor_costs_nothing() -> None:
    async with RayBoard("killed", timeout=WAIT) as one, RayBoard("killed", timeout=WAIT) as other:
        await one.set("one", b"1")
        await other.set("other", b"2")
        waiting = asyncio.create_task(other.get("later", WAIT))
        await asyncio.sleep(0)
        for round_ in range(3):
            kill("killed")
            assert await other.get("one", WAIT) == b"1"
            assert await one.get("other", WAIT) == b"2"
            await one.set("round", b"%d" % round_)
            assert await other.get("round", WAIT) == b"%d" % round_
        await one.set("later", b"3")
        assert await waiting == b"3"


@pytest.mark.asyncio
async def test_the_death_of_the_owner_costs_what_it_wrote() -> None:
    owner: Any = Owner.remote()
    pid = await asyncio.to_thread(ray.get, owner.open.remote("owned", "theirs"))
    async with RayBoard("owned", timeout=WAIT) as board:
        await board.set("mine", b"1")
        assert await board.get("theirs", WAIT) == b"theirs"
        first = ray.get_actor("owned")
        os.kill(pid, signal.SIGKILL)
        # A call is the only way to see the death of an actor.
        while True:
            try:
                await asyncio.to_thread(ray.get, first.look.remote("mine"))
            except ray.exceptions.RayActorError:
                break
        assert await board.get("mine", WAIT) == b"1"
        waiting = asyncio.create_task(board.get("theirs", WAIT))
        await board.delete("never there")
        assert not waiting.done()
        await board.set("theirs", b"mine now")
        assert await waiting == b"mine now"
        del owner


@pytest.mark.asyncio
async def test_an_owner_that_closes_leaves_the_board_to_the_others() -> None:
    async with RayBoard("kept", timeout=WAIT) as owner:
        await owner.set("k", b"v")
        actor = ray.get_actor("kept")
        async with RayBoard("kept", timeout=WAIT) as other:
            await owner.aclose()
            assert await other.get("k", WAIT) == b"v"
            assert ray.get_actor("kept") == actor
    with pytest.raises(ValueError):
        ray.get_actor("kept")
    assert ("tests", "kept") not in ray_client._kept


@pytest.mark.asyncio
async def test_what_another_has_overwritten_is_not_written_again() -> None:
    async with RayBoard("over", timeout=WAIT) as one, RayBoard("over", timeout=WAIT) as other:
        for board in (one, other):
            await board.set("k", b"first" if board is one else b"second")
            await board.set("l", b"")
        await one.delete("l")
        # News come by one call after another: what is there now came after those.
        await one.set("m", b"")
        for board in (one, other):
            assert await board.get("m", WAIT) == b""
        kill("over")
        assert await one.get("k", WAIT) == b"second"
        await other.delete("never there")  # it has joined, with what it has to write
        assert await one.delete("l") is False


async def closed(*boards: RayBoard) -> None:
    await asyncio.gather(*(board.aclose() for board in boards))


async def _race(count: int) -> None:
    boards = [RayBoard("raced", timeout=WAIT) for _ in range(4)]
    await asyncio.gather(*(board.aopen() for board in boards))
    seen = set()
    for number in range(count):
        seen.add(ray.get_actor("raced"))
        kill("raced")  # and now four look it up or make it
        await asyncio.gather(*(board.set(f"{number} {i}", b"") for i, board in enumerate(boards)))
        for i in range(4):  # one actor: what one writes the others see
            assert await boards[i].get(f"{number} {(i + 1) % 4}", WAIT) == b""
    assert len(seen) == count
    await closed(*boards)


def test_many_make_one_at_once_after_each_kill() -> None:  # F31
    asyncio.run(_race(rounds(50)), debug=True)


@pytest.mark.asyncio
async def test_a_kill_while_it_is_opened() -> None:
    async def killing() -> None:
        with contextlib.suppress(ValueError):  # nobody has made one yet
            await asyncio.to_thread(kill, "raced")

    for number in range(5):
        boards = [RayBoard("raced", timeout=WAIT) for _ in range(4)]
        await asyncio.gather(*(board.aopen() for board in boards[: number % 3]))
        await asyncio.gather(killing(), *(board.aopen() for board in boards[number % 3 :]))
        await boards[0].set("k", b"")
        for board in boards:
            assert await board.get("k", WAIT) == b""
        await closed(*boards)


@pytest.mark.asyncio
async def test_a_thousand_gets_do_not_stop_a_set() -> None:  # F33
    async with RayBoard("full", timeout=WAIT) as one, RayBoard("full", timeout=WAIT) as other:
        waiting = [asyncio.create_task(one.get(f"k{i}", WAIT)) for i in range(1001)]
        await other.set("k7", b"v")
        assert await waiting[7] == b"v"
        await other.delete("k7")
        assert sum(task.done() for task in waiting) == 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


def test_the_actor_has_not_imported_torch() -> None:
    with RayBoard("slim", timeout=WAIT):
        actor: Any = ray.get_actor("slim")
        assert ray.get(actor.__ray_call__.remote(lambda self: "torch" in sys.modules)) is False


def shorten(self: Any) -> None:
    """Inside the actor: look for the dead more often."""

    def begin_again() -> None:
        self._reaper.cancel()
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    # Ray wraps methods.
    inspect.unwrap(type(self)._reap).__globals__.update(SLICE=0.1)
    self._reaper.get_loop().call_soon_threadsafe(begin_again)


async def _all_die() -> None:
    async with RayBoard("reaped", timeout=WAIT):
        board: Any = ray.get_actor("reaped")
        other: Any = Owner.remote()
        pid = await other.open.remote("reaped", "theirs")
    assert ray.get_actor("reaped") == board  # the other uses it
    os.kill(pid, signal.SIGKILL)
    await board.__ray_call__.remote(shorten)  # now that there is none left that could be slow
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # a call is the only way to see the death of an actor
            await board.look.remote("theirs")
    with pytest.raises(ValueError):
        ray.get_actor("reaped")


def test_it_ends_when_its_last_clients_died_without_a_word() -> None:
    asyncio.run(_all_die(), debug=True)
