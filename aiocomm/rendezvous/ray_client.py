"""A client of the actor that carries a Ray board, whichever actor that is at the moment.

It lives on the loop of a session's thread, where calls of Ray may block. It may not know threads or
users' loops.

The actor is not detached. It belongs to the process that needed it first and ends with that process
or its job, so nothing is left whatever dies. Whoever loses it finds or makes another one, writes
again what it had written itself, and waits again for what it waited for: a board whose owner died
has lost what dead processes wrote, and nothing else. The last client to leave ends the actor.

Rejected: a detached actor (it outlives a job that is killed), restarting by Ray (an owner's death
is final all the same), and handing the content over when the owner closes (it keeps the handle
instead, for as long as its process lives and others use the board).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MissingPackageError, RendezvousError, RendezvousTimeout, UsageError
from ..handles.channel import connection
from . import ray_actor
from .bridge import bridge

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError
except ImportError as _error:
    raise MissingPackageError(
        "aiocomm on Ray needs ray, which is not installed: pip install 'aiocomm[ray]'"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

CALLS = 1_000_000
"""How many calls may be under way in the actor; each client has one all the time."""

PAUSE_FIRST, PAUSE_MOST = 0.01, 0.5
"""Seconds between attempts to get an actor: a name comes free some time after its actor's death."""

LOOK = 1.0
"""Seconds between looks at whether Ray runs in this process: ``ray.shutdown`` tells nobody."""

LEAVE_TIMEOUT = 1.0
"""Seconds that leaving waits for the actor's answer."""

_cloudpickle: Any = cloudpickle  # Ray's stubs leave these untyped
_nodes: Any = ray.nodes

# By value: the actor's process need not import aiocomm, and torch with it.
_cloudpickle.register_pickle_by_value(ray_actor)
_Actor: Any = ray.remote(ray_actor.BoardActor)

_METHODS = ("join", "listen", "want", "look", "set", "delete", "leave")

_kept: dict[tuple[str, str], Any] = {}
"""Handles of actors that this process owns, by namespace and name: they end with their handles."""


@dataclass(frozen=True, slots=True)
class RaySite:
    """Which actor a board is.

    Args:
        name: of the actor.
        namespace: of Ray; None is that of the job.
        timeout: seconds to get the actor and its first answer.
    """

    name: str
    namespace: str | None
    timeout: float

    def __str__(self) -> str:
        where = "" if self.namespace is None else f" in namespace {self.namespace!r}"
        return f"actor {self.name!r}{where}"


@dataclass(frozen=True, slots=True)
class RayPlace:
    """Where a board was found.

    Args:
        namespace: of the actor.
        local_host: numeric address of this node.
    """

    namespace: str
    local_host: str


class RayClient:
    """One client. Everything is called on its loop.

    Args:
        site: which actor.
        loop: the loop, which need not run yet.
        refusal: makes the error for calls that come to nothing once ``fail`` was called.
    """

    def __init__(
        self,
        site: RaySite,
        loop: asyncio.AbstractEventLoop,
        refusal: Callable[[], Exception],
    ) -> None:
        self._site = site
        self._loop = loop
        self._refusal = refusal
        self._name = secrets.token_hex(8)
        self._failed = False
        self._life: str | None = None
        self._ready: asyncio.Future[Any] = loop.create_future()  # the actor, once joined
        self._asked: Any = None  # the last actor that was asked to let this client in
        self._answers: set[asyncio.Future[Any]] = set()
        self._number = 0
        self._writes: dict[str, ray_actor.Write] = {}
        self._waiters: dict[str, set[asyncio.Future[bytes]]] = {}
        self._wanted: dict[str, int] = {}
        self._changed: set[str] = set()  # keys of which the actor is not told yet

    # Calls of users

    async def write(self, key: str, value: bytes) -> None:
        """Write; returns when an actor has it. From then on the client writes it to the next."""
        self._number += 1
        version: int = await self._call("set", self._name, key, value, self._number)
        before = self._writes.get(key)
        if before is None or before["version"] < version:
            self._writes[key] = {"value": value, "version": version}

    async def delete(self, key: str) -> bool:
        """Delete; whether there was something."""
        self._writes.pop(key, None)
        return bool(await self._call("delete", self._name, key))

    async def look(self, key: str) -> bytes | None:
        """Read without waiting."""
        found: bytes | None = await self._call("look", key)
        return found

    async def get(self, key: str) -> bytes:
        """Read, waiting for the key. Cancellation: the actor is told."""
        if self._failed:
            raise self._refusal()
        waiter: asyncio.Future[bytes] = self._loop.create_future()
        waiters = self._waiters.setdefault(key, set())
        waiters.add(waiter)
        if len(waiters) == 1:
            self._wanted[key] = self._change(key)
        try:
            return await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(key) is waiters:
                del self._waiters[key], self._wanted[key]
                self._change(key)

    def _change(self, key: str) -> int:
        """Tell the actor soon whether the key is wanted, together with others of this turn."""
        self._number += 1
        if not self._changed:
            self._loop.call_soon(self._tell)
        self._changed.add(key)
        return self._number

    def _tell(self) -> None:
        """Nobody waits for the answer: if the actor is lost, ``listen`` finds it out."""
        actor = self._actor()
        if not self._changed or actor is None or not ray.is_initialized():
            return
        wanted = {key: key in self._wanted for key in self._changed}
        actor.want.remote(self._name, wanted, self._number)
        self._changed.clear()

    # Getting an actor, and hearing from it

    async def live(self, opened: Future[RayPlace]) -> None:
        """Have an actor, and another one when it is lost; raises when there is none to be had.

        Args:
            opened: completed when there is one for the first time.
        """
        if not ray.is_initialized():
            raise UsageError(
                f"Ray does not run in this process: call ray.init() before you open the "
                f"board {self._site}"
            )
        self._life = connection()
        context = ray.get_runtime_context()
        namespace = self._site.namespace or context.namespace
        place = RayPlace(namespace, local_host())
        while True:
            actor = await self._join(namespace)
            self._ready.set_result(actor)
            self._tell()  # of what changed while it let this client in
            if not opened.done():
                opened.set_result(place)
            try:
                await self._listen(actor)
            except RayError as error:
                self._lost(actor, error)
            else:
                self._ready = self._loop.create_future()  # it had dropped this client

    async def _join(self, namespace: str) -> Any:
        """An actor that has let this client in; RendezvousTimeout if there is none in time."""
        deadline = self._loop.time() + self._site.timeout
        pause = PAUSE_FIRST
        while True:
            self._check_ray()
            try:
                self._asked = actor = self._find_or_make(namespace)
                self._changed.clear()
                async with asyncio.timeout_at(deadline):
                    if await self._ask(actor, "join", self._name, self._writes, self._wanted):
                        return actor
                ray.kill(actor)  # its last client left, and did not come to end it
                reason = "it is ending"
            except (RayError, ValueError) as error:  # dead by now; or somebody else was quicker
                reason = str(error).partition("\n")[0]
            except TimeoutError:
                reason = "its process does not start; are there resources for it?"
            left = deadline - self._loop.time()
            if left <= 0:
                raise RendezvousTimeout(
                    f"the board {self._site} was not there within {self._site.timeout:g} s: "
                    f"{reason}"
                )
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, PAUSE_MOST)

    def _find_or_make(self, namespace: str) -> Any:
        name = self._site.name
        with contextlib.suppress(ValueError):
            found = ray.get_actor(name, namespace=namespace)
            if not all(hasattr(found, method) for method in _METHODS):
                raise RendezvousError(
                    f"the actor {name!r} in namespace {namespace!r} is no board: give the board "
                    "another name"
                )
            return found
        self._check_ray()  # the look took a while, and where no Ray runs the next call starts one
        actor = _Actor.options(
            name=name,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=CALLS,
            max_restarts=0,
        ).remote()
        _kept[namespace, name] = actor
        return actor

    async def _listen(self, actor: Any) -> None:
        """Take in what the actor says, until it does not know this client any more."""
        while True:
            news: ray_actor.News | None = await self._ask(actor, "listen", self._name)
            if news is None:
                return
            for key, version in news["lost"].items():
                write = self._writes.get(key)
                if write is not None and write["version"] <= version:
                    del self._writes[key]
            for key, value in news["found"].items():
                self._wanted.pop(key, None)
                for waiter in self._waiters.pop(key, ()):
                    if not waiter.done():
                        waiter.set_result(value)
                del value
            del news  # or the frame would hold values for as long as nothing happens (F20)

    # Calls of the actor

    async def _call(self, method: str, *args: object) -> Any:
        """A call of whichever actor there is, again if that one is lost."""
        while True:
            ready = self._ready
            await asyncio.wait({ready})
            actor = ready.result()
            try:
                return await self._ask(actor, method, *args)
            except RayError as error:
                self._lost(actor, error)

    async def _ask(self, actor: Any, method: str, *args: object) -> Any:
        """One call; RayError if the actor is lost, RendezvousError if Ray is."""
        self._check_ray()
        answer = bridge(getattr(actor, method).remote(*args).future())
        self._answers.add(answer)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK))[0]:
                self._check_ray()
            return answer.result()
        except RayTaskError as error:  # not the actor's death but a fault in it
            raise RendezvousError(f"{method} failed in the board {self._site}: {error}") from error
        finally:
            self._answers.discard(answer)
            answer.cancel()

    def _actor(self) -> Any:
        """The actor, or None while there is none."""
        ready = self._ready.done() and self._ready.exception() is None
        return self._ready.result() if ready else None

    def _lost(self, actor: Any, error: RayError) -> None:
        """No call of this actor is worth waiting for, the listening one included."""
        if self._actor() is actor:
            logger.debug("the board %s lost its actor: %s", self._site, error)
            self._ready = self._loop.create_future()
            for answer in list(self._answers):
                _fail(answer, error)

    def _check_ray(self) -> None:
        if connection() != self._life:
            raise RendezvousError(
                "ray.shutdown() was called in this process; open the board again after ray.init()"
            )

    # The end

    def fail(self) -> None:
        """Fail all that waits, and all that comes."""
        self._failed = True
        if self._ready.done():
            self._ready = self._loop.create_future()
        waiters = [waiter for each in self._waiters.values() for waiter in each]
        for future in (self._ready, *self._answers, *waiters):
            # One error each: a shared one would collect the tracebacks of all.
            _fail(future, self._refusal())

    async def leave(self) -> None:
        """Say goodbye; the last one ends the actor."""
        actor, self._asked = self._asked, None
        if actor is None:
            return
        last = True
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                last = await self._ask(actor, "leave", self._name)
            if last:
                ray.kill(actor)
        except (RayError, RendezvousError, ValueError, TimeoutError) as error:
            logger.debug("the board %s was left without a goodbye: %s", self._site, error)
        if last:
            for place in [place for place, kept in _kept.items() if kept == actor]:
                del _kept[place]


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # who awaits it gets it; if nobody does, that is not to be logged


def local_host() -> str:
    """The numeric address by which Ray itself reaches this node."""
    node = ray.get_runtime_context().get_node_id()
    host = next(str(each["NodeManagerAddress"]) for each in _nodes() if each["NodeID"] == node)
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
