"""The Ray board as its users call it: arguments, opening, pickling."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import ray

import aiocomm
from aiocomm.errors import RendezvousTimeout, UsageError, WouldBlockError
from aiocomm.rendezvous.ray import RayBoard

from .boards import WAIT, board_threads, run_python

on_ray = pytest.mark.ray("kept_board")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"namespace": ""}, "namespace"),
        ({"timeout": 0}, "time-out"),
        ({"timeout": float("inf")}, "time-out"),
    ],
)
def test_an_unusable_argument_is_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RayBoard(**arguments)


WITHOUT_INIT = """
import asyncio, aiocomm
from aiocomm.rendezvous.ray import RayBoard
import ray
board = RayBoard()
try:
    asyncio.run(board.aopen())
except aiocomm.errors.UsageError as error:
    print(error)
assert not ray.is_initialized()
"""


def test_without_init_it_says_so_and_starts_no_ray() -> None:
    assert "ray.init()" in run_python(WITHOUT_INIT)


@on_ray
@pytest.mark.asyncio
async def test_nothing_happens_at_construction() -> None:
    threads = board_threads()
    RayBoard("never opened")
    assert board_threads() == threads
    with pytest.raises(ValueError):
        ray.get_actor("never opened")


@on_ray
@pytest.mark.asyncio
async def test_a_board_travels_as_its_name() -> None:
    board = RayBoard("b", namespace="n", timeout=5)
    again = pickle.loads(pickle.dumps(board))
    assert (again.name, again.namespace, repr(again)) == ("b", "n", "<RayBoard n/b closed>")
    async with RayBoard(timeout=WAIT) as opened:
        # A reader in a job with another namespace shall find the same board.
        assert pickle.loads(pickle.dumps(opened)).namespace == opened.namespace == "tests"


@on_ray
def test_plain_code_may_open_it(kept_board: RayBoard) -> None:
    with RayBoard(timeout=WAIT) as board:
        asyncio.run(board.set("plain", b"v"))
        assert asyncio.run(kept_board.get("plain", WAIT)) == b"v"
        asyncio.run(board.delete("plain"))


@on_ray
@pytest.mark.asyncio
async def test_plain_calls_are_refused_on_a_loop() -> None:
    with pytest.raises(WouldBlockError, match="aopen"):
        RayBoard().open()


@pytest.mark.ray
@pytest.mark.asyncio
async def test_equal_names_in_two_namespaces_are_two_boards() -> None:
    async with (
        RayBoard("twice", namespace="one", timeout=WAIT) as one,
        RayBoard("twice", namespace="two", timeout=WAIT) as two,
    ):
        await one.set("k", b"1")
        await two.set("k", b"2")
        assert (await one.get("k", WAIT), await two.get("k", WAIT)) == (b"1", b"2")
        with pytest.raises(RendezvousTimeout, match="two"):
            await two.get("missing", 0)


@on_ray
@pytest.mark.asyncio
async def test_workers_meet_on_it() -> None:
    async with (
        aiocomm.open("a:0", store=RayBoard(timeout=WAIT)) as one,
        aiocomm.open("a:1", store=RayBoard(timeout=WAIT)) as other,
    ):
        groups = [each.create_collective_group(["a:0", "a:1"]) for each in (one, other)]
        sending = groups[0].send({"x": 1})
        assert await groups[1].recv() == {"x": 1}
        await sending


@ray.remote(num_cpus=0)
class Async:
    """A worker with a loop."""

    async def talk(self) -> int:
        async with aiocomm.open("async:0", store=RayBoard(timeout=WAIT)) as collective:
            group = collective.create_collective_group(["async:0", "plain:0"])
            await group.send(1)
            return int(await group.recv()) + 1


@ray.remote(num_cpus=0)
class Plain:
    """A worker without one."""

    def talk(self) -> int:
        with aiocomm.blocking.open("plain:0", store=RayBoard(timeout=WAIT)) as collective:
            group = collective.create_collective_group(["async:0", "plain:0"])
            number = int(group.recv())
            group.send(number + 1)
            return number


@on_ray
def test_actors_with_and_without_a_loop_meet() -> None:
    one: Any = Async.remote()
    other: Any = Plain.remote()
    assert ray.get([one.talk.remote(), other.talk.remote()]) == [3, 1]
