"""``launch`` and ``Workers``: what is made together is there and ends together, or not at all."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorHandleNotFoundError
from ray.util import placement_group, placement_group_table, remove_placement_group

from aiocomm import Options, WorkerAddress
from aiocomm.errors import AddressError, RendezvousTimeout, UsageError, WouldBlockError
from aiocomm.rendezvous.ray import RayBoard
from aiocomm.worker import Worker, Workers, launch

from .actors import OPTIONS, WAIT, Talker, get

LOOPS = ["asyncio"]  # each test starts processes; what is awaited is the same on both

on_ray = pytest.mark.ray("kept_board")
each_loop = pytest.mark.asyncio

Actor: Any = ray.remote(num_cpus=0)(Talker)
SMALL = {"num_cpus": 0.1}


@dataclass
class _Picky(Worker):
    start: str
    ok: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not self.ok or (self.start == "all but the second" and self.comm.address.rank == 1):
            raise ValueError("no such model")

    async def started(self) -> str:
        return f"{self.start} {self.comm.address.rank}"


Picky: Any = ray.remote(num_cpus=0)(_Picky)


@pytest.fixture(scope="module")
def kept_board(cluster: None) -> Iterator[None]:
    """The board's actor takes half a second to start: one serves all."""
    with RayBoard(timeout=WAIT):
        yield


def alive() -> set[str]:
    """Names of the actors that these tests made and that live; ours, like boards, are others'."""
    names = ray.util.list_named_actors()
    return {name for name in names if not name.startswith("aiocomm")}


def places() -> list[str]:
    """The placement groups that are not removed."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return [key for key, each in table.items() if each["state"] != "REMOVED"]


@on_ray
def test_they_are_by_rank_and_get_what_their_constructor_asks_for() -> None:
    with launch(Picky, 2, "it", group="picky", kwargs={"ok": True}, options=OPTIONS) as workers:
        assert len(workers) == 2
        assert workers.addresses == [WorkerAddress("picky", 0), WorkerAddress("picky", 1)]
        assert repr(workers) == "<Workers picky: 2 actors>"
        assert get([each.started.remote() for each in workers]) == ["it 0", "it 1"]
        assert get(workers[-1].started.remote()) == "it 1"
        assert [*workers[:1]] == [workers[0]]
        assert alive() == {"picky:0", "picky:1"}
    assert alive() == set()
    workers.close()  # again
    gone(workers)


@on_ray
@each_loop
async def test_on_a_loop_they_are_awaited() -> None:
    async with launch(Actor, 1, group="awaited", options=OPTIONS) as workers:
        assert (await workers[0].whoami.remote())["address"] == "awaited:0"
        assert await workers.ready(WAIT) is workers
        for call, name in ((workers.wait, "ready"), (workers.close, "aclose")):
            with pytest.raises(WouldBlockError, match=rf"{name}\(\)"):
                call()
    assert alive() == set()
    await workers.aclose()


@on_ray
@each_loop
async def test_a_closing_that_is_cancelled_kills_them() -> None:
    workers = await launch(Actor, 1, group="hurried", options=OPTIONS).ready()
    closing = asyncio.create_task(workers.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.to_thread(gone, workers)
    await workers.aclose()


@on_ray
@pytest.mark.parametrize("way", ["with", "async with"])
def test_leaving_by_an_exception_kills_them(way: str) -> None:
    workers = launch(Actor, 1, group="left", options=OPTIONS)

    async def leave() -> None:
        async with workers:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        if way == "async with":
            asyncio.run(leave())
        with workers:
            raise ZeroDivisionError
    gone(workers)


@on_ray
@each_loop
async def test_a_block_whose_beginning_is_cancelled_leaves_nothing() -> None:
    workers = _without_room()

    async def enter() -> None:
        async with workers:
            pass

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert places() == []
    await asyncio.to_thread(gone, workers)


@on_ray
def test_a_block_whose_beginning_is_interrupted_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    workers = _without_room()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ray, "wait", interrupted)
        with workers:
            pass
    assert places() == []
    gone(workers)


def _without_room() -> Workers:
    return launch(Actor, 2, group="apart", placement="strict_spread", actor_options=SMALL)


@on_ray
def test_handles_of_a_ray_that_was_shut_down_do_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, kill = launch(Actor, 2, group="mixed", options=OPTIONS), ray.kill

    def strict(handle: Any) -> None:
        kill(handle)
        if handle is workers[0]:
            raise ActorHandleNotFoundError("ActorHandle objects are not valid across Ray sessions")

    monkeypatch.setattr(ray, "kill", strict)
    workers.kill()
    gone(workers)


@on_ray
@pytest.mark.parametrize("where", ["launch", "class"])
def test_closing_gives_actors_as_long_as_they_may_take(where: str) -> None:
    longer = Options(close_timeout=60)

    class Patient(Talker):
        comm_options = longer

    if where == "launch":
        workers = launch(Actor, 1, group="patient", options=longer)
    else:
        workers = launch(ray.remote(num_cpus=0)(Patient), 1, group="patient")
    workers.kill()
    assert workers._close_timeout > 60


@on_ray
@pytest.mark.parametrize("way", ["wait", "ready"])
def test_the_error_of_a_constructor_arrives_and_undoes_all(way: str) -> None:
    workers = launch(
        Picky, 2, "all but the second", group="picky", placement="pack", actor_options=SMALL
    )
    assert len(places()) == 1
    with pytest.raises(ActorDiedError, match="ValueError: no such model"):
        if way == "wait":
            workers.wait()
        else:
            asyncio.run(workers.ready())
    gone(workers)
    assert places() == []


def gone(workers: Any) -> None:
    """Every actor is dead, or will never be."""
    for worker in workers:
        with pytest.raises(ActorDiedError):
            while True:  # one that is being killed may answer for a moment
                get(worker._comm_ready.remote())


@on_ray
@pytest.mark.parametrize("way", ["wait", "ready"])
def test_no_room_is_a_time_out_that_names_who_is_missing(way: str) -> None:
    workers = launch(Actor, 2, group="wide", actor_options={"num_cpus": 3}, options=OPTIONS)
    missing = r"^wide:0, wide:1 did not start within 0.1 s: .*ray status"
    with pytest.raises(RendezvousTimeout, match=missing):
        if way == "wait":
            workers.wait(0.1)
        else:
            asyncio.run(workers.ready(0.1))
    gone(workers)


@on_ray
def test_a_name_that_is_taken_undoes_what_was_made() -> None:
    holder = Actor.options(name="taken:1").remote()
    with pytest.raises(ValueError, match="taken:1"):
        launch(Actor, 2, group="taken", placement="spread", actor_options=SMALL)
    assert places() == []
    assert alive() == {"taken:1"}
    ray.kill(holder)
    launch(Actor, 2, group="taken").kill()  # the name came free


USAGE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no actor class": (lambda: launch(Talker, 1, group="g"), UsageError, "write @ray.remote"),
    "no worker": (
        lambda: launch(ray.remote(type("Other", (), {})), 1, group="g"),
        UsageError,
        "subclass of aiocomm.worker.Worker",
    ),
    "none": (lambda: launch(Actor, 0, group="g"), UsageError, "0 actors"),
    "no number": (lambda: launch(Actor, True, group="g"), UsageError, "True actors"),
    "no group": (lambda: launch(Actor, 1, group=" "), AddressError, "worker name"),
    "a long name": (
        lambda: launch(Actor, 1, group="x" * 3000),
        AddressError,
        r"2048 fit: give shorter ones than 'x{40}'",
    ),
    "no name": (lambda: launch(Actor, 1, group="g:0"), AddressError, "give name and rank apart"),
    "a name": (
        lambda: launch(Actor, 1, group="g", actor_options={"name": "x"}),
        UsageError,
        "actor_options has 'name'",
    ),
    "no option": (
        lambda: launch(Actor, 1, group="g", actor_options={"cpus": 1}),
        ValueError,
        "Invalid option keyword cpus",
    ),
    "no placement": (
        lambda: launch(Actor, 1, group="g", placement="near"),
        UsageError,
        "one of pack, spread",
    ),
    "no settings": (
        lambda: launch(Actor, 1, group="g", options={"window_bytes": 1}),  # type: ignore[arg-type]
        UsageError,
        "options {.*aiocomm.Options",
    ),
    "no board": (
        lambda: launch(Actor, 1, group="g", board="aiocomm"),  # type: ignore[arg-type]
        UsageError,
        "board 'aiocomm' .*aiocomm.Store",
    ),
    "nothing to place": (
        lambda: launch(Actor, 1, group="g", placement="pack"),
        UsageError,
        "ask for nothing",
    ),
    "an argument too many": (lambda: launch(Actor, 1, 5, group="g"), TypeError, "too many"),
    "an argument too few": (lambda: launch(Picky, 1, group="g"), TypeError, "'start'"),
    "a wrong keyword": (
        lambda: launch(Picky, 1, "x", group="g", kwargs={"no": 1}),
        TypeError,
        "'no'",
    ),
}


@on_ray
@pytest.mark.parametrize("case", USAGE)
def test_what_cannot_be_launched_is_refused_at_once(case: str) -> None:
    call, kind, text = USAGE[case]
    with pytest.raises(kind, match=text):
        call()
    assert alive() == set()


def _place(worker: Talker) -> tuple[Any, int]:
    place = ray.util.get_current_placement_group()
    return (place.id.hex() if place else None), len(place.bundle_specs) if place else 0


@on_ray
def test_they_are_placed_and_the_placement_goes_with_them() -> None:
    with launch(
        Actor, 1, group="placed", placement="pack", actor_options=SMALL, options=OPTIONS
    ) as workers:
        assert get(workers[0].call.remote(_place)) == (places()[0], 1)
    assert places() == []


@on_ray
def test_a_placement_group_of_ones_own_stays() -> None:
    own = placement_group([{"CPU": 0.1}] * 2, strategy="PACK")
    try:
        with pytest.raises(UsageError, match="has 2 bundles for 3 actors"):
            launch(Actor, 3, group="own", placement=own, actor_options=SMALL)
        with launch(
            Actor, 1, group="own", placement=own, actor_options=SMALL, options=OPTIONS
        ) as workers:
            assert get(workers[0].call.remote(_place)) == (own.id.hex(), 2)
        assert places() == [own.id.hex()]
    finally:
        remove_placement_group(own)


@on_ray
def test_sends_leave_before_their_actor_ends() -> None:
    with (
        launch(Actor, 1, group="stays", options=OPTIONS) as stays,
        launch(Actor, 1, group="leaves", options=OPTIONS) as leaves,
    ):
        get(leaves[0].call.remote(_send_later, 50))
        leaves.close()
        assert get(stays[0].call.remote(_recv, 50)) == list(range(50))


def _send_later(worker: Talker, count: int) -> None:
    for number in range(count):
        worker.comm.send(number, "stays", 0)


async def _recv(worker: Talker, count: int) -> list[int]:
    return [await worker.comm.recv("leaves", 0) for _ in range(count)]


@on_ray
def test_actors_without_handles_are_ray_s_to_end() -> None:
    workers = launch(Actor, 1, group="dropped", options=OPTIONS).wait()
    del workers
    gc.collect()  # the fixture looks whether the actor ends


@pytest.mark.ray
def test_nothing_is_left_the_board_included() -> None:
    with (
        launch(Actor, 1, group="first", options=OPTIONS) as first,
        launch(Actor, 1, group="second", options=OPTIONS) as second,
    ):
        sent = first[0].send.remote("x", "second", 0)
        assert get(second[0].recv.remote("first", 0)) == "x"
        get(sent)
