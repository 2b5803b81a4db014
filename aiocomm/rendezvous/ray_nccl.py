"""How the ranks of an NCCL communicator come by their common id in a Ray cluster.

For anyone who builds NCCL communicators; aiocomm's own routes do not need it. Rank 0 makes the id
and an actor that holds it, ``NCCLIDStore``, under the group's name. It belongs to rank 0's process,
so Ray ends it soon after that one's death, and then the id is not to be had; who took it in between
leaves it when the store ends (not so the blocking form, whose thread is in the backend). The last
rank that has its communicator ends it.

Ray tells nobody that a name has come into use. So a rank that finds no store waits on a board,
which exists while somebody waits, and rank 0 writes there that it is worth looking again. What a
rank takes is what it finds by looking: the board carries no id, so nothing on it can be stale. The
rank opens the board, then looks, then waits: whatever rank 0 does meanwhile, one sees the other.

A store is taken only from a rank 0 that used this module (``world_size`` is set), lives, and waits
for this very rank; stores that somebody left behind are passed over. One that ends before all ranks
have come was void. Two in two namespaces are an error, not a guess.

Rejected: polling by name (seconds lost for each late rank); the id on the board (nobody would know
whether its rank 0 lives); a store made by whoever comes first (it would die with the wrong rank).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError

from ..errors import RendezvousError, RendezvousTimeout, UsageError
from ..loops import check_no_loop
from .base import check_key
from .bridge import bridge, in_thread, in_thread_or_undo, start_thread
from .ray_board import RayBoard
from .ray_nccl_backend import default_backend, destroy, on_device
from .ray_nccl_store import (
    Found,
    ask,
    check_ray,
    end,
    make,
    offers,
    others_called,
    several,
    stores_called,
)

if TYPE_CHECKING:
    from .ray_nccl_backend import Backend

T = TypeVar("T")
logger = logging.getLogger(__name__)

BOARD, NAMESPACE = "aiocomm-nccl", "aiocomm"
"""Where ranks wait: one place for all namespaces, as names are looked up in all of them."""

METHODS = ("get_unique_id", "NcclCommunicator")
"""What a backend must have."""

CONFIRM_TIMEOUT = 5.0
"""Seconds for telling the store that a communicator is made, which is a courtesy."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One rank's part in one group, and until when (``time.monotonic``)."""

    rank: int
    world_size: int
    group: str
    timeout: float
    deadline: float

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} of NCCL group {self.group!r}"

    @property
    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def timed_out(self, what: str) -> RendezvousTimeout:
        return RendezvousTimeout(
            f"{self} waited {self.timeout:g} s in vain {what}", group=self.group
        )


def create_nccl_communicator_in_ray(
    rank: int,
    world_size: int,
    group_name: str,
    max_retries: int = 100,
    interval_s: float = 5,
    *,
    backend: Backend | None = None,
) -> Any:
    """Make this rank's communicator of a group, waiting for rank 0 as long as need be.

    Call it on every rank, in any order. Nothing is polled: ``max_retries * interval_s`` is the
    time-out, in seconds, for the id; what the backend itself waits for comes on top.

    Args:
        rank: of this process, from 0.
        world_size: how many ranks there are.
        group_name: the same on all of them, and the name of the actor that rank 0 makes. One that
            is still there from an earlier run is replaced.
        max_retries: see above.
        interval_s: see above.
        backend: what makes ids and communicators; by default ``cupy.cuda.nccl``.

    Raises:
        RendezvousTimeout: rank 0 did not come in time, or died.
        RendezvousError: two groups of that name are being made in two namespaces, or an actor of
            another kind has the name.
        MissingPackageError: no backend was given and cupy is not installed.
        UsageError: an argument is not usable, the ranks disagree on ``world_size``, or Ray does not
            run in this process.
        WouldBlockError: called on the thread of a running event loop.
    """
    check_no_loop("await async_create_nccl_communicator_in_ray(...)")
    task = _task(rank, world_size, group_name, max_retries, interval_s, backend)
    made_by = default_backend() if backend is None else backend
    with asyncio.Runner() as runner:
        if rank == 0:
            # On this thread, as below: it is the one whose current device counts.
            found = runner.run(_publish(task, made_by.get_unique_id()))
        else:
            found = runner.run(_fetch(task))
        try:
            communicator = _communicator(made_by, task, found)
        except BaseException:
            _withdraw(task, found)
            raise
        runner.run(_confirm(task, found))
    return communicator


async def async_create_nccl_communicator_in_ray(
    rank: int,
    world_size: int,
    group_name: str,
    max_retries: int = 100,
    interval_s: float = 5,
    *,
    backend: Backend | None = None,
) -> Any:
    """As `create_nccl_communicator_in_ray`, awaitable.

    The backend is called in a thread of its own, on the CUDA device that is current here.

    Raises: as `create_nccl_communicator_in_ray`, but for WouldBlockError.

    While it waits in the backend it also watches rank 0: if that one dies, or begins anew, the rank
    leaves the backend's thread alone and takes the next id, as long as the time-out allows.

    Cancellation: rank 0 takes its id back. A communicator that is being made is destroyed when it
    is there.
    """
    task = _task(rank, world_size, group_name, max_retries, interval_s, backend)
    made_by = default_backend() if backend is None else backend
    while True:
        communicator = await _attempt(task, made_by)
        if communicator is not None:
            return communicator
        if rank == 0:
            raise RendezvousError(
                f"{task}: its NCCLIDStore ended before all ranks had come: was it killed, or "
                "replaced by another rank 0 of that name?",
                group=group_name,
            )


async def _attempt(task: _Task, backend: Backend) -> Any:
    """A communicator, or None if the group came to nothing on the way."""
    if task.rank == 0:
        nccl_id = await in_thread(on_device(backend.get_unique_id))
        found = await _publish(task, nccl_id)
    else:
        found = await _fetch(task)
    try:
        communicator = await _communicator_in_thread(backend, task, found)
    except BaseException:
        await in_thread(lambda: _withdraw(task, found))
        raise
    if communicator is None or await _confirm(task, found):
        return communicator
    await in_thread(lambda: destroy(communicator))
    return None


# Rank 0


async def _publish(task: _Task, nccl_id: Any) -> Found:
    """Make a store that holds the id, and tell those who wait."""
    try:
        async with asyncio.timeout(task.left):
            namespace = ray.get_runtime_context().namespace
            for other in await offers(task.group, 0):
                if other.namespace != namespace:
                    raise several(task.group, [namespace, other.namespace])
            args = (task.group, namespace, nccl_id, task.world_size, task.deadline)
            found = await in_thread_or_undo(lambda: make(*args), end)
            try:
                await ask(found.store.get.remote())  # its process runs: now others can be quick
                await _announce(task)
            except BaseException:
                await in_thread(lambda: end(found))
                raise
            return found
    except TimeoutError as error:
        raise task.timed_out(
            "to publish its id; is there room for its actor, and does the cluster answer?"
        ) from error
    except RayError as error:
        raise RendezvousError(f"{task}: its NCCLIDStore died: {error}", group=task.group) from error


async def _announce(task: _Task) -> None:
    """Wake the ranks that wait; where there is no board, nobody does."""
    try:
        await in_thread(lambda: ray.get_actor(BOARD, namespace=NAMESPACE))
    except ValueError:
        return
    async with _board(task) as board:
        ranks = range(1, task.world_size)
        await asyncio.gather(*(board.set(_key(task.group, rank), b"") for rank in ranks))


# The others


async def _fetch(task: _Task) -> Found:
    """The id of a rank 0 that waits for this rank."""
    try:
        async with asyncio.timeout(task.left):
            found = await _look(task)
            if found is None:
                async with _board(task) as board:
                    found = await _wait(task, board)
            return found
    except TimeoutError as error:
        raise task.timed_out(
            "for rank 0 to publish its id; was it started, with the same group name?"
            + await _passed_over(task)
        ) from error


async def _wait(task: _Task, board: RayBoard) -> Found:
    key = _key(task.group, task.rank)
    while True:
        found = await _look(task)
        if found is not None:
            return found
        await board.get(key, task.left)
        await board.delete(key)  # before looking: what is said later is written again


async def _look(task: _Task) -> Found | None:
    found = await offers(task.group, task.rank)
    if not found:
        return None
    if len(found) > 1:
        raise several(task.group, [each.namespace for each in found])
    if found[0].world_size != task.world_size:
        raise UsageError(
            f"{task}: rank 0 has made a group of {found[0].world_size}; give all ranks the same "
            "world_size"
        )
    return found[0]


async def _passed_over(task: _Task) -> str:
    """What has the group's name and is of no use, for the text of a time-out."""
    stores = await in_thread(lambda: stores_called(task.group))
    others = await in_thread(lambda: others_called(task.group))
    text = ""
    if stores:
        where = ", ".join(repr(namespace) for namespace, _ in stores)
        text += (
            f" (an NCCLIDStore of that name in {where} is none of a rank 0 that waits for this one)"
        )
    if others:
        where = ", ".join(map(repr, others))
        text += (
            f" (an actor of another kind has that name in namespace {where}, and a rank 0 there is "
            "refused: give the group another name)"
        )
    return text


# Both


async def _confirm(task: _Task, found: Found) -> bool:
    """Say that this rank has its communicator; False if it is one of a group that came to nothing.

    After the last rank nobody needs the store, and the answer to another rank may die with it. So
    where the store is dead, the id was void only if there is another one for this rank.
    """
    try:
        async with asyncio.timeout(CONFIRM_TIMEOUT):
            if await ask(found.store.made.remote(task.rank)):
                await in_thread(lambda: end(found))
    except RayError:
        return not await offers(task.group, task.rank)
    except TimeoutError:
        logger.warning("%s: its NCCLIDStore does not answer, and may stay", task)
    return True


async def _communicator_in_thread(backend: Backend, task: _Task, found: Found) -> Any:
    """The communicator; None if the store, and so rank 0, dies first. That thread is left alone."""
    making = start_thread(on_device(lambda: _communicator(backend, task, found)))
    made, ended = bridge(making), bridge(found.store.wait_complete.remote().future())
    try:
        await asyncio.wait({made, ended}, return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return made.result()
        start_thread(lambda: destroy(making.result()))
        return None
    except asyncio.CancelledError:
        start_thread(lambda: destroy(making.result()))
        raise
    finally:
        made.cancel()
        ended.cancel()


def _withdraw(task: _Task, found: Found) -> None:
    """Making a communicator failed: an id of a rank 0 that is not there any more is of no use."""
    if task.rank == 0:
        end(found)


def _communicator(backend: Backend, task: _Task, found: Found) -> Any:
    return backend.NcclCommunicator(ndev=task.world_size, commId=found.nccl_id, rank=task.rank)


def _board(task: _Task) -> RayBoard:
    return RayBoard(BOARD, namespace=NAMESPACE, timeout=max(1.0, task.left))


def _key(group: str, rank: int) -> str:
    return f"{group}/{rank}"


def _task(
    rank: int,
    world_size: int,
    group_name: str,
    max_retries: int,
    interval_s: float,
    backend: Backend | None,
) -> _Task:
    for what, number, least in (("world_size", world_size, 1), ("rank", rank, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise UsageError(f"{what} {number!r} is not usable: give an integer >= {least}")
    if rank >= world_size:
        raise UsageError(f"rank {rank} is not one of {world_size}: ranks are 0 to {world_size - 1}")
    try:
        check_key(group_name)
        check_key(_key(group_name, rank))
    except UsageError:  # which speaks of a board and its keys
        raise UsageError(
            f"group name {group_name!r:.80} is not usable: give some text without NUL, of 4000 "
            "bytes at most"
        ) from None
    for what, value in (("max_retries", max_retries), ("interval_s", interval_s)):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise UsageError(f"{what} {value!r} is not usable: give a finite number > 0")
    if backend is not None and not all(hasattr(backend, method) for method in METHODS):
        raise UsageError(f"backend {backend!r} is not usable: it must have {' and '.join(METHODS)}")
    check_ray()
    timeout = float(max_retries * interval_s)
    return _Task(rank, world_size, group_name, timeout, time.monotonic() + timeout)
