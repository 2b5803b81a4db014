"""The actors that hold ids of NCCL communicators: made, found by name in all namespaces, ended.

It may not know what a rank does with an id, nor how it waits for one. A store is not detached: it
ends with the process that made it, so an id whose rank 0 is dead is not to be had.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ..errors import AiocommError, RendezvousError, RendezvousTimeout, UsageError
from ..loops import check_no_loop
from . import ray_actor
from .bridge import bridge, in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

NCCLIDStore: Any = ray.remote(num_cpus=0)(ray_actor.IDStoreActor)
"""The actor class: ``NCCLIDStore.options(name=...).remote(nccl_id)``, ``store.get.remote()``."""

PAUSE_FIRST, PAUSE_MOST = 0.01, 0.5
"""Seconds between attempts to make a store whose name a dead one still has."""

_stores: dict[tuple[str, str], Any] = {}
"""Handles of the stores of this process, by namespace and name: a store ends with its handle."""


@dataclass(frozen=True, slots=True)
class Found:
    """A store, and what it holds.

    Args:
        store: the actor.
        namespace: where its name is.
        nccl_id: the id.
        world_size: how many ranks it is for.
    """

    store: Any
    namespace: str
    nccl_id: Any
    world_size: int


def get_nccl_id_store_by_name(name: str) -> Any:
    """The ``NCCLIDStore`` of that name in any namespace; None if there is none.

    Asks Ray's control service, for some milliseconds.

    Raises:
        RendezvousError: there are several, in the namespaces that the text names.
        UsageError: Ray does not run in this process.
        WouldBlockError: called on the thread of a running event loop.
    """
    check_no_loop("await asyncio.to_thread(get_nccl_id_store_by_name, name)")
    check_ray()
    found = stores_called(name)
    if len(found) > 1:
        raise several(name, [namespace for namespace, _ in found])
    return found[0][1] if found else None


def stores_called(name: str) -> list[tuple[str, Any]]:
    """Namespaces and handles of the living stores of a name; blocks.

    Raises:
        UsageError: Ray does not run in this process, any more perhaps.
    """
    return [(namespace, actor) for namespace, actor in _called(name) if _is_store(actor)]


def others_called(name: str) -> list[str]:
    """Namespaces in which an actor of another kind has the name; blocks.

    Raises: as ``stores_called``.
    """
    return [namespace for namespace, actor in _called(name) if not _is_store(actor)]


def _called(name: str) -> list[tuple[str, Any]]:
    check_ray()  # where no Ray runs, the calls below would start one
    found = []
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["name"] != name:
            continue
        with contextlib.suppress(ValueError):  # it died meanwhile
            check_ray()
            handle: Any = ray.get_actor(name, namespace=each["namespace"])
            found.append((each["namespace"], handle))
    return found


async def offers(name: str, rank: int) -> list[Found]:
    """The stores whose rank 0 waits for this rank; asked by rank 0, all that are not complete.

    Cancellation: nothing is left behind.
    """
    found = []
    for namespace, store in await in_thread(lambda: stores_called(name)):
        try:
            offer: ray_actor.Offer = await ask(store.offer_nccl_id.remote(rank))
        except RayError as error:
            logger.debug("the NCCLIDStore %r in %r is dead: %s", name, namespace, error)
            continue
        size = offer["world_size"]
        if size is not None and (rank == 0 or not offer["spent"]):
            found.append(Found(store, namespace, offer["nccl_id"], size))
    return found


def make(name: str, namespace: str, nccl_id: Any, world_size: int, deadline: float) -> Found:
    """A store in place of one that is there; blocks until ``deadline`` (``time.monotonic``).

    Raises:
        RendezvousError: an actor of another kind has the name.
        RendezvousTimeout: the name did not come free.
        UsageError: Ray does not run in this process.
    """
    pause = PAUSE_FIRST
    while True:
        check_ray()
        with contextlib.suppress(ValueError):  # as it should be: there is none
            old = ray.get_actor(name, namespace=namespace)
            if not _is_store(old):
                raise RendezvousError(
                    f"an actor of another kind is called {name!r} in namespace {namespace!r}: "
                    "give the group another name",
                    group=name,
                )
            logger.warning("the NCCLIDStore %r of an earlier run is replaced", name)
            ray.kill(old)
        try:
            store = NCCLIDStore.options(name=name, namespace=namespace, max_restarts=0).remote(
                nccl_id, world_size
            )
        except ValueError as error:  # a name is taken for some time after its actor's death (F31)
            left = deadline - time.monotonic()
            if left <= 0:
                raise RendezvousTimeout(f"the name {name!r} is not free: {error}") from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, PAUSE_MOST)
            continue
        _keep(store, (namespace, name))
        return Found(store, namespace, nccl_id, world_size)


def end(found: Found) -> None:
    """End a store; blocks for a moment."""
    if ray.is_initialized():
        ray.kill(found.store)


async def ask(ref: Any) -> Any:
    """The answer to a call.

    Cancellation: the call goes on, and its answer is dropped.
    """
    return await bridge(ref.future())


def check_ray() -> None:
    """UsageError if Ray does not run in this process."""
    if not ray.is_initialized():
        raise UsageError("Ray does not run in this process: call ray.init() first")


def several(name: str, namespaces: list[str]) -> AiocommError:
    """The error for stores of one name in several namespaces."""
    where = " and ".join(repr(namespace) for namespace in sorted(namespaces))
    return RendezvousError(
        f"there are NCCLIDStores called {name!r} in the namespaces {where}: end the one that is "
        "left of an earlier run (ray.kill), or give the group another name",
        group=name,
    )


def _is_store(actor: Any) -> bool:
    return hasattr(actor, "offer_nccl_id")


def _keep(store: Any, place: tuple[str, str]) -> None:
    """Hold the handle until the store is complete, or dead."""

    def forget(_: Future[Any]) -> None:
        if _stores.get(place) is store:
            del _stores[place]

    _stores[place] = store
    store.wait_complete.remote().future().add_done_callback(forget)
