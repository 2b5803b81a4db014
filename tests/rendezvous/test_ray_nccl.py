"""NCCL communicators in Ray: every way in which ranks come, do not come, and come again."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import traceback
import types
from typing import Any

import pytest
import ray

from aiocomm.errors import (
    RendezvousError,
    RendezvousTimeout,
    UsageError,
    WouldBlockError,
)
from aiocomm.rendezvous.ray import (
    NCCLIDStore,
    RayBoard,
    async_create_nccl_communicator_in_ray,
    create_nccl_communicator_in_ray,
    get_nccl_id_store_by_name,
)
from aiocomm.rendezvous.ray_nccl import BOARD, NAMESPACE

from ..rounds import rounds
from .boards import WAIT, eventually
from .communicators import Communicator, Loose, Strict, waiting_on_board

pytestmark = pytest.mark.ray
LOOPS = ["uvloop"]  # each test starts processes; what is awaited is the same on both


def start(
    rank: int, size: int, group: str, backend: Any, *, timeout: float = WAIT
) -> asyncio.Task[Communicator]:
    return asyncio.create_task(
        async_create_nccl_communicator_in_ray(rank, size, group, 1, timeout, backend=backend)
    )


async def store_of(group: str) -> Any:
    return await asyncio.to_thread(get_nccl_id_store_by_name, group)


async def met(tasks: list[asyncio.Task[Communicator]]) -> list[Communicator]:
    """The communicators by rank, which must be those of one group."""
    made = sorted(await asyncio.gather(*tasks), key=lambda each: each.rank)
    assert [each.rank for each in made] == list(range(len(tasks)))
    assert {(each.ndev, each.nccl_id) for each in made} == {(len(tasks), made[0].nccl_id)}
    return made


async def _form(number: int) -> bytes:
    backend, chance = Strict(), random.Random(number)
    ranks = list(range(3))
    chance.shuffle(ranks)
    tasks = []
    for rank in ranks:
        tasks.append(start(rank, 3, f"random {number}", backend))
        for _ in range(chance.choice((0, 1, 10))):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            await asyncio.to_thread(ray.util.list_named_actors)  # some milliseconds
    made = await met(tasks)
    assert await store_of(f"random {number}") is None
    return made[0].nccl_id


async def _form_many(count: int) -> None:
    numbers = iter(range(count))

    async def some() -> list[bytes]:
        return [await _form(number) for number in numbers]

    async with RayBoard(BOARD, namespace=NAMESPACE, timeout=WAIT):  # so that it is made once
        ids = await asyncio.gather(*(some() for _ in range(4)))
    assert len({each for some in ids for each in some}) == count


def test_ranks_in_any_order_time_and_again() -> None:
    asyncio.run(_form_many(rounds(200)), debug=True)


@pytest.mark.asyncio
async def test_rank_0_comes_late() -> None:
    backend = Strict()
    early = [start(rank, 3, "late", backend) for rank in (2, 1)]
    await waiting_on_board(2)
    assert await store_of("late") is None
    await met([*early, start(0, 3, "late", backend)])
    assert await store_of("late") is None


@pytest.mark.asyncio
async def test_rank_0_never_comes() -> None:
    with pytest.raises(RendezvousTimeout, match=r"rank 1 of 2 of NCCL group 'never'.*rank 0") as it:
        await start(1, 2, "never", Loose(), timeout=0.3)
    assert it.value.group == "never"
    # The next call works.
    backend = Strict()
    await met([start(rank, 2, "never", backend) for rank in range(2)])


@ray.remote(num_cpus=0)
class Rank0:
    """Another process that is rank 0."""

    async def create(self, size: int, group: str) -> bytes:
        made = await async_create_nccl_communicator_in_ray(0, size, group, backend=Loose())
        return bytes(made.nccl_id)


async def _rank_0_dies() -> None:
    backend = Loose()
    actor: Any = Rank0.remote()
    dead = await actor.create.remote(3, "dead")
    assert (await start(1, 3, "dead", backend)).nccl_id == dead
    store = await store_of("dead")
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):  # Ray ends it after its owner, some time on
        await store.wait_complete.remote()
    with pytest.raises(RendezvousTimeout, match=r"rank 2 .* rank 0"):
        await start(2, 3, "dead", backend, timeout=0.3)
    late = start(2, 3, "dead", backend)
    await waiting_on_board(1)
    made = await met([late, *(start(rank, 3, "dead", backend) for rank in (0, 1))])
    assert made[0].nccl_id != dead
    assert await store_of("dead") is None


def test_the_id_of_a_dead_rank_0_is_not_taken() -> None:
    asyncio.run(_rank_0_dies(), debug=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("namespace", ["tests", "elsewhere"])
async def test_the_store_of_an_earlier_run_is_passed_over(namespace: str) -> None:
    options = NCCLIDStore.options(name="stale", namespace=namespace, lifetime="detached")
    stale: Any = options.remote(b"stale")
    backend = Strict()
    early = start(1, 2, "stale", backend)
    await waiting_on_board(1)
    made = await met([start(0, 2, "stale", backend), early])
    assert made[0].nccl_id != b"stale"
    if namespace == "tests":
        assert await store_of("stale") is None
    else:
        assert await stale.get.remote() == b"stale"  # it is somebody else's
        with pytest.raises(RendezvousTimeout, match="'elsewhere'"):
            await start(1, 2, "stale", backend, timeout=0.3)
        ray.kill(stale)


@pytest.mark.asyncio
async def test_a_rank_does_not_take_the_id_that_it_has_had_already() -> None:
    backend = Loose()
    first = [await start(rank, 3, "again", backend) for rank in (0, 1)]  # rank 2 never came
    early = start(1, 3, "again", backend)
    await waiting_on_board(1)
    second = [await start(0, 3, "again", backend), await early, await start(2, 3, "again", backend)]
    assert {each.nccl_id for each in second} == {second[0].nccl_id}
    assert second[0].nccl_id != first[0].nccl_id
    assert await store_of("again") is None


async def _rank_0_is_replaced() -> None:
    actor: Any = Rank0.remote()
    void = await actor.create.remote(2, "replaced")  # the earlier run
    backend = Strict()
    early = start(1, 2, "replaced", backend)
    await asyncio.to_thread(backend.entered.acquire)  # as NCCL would wait, for ever
    assert list(backend.barriers) == [void]
    made = await met([start(0, 2, "replaced", backend), early])
    assert made[0].nccl_id != void
    backend.barriers[void].abort()


def test_a_rank_leaves_the_group_of_a_rank_0_that_is_replaced() -> None:
    asyncio.run(_rank_0_is_replaced(), debug=True)


@pytest.mark.asyncio
async def test_a_rank_0_whose_store_is_killed_says_so() -> None:
    backend = Strict()
    task = start(0, 2, "killed", backend)
    await asyncio.to_thread(backend.entered.acquire)
    ray.kill(await store_of("killed"))
    with pytest.raises(RendezvousError, match="ended before all ranks had come"):
        await task
    next(iter(backend.barriers.values())).abort()


@pytest.mark.asyncio
async def test_two_rank_0_in_two_namespaces_are_an_error() -> None:
    backend = Loose()
    other: Any = NCCLIDStore.options(name="double", namespace="other").remote(b"other", 2)
    with pytest.raises(RendezvousError, match=r"'other' and 'tests'") as caught:
        await start(0, 2, "double", backend)
    assert not isinstance(caught.value, RendezvousTimeout)
    mine: Any = NCCLIDStore.options(name="double").remote(b"mine", 2)
    with pytest.raises(RendezvousError, match=r"'other' and 'tests'"):
        await start(1, 2, "double", backend)
    ray.kill(other)
    assert (await start(1, 2, "double", backend)).nccl_id == b"mine"
    ray.kill(mine)


@pytest.mark.asyncio
async def test_two_groups_at_once() -> None:
    backend = Strict()
    one = [start(rank, 2, "one", backend) for rank in (1, 0)]
    two = [start(rank, 2, "two", backend) for rank in (0, 1)]
    assert (await met(one))[0].nccl_id != (await met(two))[0].nccl_id


@pytest.mark.asyncio
async def test_a_late_reader_is_served_after_all_others_have_gone() -> None:  # F29
    backend = Loose()
    early = [await start(rank, 3, "reader", backend) for rank in (0, 1)]
    store = await store_of("reader")
    assert await store.get.remote() == early[0].nccl_id
    assert (await start(2, 3, "reader", backend)).nccl_id == early[0].nccl_id
    assert await store_of("reader") is None


@pytest.mark.asyncio
async def test_ranks_that_disagree_on_their_number() -> None:
    backend = Loose()
    await start(0, 3, "sizes", backend)
    with pytest.raises(UsageError, match="rank 0 has made a group of 3"):
        await start(1, 2, "sizes", backend)
    for rank in (1, 2):
        await start(rank, 3, "sizes", backend)


@pytest.mark.asyncio
async def test_the_name_of_another_actor_is_left_alone() -> None:
    other: Any = Rank0.options(name="taken").remote()
    with pytest.raises(RendezvousError, match="another kind"):
        await start(0, 2, "taken", Loose())
    with pytest.raises(RendezvousTimeout, match=r"another kind.*'tests'.*another name"):
        await start(1, 2, "taken", Loose(), timeout=0.3)
    assert await store_of("taken") is None
    assert ray.get_actor("taken") == other
    ray.kill(other)


@pytest.mark.asyncio
async def test_a_communicator_that_fails_takes_the_id_back() -> None:
    class Failing(Loose):
        def NcclCommunicator(self, **_: Any) -> Any:  # type: ignore[override]
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        await start(0, 2, "failing", Failing())
    assert await store_of("failing") is None
    backend = Strict()
    await met([start(rank, 2, "failing", backend) for rank in range(2)])


@pytest.mark.asyncio
async def test_cancelling_rank_0_takes_the_id_back_and_destroys_what_comes() -> None:
    backend = Strict()
    task = start(0, 2, "cancelled", backend)
    await asyncio.to_thread(backend.entered.acquire)
    store = await store_of("cancelled")
    nccl_id = await store.get.remote()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store_of("cancelled") is None
    await asyncio.to_thread(backend.NcclCommunicator, ndev=2, commId=nccl_id, rank=1)
    await eventually(lambda: [each.destroyed.is_set() for each in backend.made].count(True) == 1)
    (destroyed,) = [each for each in backend.made if each.destroyed.is_set()]
    assert destroyed.rank == 0


@pytest.mark.asyncio
async def test_a_rank_that_waits_may_be_cancelled_at_any_moment() -> None:
    for turns in (0, 1, 2, 5):
        task = start(1, 2, "waiting", Loose())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    task = start(1, 2, "waiting", Loose())
    await waiting_on_board(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_the_blocking_form() -> None:
    backend = Strict()
    with pytest.raises(WouldBlockError, match="async_create"):
        create_nccl_communicator_in_ray(0, 1, "blocking", backend=backend)
    with pytest.raises(WouldBlockError):
        get_nccl_id_store_by_name("blocking")
    await met(
        [
            asyncio.create_task(
                asyncio.to_thread(
                    create_nccl_communicator_in_ray, rank, 3, "blocking", backend=backend
                )
            )
            for rank in (2, 0, 1)
        ]
    )
    assert await store_of("blocking") is None
    with pytest.raises(RendezvousTimeout, match="rank 0"):
        await asyncio.to_thread(
            create_nccl_communicator_in_ray, 1, 2, "blocking", 3, 0.1, backend=backend
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 2, "g"), "rank 2"),
        ((-1, 2, "g"), "rank"),
        ((True, 2, "g"), "rank"),
        ((0, 0, "g"), "world_size"),
        ((0, "2", "g"), "world_size"),
        ((0, 2, ""), "^group name ''"),
        ((1, 2, "g" * 4095), "^group name 'ggg"),
        ((0, 2, "g", 0), "max_retries"),
        ((0, 2, "g", 1, float("inf")), "interval_s"),
    ],
)
def test_an_unusable_argument_is_refused_at_once(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text) as raised:
        create_nccl_communicator_in_ray(*arguments, backend=Loose())
    assert "board key" not in "".join(traceback.format_exception(raised.value))


def test_what_is_no_backend_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="must have get_unique_id and NcclCommunicator"):
        create_nccl_communicator_in_ray(1, 2, "g", backend=object())  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_cupy_is_the_default_and_works_on_the_device_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    class Nccl(Strict):
        def NcclCommunicator(self, **arguments: Any) -> Any:
            seen.append(device.number)
            return super().NcclCommunicator(**arguments)

    class Device(threading.local):
        number = 0

    device = Device()
    runtime = types.SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDevice=lambda: device.number,
        setDevice=lambda number: setattr(device, "number", number),
    )
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.runtime = Nccl(), runtime  # type: ignore[attr-defined]
    cupy = types.ModuleType("cupy")
    cupy.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    device.number = 3  # F48
    await met([start(rank, 2, "cupy", None) for rank in range(2)])
    assert seen == [3, 3]
