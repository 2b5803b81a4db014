"""``Worker`` and ``BlockingWorker``: how an actor gets its address, is found, and ends."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch

import aiocomm
from aiocomm import Options, WorkerAddress
from aiocomm.comm import Seat
from aiocomm.errors import AddressError, ClosedError, UsageError
from aiocomm.testing import MemoryStore
from aiocomm.worker import BlockingWorker, Worker, Workers, launch

from . import actors
from .absent import import_without
from .actors import Blocker, Talker, get
from .processes import run_workers

on_ray = pytest.mark.ray
each_loop = pytest.mark.asyncio

remote: Any = ray.remote  # its stubs know few of the options

# --- without Ray: what the mixins do to a class ---


def seat(address: str = "t:0", **more: Any) -> Seat:
    return Seat(WorkerAddress.parse(address), more.pop("board", MemoryStore()), **more)


class Bare(Worker):
    """Has no __init__."""


class Own(Worker):
    def __init__(self, model: str, *, size: int = 3) -> None:
        self.model = f"{model} of {size} for {self._comm_seat.address}"


class Inherits(Own):
    """Has that of its base."""


class Calls(Own):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("base", *args, **kwargs)


class Model:
    def __init__(self, model: str) -> None:
        self.model = model


class Mixed(Bare, Model):
    """Its __init__ is that of a class that knows nothing of actors."""


@dataclass
class Data(Worker):
    model: str


@dataclass(frozen=True)
class Frozen(Worker):
    model: str


@dataclass(slots=True)
class Slotted(Worker):
    model: str


class Named(Own):
    """Uses names that the mixins might have liked."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._seat = self._open(self._begin())

    def _begin(self) -> int:
        return 1

    def _open(self, number: int) -> int:
        return number


@pytest.mark.parametrize(
    ("cls", "args", "kwargs", "model"),
    [
        (Bare, (), {}, None),
        (Own, ("x",), {}, "x of 3 for t:0"),
        (Own, ("x",), {"size": 4}, "x of 4 for t:0"),
        (Inherits, ("x",), {}, "x of 3 for t:0"),
        (Calls, (), {"size": 5}, "base of 5 for t:0"),
        (Mixed, ("y",), {}, "y"),
        (Data, ("z",), {}, "z"),
        (Frozen, (), {"model": "z"}, "z"),
        (Slotted, ("z",), {}, "z"),
        (Named, ("x",), {}, "x of 3 for t:0"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
@each_loop
async def test_any_constructor_takes_a_seat_and_begins_to_be_found(
    cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any], model: str | None
) -> None:
    board = MemoryStore()
    made: Any = type("Class", (cls,), {})  # as Ray does
    worker = made(*args, **kwargs, aiocomm_seat=seat(board=board))
    assert getattr(worker, "model", None) == model
    await board.aopen()
    assert await board.get("worker/t:0", 10)  # nobody has used comm
    await board.aclose()
    await worker.comm.aclose()


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (Bare, ["self", "aiocomm_seat"]),
        (Own, ["self", "model", "size", "aiocomm_seat"]),
        (Calls, ["self", "args", "aiocomm_seat", "kwargs"]),
    ],
)
def test_signatures_stay_for_ray_to_check(cls: type[Worker], names: list[str]) -> None:
    assert list(inspect.signature(cls.__init__).parameters) == names
    assert cls.__init__.__name__ == "__init__"


def test_a_blocking_worker_with_a_coroutine_is_refused_where_it_is_written() -> None:
    async def step(self: Any) -> None: ...

    async def steps(self: Any) -> Any:
        yield

    for name, method in (("step", step), ("steps", steps)):
        with pytest.raises(UsageError, match=f"Mine .* method {name} .*subclass Worker"):
            type("Mine", (BlockingWorker,), {name: method})


@each_loop
async def test_class_attributes_are_used_where_the_seat_says_nothing() -> None:
    board, options = MemoryStore(), Options(window_messages=7)

    class Tuned(Worker):
        comm_board = board
        comm_options = options

    worker = Tuned(aiocomm_seat=Seat(WorkerAddress("t", 0)))  # type: ignore[call-arg]
    assert worker.comm._collective.options is options
    await worker.comm.ready()
    await worker.comm.aclose()
    other = Tuned(aiocomm_seat=seat(options=Options()))  # type: ignore[call-arg]
    assert other.comm._collective.options is not options
    await other.comm.aclose()


@pytest.mark.parametrize("cls", [Bare, Blocker])
@each_loop
async def test_without_an_address_the_first_use_says_how_to_get_one(cls: type[Worker]) -> None:
    worker = cls()
    for _ in range(2):
        with pytest.raises(
            AddressError, match=r"no address.*launch.*\.options\(name='trainer:0'\)"
        ):
            worker.comm


def test_without_a_loop_the_first_use_names_the_other_mixin() -> None:
    worker = Bare(aiocomm_seat=seat())  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="BlockingWorker"):
        worker.comm


def test_a_blocking_worker_is_found_as_well_and_closes() -> None:
    board = MemoryStore()
    first = Blocker(aiocomm_seat=seat("t:0", board=board))  # type: ignore[call-arg]
    second = Blocker("hi", aiocomm_seat=seat("t:1", board=board))  # type: ignore[call-arg]
    first.send(second.greeting, "t", 1)
    assert second.recv("t", 0) == "hi"
    for worker in (first, second):
        worker._comm_ready()
        worker.__ray_shutdown__()
        worker.__ray_shutdown__()
        with pytest.raises(ClosedError):
            worker.comm.send(1, "t", 2)


def test_without_ray_the_import_says_what_to_install() -> None:
    (((_, text),),) = run_workers(import_without, 1, "ray", "aiocomm.worker")
    assert "pip install 'aiocomm[ray]'" in text


# --- in actors ---


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[tuple[Workers, Workers]]:
    """Two async actors on uvloop, and one on asyncio."""
    kind = remote(num_cpus=0)(Talker)
    plain = {"runtime_env": {"env_vars": {"RAY_USE_UVLOOP": "0"}}}
    with (
        launch(kind, 2, group="uv", options=actors.OPTIONS) as uv,
        launch(kind, 1, group="plain", options=actors.OPTIONS, actor_options=plain) as asyncio_,
    ):
        yield uv, asyncio_


@on_ray("pair")
def test_each_actor_is_who_launch_says_on_the_loop_that_ray_gives(
    pair: tuple[Workers, Workers],
) -> None:
    found = get([actor.whoami.remote() for workers in pair for actor in workers])
    assert [each["address"] for each in found] == ["uv:0", "uv:1", "plain:0"]
    assert [each["loop"] for each in found] == ["uvloop", "uvloop", "asyncio"]
    assert len({each["pid"] for each in found}) == 3


@on_ray("pair")
def test_objects_go_between_actors_of_both_loops(pair: tuple[Workers, Workers]) -> None:
    (first, second), (plain,) = pair
    message = {"step": 1, "weights": torch.ones(3000)}
    for actor, name, rank in ((second, "uv", 1), (plain, "plain", 0)):
        echoed = actor.echo.remote("uv", 0)
        sent, came = first.send.remote(message, name, rank), first.recv.remote(name, rank)
        assert get(came)["weights"].equal(message["weights"])
        get([sent, echoed])


@on_ray("pair")
def test_many_methods_at_once_share_one_runtime_from_the_first_use_on(
    pair: tuple[Workers, Workers],
) -> None:
    (first, _), _ = pair
    fresh = remote(num_cpus=0)(Talker)
    with launch(fresh, 1, group="fresh", options=actors.OPTIONS) as workers:
        received = [workers[0].recv.remote("uv", 0) for _ in range(50)]
        sent = [first.send.remote(number, "fresh", 0) for number in range(50)]
        assert sorted(get(received)) == list(range(50))
        get(sent)
        assert get(workers[0].call.remote(actors.held))["groups"] == 1


@on_ray("pair")
def test_an_actor_that_was_never_called_is_found(pair: tuple[Workers, Workers]) -> None:
    (first, _), _ = pair
    quiet = remote(num_cpus=0)(Talker).options(name="quiet:3").remote()
    assert get(first.send.remote("hello", "quiet", 3)) is None
    assert get(quiet.recv.remote("uv", 0)) == "hello"
    ray.kill(quiet)


def _refused(worker: Talker) -> list[str]:
    texts = []
    for call in (
        lambda: worker.comm.send(lambda: None, "uv", 1),
        lambda: worker.comm.recv("uv", 0),
        lambda: worker.comm.send(1, "", 0),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        texts.append(type(raised.value).__name__)
    return texts


@on_ray("pair")
def test_what_cannot_work_is_refused_at_the_call(pair: tuple[Workers, Workers]) -> None:
    assert get(pair[0][0].call.remote(_refused)) == ["PayloadError", "AddressError", "AddressError"]


class Grouped(Worker):
    async def home(self) -> str:
        return str(self.comm.address)

    @ray.method(concurrency_group="io")  # type: ignore[misc]
    async def elsewhere(self) -> str:
        try:
            self.comm.recv("uv", 0)
        except aiocomm.errors.WrongLoopError as error:
            return str(error)
        return "taken"


@on_ray("pair")
def test_other_concurrency_groups_have_loops_of_their_own(pair: tuple[Workers, Workers]) -> None:
    kind = remote(num_cpus=0, concurrency_groups={"io": 2})(Grouped)
    with launch(kind, 1, group="grouped") as workers:
        assert get(workers[0].home.remote()) == "grouped:0"
        assert "grouped:0" in get(workers[0].elsewhere.remote())


def _shout(worker: Blocker, number: int) -> Any:
    worker.comm.send(number, "uv", 0)
    with pytest.raises(aiocomm.errors.AddressError):
        worker.comm.recv("", 0)
    return worker.comm.recv("uv", 0)


@on_ray("pair")
@pytest.mark.parametrize("threads", [1, 4])
def test_actors_without_a_loop_block_and_have_the_same_calls(
    pair: tuple[Workers, Workers], threads: int
) -> None:
    (first, _), _ = pair
    kind = remote(num_cpus=0, max_concurrency=threads)(Blocker)
    with launch(kind, 1, "hi", group="blocking", options=actors.OPTIONS) as workers:
        echoed = first.echo.remote("blocking", 0, 8)
        shouted = [workers[0].call.remote(_shout, number) for number in range(8)]
        assert sorted(get(shouted)) == list(range(8))
        get(echoed)


# --- ends ---


async def _part(worker: Talker, what: str) -> Any:
    await worker.comm.send("last words", "uv", 0)
    work = worker.comm.recv("uv", 0)
    if what == "aclose":
        await worker.comm.aclose()
        with pytest.raises(ClosedError):
            await work
        with pytest.raises(ClosedError):
            worker.comm.send(1, "uv", 0)


@on_ray("pair")
@pytest.mark.parametrize(
    ("what", "error"),
    [("aclose", "PeerClosedError"), ("scope", "PeerClosedError"), ("kill", "PeerLostError")],
)
def test_peers_see_a_goodbye_when_an_actor_ends_well(
    pair: tuple[Workers, Workers], what: str, error: str
) -> None:
    (first, _), _ = pair
    leaver = remote(num_cpus=0)(Talker).options(name=f"leaver:{len(what)}").remote()
    get(leaver.call.remote(_part, what))
    assert get(first.recv.remote("leaver", len(what))) == "last words"
    lost = first.recv.remote("leaver", len(what))
    if what == "kill":
        ray.kill(leaver)
    elif what == "scope":
        del leaver
        gc.collect()
    if what == "aclose":  # the next call already looks for its next life
        ray.cancel(lost)
        ray.kill(leaver)
        return
    assert get(lost)[0] == error


@on_ray("pair")
def test_an_actor_whose_loop_is_gone_still_ends(pair: tuple[Workers, Workers]) -> None:
    worker = Bare(aiocomm_seat=None)  # type: ignore[call-arg]
    worker.__ray_shutdown__()  # it never communicated

    async def use() -> Bare:
        used = Bare(aiocomm_seat=seat())  # type: ignore[call-arg]
        await used._comm_ready()
        await used._comm_close()
        return used

    asyncio.run(use()).__ray_shutdown__()
