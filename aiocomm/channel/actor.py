"""A channel's actor, and how it is made and found on Ray. Knows neither queue nor messages.

The actor is a thin shell: one runtime and a ``ChannelServer`` on its event loop. Calls of Ray are
for joining alone; whatever else a client says comes through its group. It is named and not
detached: it ends with the process that created it, and that process ends it when the channel is
closed and nothing is left. Calls that block are made in a thread of their own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from typing import TYPE_CHECKING, Any

from ..collective import open as open_runtime
from ..errors import (
    ChannelError,
    ChannelExistsError,
    MissingPackageError,
    RendezvousTimeout,
    UsageError,
)
from ..rendezvous.bridge import bridge, in_thread, in_thread_or_undo, start_thread
from .introductions import SERVER, Introductions, Welcome, new_address
from .server import ChannelServer

try:
    import ray
    from ray.exceptions import RayActorError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as _error:
    raise MissingPackageError(
        "channels need ray, which is not installed: pip install 'aiocomm[ray]'"
    ) from _error

from ..handles.channel import AsyncChannelWork, connection, shut_down
from ..rendezvous.ray_client import local_host

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..collective import Collective

log = logging.getLogger("aiocomm")

PREFIX = "aiocomm.channel/"
"""Before the name of a channel, in the name of its actor."""

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""Seconds between two looks for an actor; Ray tells nobody that a name has come."""

ENDING = 10.0
"""Seconds to wait for a channel of the same name that is closed and about to end."""

_kept: dict[
    Future[None], Any
] = {}  # handles of what this process created, which keep the actors alive


class ChannelActor:
    """The process that holds a channel's items.

    Args:
        name: of the channel.
        maxsize: items that it may hold.
        max_bytes: the same in bytes.
    """

    def __init__(self, name: str, maxsize: int, max_bytes: int) -> None:
        self._server = ChannelServer(name, maxsize, max_bytes)
        self._store = Introductions(new_address(SERVER), local_host())
        self._opened: Future[Collective] = concurrent.futures.Future()

    async def serve(self) -> None:
        """Serve until the channel is closed and empty; the process is then to be ended."""
        try:
            async with open_runtime(self._store.address, store=self._store) as collective:
                self._opened.set_result(collective)
                await self._server.ended.wait()
                await self._server.aclose()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            raise

    async def join(self, client: str, group_name: str) -> Welcome | None:
        """Open the group with a client, by its address; it is the client that dials.

        Returns:
            What the client is to know; None when the channel has ended.
        """
        collective = await bridge(self._opened)
        if self._server.ended.is_set():
            return None
        members = [self._store.address, client]
        self._server.join(collective.create_collective_group(members, group_name))
        queue = self._server.queue
        return Welcome(self._store.own, queue.maxsize, queue.max_bytes)

    async def lasts(self) -> bool:
        """Whether the channel is open, or has items still."""
        return not self._server.ended.is_set()


async def create(name: str, namespace: str, maxsize: int, max_bytes: int) -> Any:
    """Make the actor of a channel, on this node where that can be.

    Returns:
        Its handle. The actor lives as long as this process, until the channel ends.

    Raises:
        ChannelExistsError: there is a channel of that name.
        ChannelError: Ray could not make it.

    Cancellation: an actor that was made meanwhile is ended.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + ENDING, FIRST_PAUSE
    cluster = connection()
    while True:
        try:
            return await in_thread_or_undo(
                lambda: _create(cluster, name, namespace, maxsize, max_bytes), end
            )
        except ValueError as error:  # the name is taken, be it by one that is about to end
            if await lives(name, namespace, deadline) or loop.time() > deadline:
                raise ChannelExistsError(
                    f"there is a channel {name!r} in namespace {namespace!r}: connect to it, take "
                    "another name, or end it first (abort(), or close() and get what is left)"
                ) from error
        except RayError as error:
            raise ChannelError(f"channel {name!r} could not be created: {error}") from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def lives(name: str, namespace: str, deadline: float) -> bool:
    """Whether the actor of that name is a channel that goes on, or holds items still.

    One that has not answered by the deadline, in the loop's time, does.

    Cancellation: safe.
    """
    cluster = connection()
    try:
        async with asyncio.timeout_at(deadline):
            actor = await in_thread(lambda: _find(cluster, name, namespace))
            return await AsyncChannelWork[bool](actor.lasts.remote())
    except (ValueError, RayError):
        return False
    except TimeoutError:  # it hangs, and has the name
        return True


async def join(name: str, namespace: str, client: str, group: str, timeout: float) -> Welcome:
    """Find the actor of a channel, and be let in.

    Raises:
        RendezvousTimeout: nobody created the channel in time, or its actor does not answer.
        ClosedError: Ray was shut down meanwhile.

    Cancellation: safe.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + timeout, FIRST_PAUSE
    cluster = connection()
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                actor = await in_thread(lambda: _find(cluster, name, namespace))
                joined: AsyncChannelWork[Welcome | None]
                joined = AsyncChannelWork(actor.join.remote(client, group))
                if (welcome := await joined) is not None:
                    return welcome
                raise ValueError("it has ended")
        except TimeoutError as error:
            raise RendezvousTimeout(
                f"the actor of channel {name!r} in namespace {namespace!r} did not answer within "
                f"{timeout:g} s: it is not there yet, or its process hangs"
            ) from error
        except (ValueError, RayActorError) as error:  # not yet, or about to end
            if loop.time() + pause > deadline:
                raise RendezvousTimeout(
                    f"nobody created channel {name!r} in namespace {namespace!r} within "
                    f"{timeout:g} s: call Channel.create, in this namespace or give that one"
                ) from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def end(actor: Any) -> None:
    """End the actor of a channel at once."""
    ray.kill(actor)


def own_namespace() -> str:
    """The namespace of this process' job.

    Raises:
        UsageError: Ray does not run here.
    """
    if not ray.is_initialized():
        raise UsageError("Ray does not run in this process: call ray.init() before using channels")
    return str(ray.get_runtime_context().namespace)


def _check(cluster: str | None) -> None:
    """Refuse to go on in another cluster; without any, a call of Ray would start one."""
    if cluster is None or connection() != cluster:
        raise shut_down("the channel was neither made nor found")


def _find(cluster: str | None, name: str, namespace: str) -> Any:
    _check(cluster)
    return ray.get_actor(PREFIX + name, namespace)


def _create(cluster: str | None, name: str, namespace: str, maxsize: int, max_bytes: int) -> Any:
    _check(cluster)
    node = ray.get_runtime_context().get_node_id()
    actor = _Actor.options(
        name=PREFIX + name,
        namespace=namespace,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    ).remote(name, maxsize, max_bytes)
    served = actor.serve.remote().future()
    _kept[served] = actor
    served.add_done_callback(_served)
    return actor


def _served(served: Future[None]) -> None:
    # By kill, since an actor that exits by itself keeps its name for many seconds. Not on the
    # thread of Ray that brings the word.
    actor = _kept.pop(served, None)
    if actor is not None and ray.is_initialized():
        start_thread(lambda: end(actor))


_Actor: Any = ray.remote(num_cpus=0)(ChannelActor)
