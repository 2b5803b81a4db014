"""What users hold of a channel: calls that return works, and how the handle comes to its actor.

Only the calls and what they promise; ``client.py`` is what happens behind them once the channel was
found, ``actor.py`` how it is found. A handle belongs to the event loop in which it was first used;
one that was sent to another process is connected there by its first call.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Self

from ..errors import (
    AiocommError,
    ChannelClosed,
    ChannelError,
    ChannelLostError,
    UsageError,
)
from ..handles.channel import LOOK
from ..rendezvous.base import check_timeout
from ..rendezvous.bridge import in_thread
from ..rendezvous.ray_client import local_host
from . import actor, places
from .checks import check_bound, check_name, left
from .client import NEEDS_LOOP, ChannelClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from ..handles import AsyncFuncWork, AsyncWork
    from .introductions import Introduction
    from .places import Place

CONNECT_TIMEOUT = 60.0
"""Seconds that ``connect`` and a handle that was sent wait for the channel to be created."""

DEFAULT = "default"


class Channel:
    """A named queue between producers and consumers in any processes of one Ray cluster.

    Items are what ``CollectiveGroup.send`` takes, on the CPU. Those that one producer puts under
    one key are got in the order of the puts. The bounds count what was put and not taken, and room
    that a producer was promised: it asks for room before its item leaves.

    Every call returns a work. The calls are made in the event loop of the handle, or in a thread
    without a loop, and take their place when called, not when awaited. A work fails with
    ChannelClosed when the channel was closed, ChannelLostError when its actor died, and ClosedError
    when the handle was closed on this side.

    Made by ``create`` and ``connect``; can be sent to another actor, where its first call connects.

    Attributes:
        name: of the channel.
        namespace: of Ray, in which the name is known.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace
        self._client: ChannelClient | None = None
        self._place: Place | None = None
        self._server: Introduction | None = None
        self._joining: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._creator = False
        self._left = False

    def __repr__(self) -> str:
        return f"<Channel {self.name!r} in {self.namespace!r}: {self._client or 'not connected'}>"

    def __reduce__(self) -> tuple[type[Channel], tuple[str, str]]:
        return Channel, (self.name, self.namespace)

    @classmethod
    async def create(
        cls, name: str, maxsize: int = 0, max_bytes: int = 0, *, namespace: str | None = None
    ) -> Channel:
        """Create a channel, and connect to it.

        It lives as long as the process that created it, or until it was closed and is empty.

        Args:
            name: any text, one channel's at a time.
            maxsize: items that it may hold, 0 without bound.
            max_bytes: the same in bytes, as they travel; no single item may take more.
            namespace: of Ray; by default that of the job.

        Raises:
            ChannelExistsError: there is a channel of that name.
            ChannelError: Ray could not make its actor.
            UsageError: an argument is not usable, or Ray does not run in this process.

        Cancellation: a channel that was made meanwhile is ended.
        """
        name = check_name(name)
        check_bound("maxsize", maxsize)
        check_bound("max_bytes", max_bytes)
        channel = cls(name, _namespace(namespace))
        made = await actor.create(name, channel.namespace, maxsize, max_bytes)
        channel._creator = True
        try:
            await channel._connect(CONNECT_TIMEOUT)
        except BaseException:
            actor.end(made)
            raise
        return channel

    @classmethod
    async def connect(
        cls, name: str, *, namespace: str | None = None, timeout: float = CONNECT_TIMEOUT
    ) -> Channel:
        """Connect to a channel, waiting until it was created.

        Args:
            name: of the channel.
            namespace: of Ray; by default that of the job.
            timeout: seconds to wait.

        Raises:
            RendezvousTimeout: nobody created it in time, or its actor did not answer.
            ChannelLostError: it ended meanwhile.
            ClosedError: Ray was shut down meanwhile.
            UsageError: an argument is not usable, or Ray does not run in this process.

        Cancellation: safe.
        """
        name = check_name(name)
        check_timeout(timeout)
        channel = cls(name, _namespace(namespace))
        await channel._connect(timeout)
        return channel

    # --- items ---

    def put(self, item: object, weight: float = 0, key: str = DEFAULT) -> AsyncWork[None]:
        """Put an item into the channel, once there is room.

        Args:
            item: its tensors are on the CPU, contiguous and dense; do not write to them until the
                work is done.
            weight: what it counts for in ``get_batch``.
            key: items of different keys are queues of their own, with bounds in common.

        Returns:
            A work that completes with None when the channel has the item.

        Raises:
            PayloadError: it cannot be sent, or is larger than ``max_bytes``; nothing was queued.
            ClosedError: the handle was closed.
            WrongLoopError: called from another event loop, or in a forked child.
            UsageError: weight or key are not usable.

        Cancellation: of the work: an item that waits for room is withdrawn, one that has left is
        put.
        """
        return self._connected().put(item, weight, key)

    def put_nowait(self, item: object, weight: float = 0, key: str = DEFAULT) -> AsyncWork[None]:
        """The same, but the work fails with ChannelFull where ``put`` would wait for room.

        Cancellation: of the work: the item may have been put or not.
        """
        return self._connected().put(item, weight, key, nowait=True)

    def get(self, key: str = DEFAULT) -> AsyncWork[Any]:
        """Take the next item.

        Returns:
            A work that completes with it, of the types it was put with.

        Raises:
            ClosedError, WrongLoopError, UsageError: as ``put``.

        The work fails with ChannelClosed when the channel is closed and nothing is left under the
        key, DecodeError when the item cannot be rebuilt here.

        Cancellation: of the work: loses no item.
        """
        return self._connected().get(key)

    def get_nowait(self, key: str = DEFAULT) -> AsyncWork[Any]:
        """The same, but the work fails with ChannelEmpty where ``get`` would wait for an item.

        Cancellation: of the work: loses no item.
        """
        return self._connected().get(key, nowait=True)

    def get_batch(self, batch_weight: float, key: str = DEFAULT) -> AsyncWork[list[Any]]:
        """Take items until their weights reach or exceed ``batch_weight``.

        It waits until there are so many; of a channel that was closed it takes what is left. A
        first item that weighs enough comes alone. The work fails with ChannelFull when it can never
        be served: the channel is full, and waits for this call to take from it.

        Returns:
            A work that completes with the items, in a list.

        Raises:
            ClosedError, WrongLoopError, UsageError: as ``put``.

        Cancellation: of the work: loses no item.
        """
        return self._connected().get_batch(key, batch_weight)

    def __aiter__(self) -> AsyncIterator[Any]:
        """The items of the default key, until the channel is closed and empty."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.get()
            except ChannelClosed:
                return
            yield item

    # --- questions ---

    def qsize(self, key: str | None = None) -> AsyncFuncWork[int]:
        """A work for the number of items that nobody was given, under a key or in all.

        Cancellation: of the work: nothing happens.
        """
        return self._connected().look(key).then(lambda seen: seen.queued)

    def empty(self, key: str | None = None) -> AsyncFuncWork[bool]:
        """A work for whether there is no item, under a key or at all.

        Cancellation: of the work: nothing happens.
        """
        return self._connected().look(key).then(lambda seen: not seen.queued)

    def full(self) -> AsyncFuncWork[bool]:
        """A work for whether there is no room for one more item.

        Cancellation: of the work: nothing happens.
        """
        return self._connected().look(None).then(lambda seen: seen.full)

    # --- ends ---

    def close(self) -> AsyncWork[None]:
        """Let nothing in any more, for whomever: puts fail with ChannelClosed.

        What is there can still be got; then gets fail alike, and the actor ends. Idempotent.

        Returns:
            A work that completes with None when the channel is closed.

        Cancellation: of the work: the channel may be closed or not.
        """
        return self._connected().close(drop=False)

    def abort(self) -> AsyncWork[None]:
        """Close the channel and drop what is in it; its actor ends. Idempotent.

        Cancellation: of the work: as ``close``.
        """
        return self._connected().close(drop=True)

    async def aclose(self) -> None:
        """Let go of this handle: what it has put is in the channel, what it waits for is not.

        The channel goes on, unless this handle created it: then it is closed, as by ``close``.
        Idempotent.

        Raises:
            WrongLoopError: called in another event loop.

        Cancellation: the closing goes on in the background.
        """
        if self._client is not None:
            self._client.check_loop()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._leave())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # --- inside ---

    def _connected(self) -> ChannelClient:
        """What does the work; the first call of a handle that was sent connects it."""
        if self._client is None:
            if self._closing is not None:
                raise left(self.name)
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError as error:
                raise UsageError(
                    f"channel {self.name!r} is not connected, no event loop runs here: {NEEDS_LOOP}"
                ) from error
            self._begin(loop, CONNECT_TIMEOUT)
        assert self._client is not None
        return self._client

    def _begin(self, loop: asyncio.AbstractEventLoop, timeout: float) -> asyncio.Task[None]:
        client = self._client = ChannelClient(self.name, loop)
        task = self._joining = loop.create_task(self._join(client, timeout))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def _connect(self, timeout: float) -> None:
        joining = self._begin(asyncio.get_running_loop(), timeout)
        try:
            await asyncio.shield(joining)
        except BaseException:
            self._creator = False
            await self.aclose()
            raise

    async def _join(self, client: ChannelClient, timeout: float) -> None:
        try:
            actor.own_namespace()  # says so where Ray does not run
            place = self._place = await places.enter(await in_thread(local_host))
            mine = place.store.address
            group_name = f"{self.name[:100]} {uuid.uuid4().hex[:12]}"
            welcome = await actor.join(self.name, self.namespace, mine, group_name, timeout)
            place.store.introduce(welcome.server)
            self._server = welcome.server
            group = place.collective.create_collective_group(
                [mine, welcome.server.address], group_name
            )
            client.joined(group, welcome.maxsize, welcome.max_bytes)
            await self._reach(client)
        except AiocommError as error:
            client.fail(error)
            raise
        except Exception as error:
            failed = ChannelError(
                f"channel {self.name!r} could not be joined: {type(error).__name__}: {error}"
            )
            failed.__cause__ = error
            client.fail(failed)
            raise failed from error

    async def _reach(self, client: ChannelClient) -> None:
        """Wait for a first answer: where the actor has just died, dialling takes long to see it."""
        answer, loop = client.look(None), asyncio.get_running_loop()
        try:
            while not (await asyncio.wait([answer], timeout=LOOK))[0]:
                if not await actor.lives(self.name, self.namespace, loop.time() + LOOK):
                    raise ChannelLostError(
                        f"channel {self.name!r} ended while this process connected: create it again"
                    )
            await answer
        finally:
            answer.cancel()

    async def _leave(self) -> None:
        client, joining = self._client, self._joining
        if client is None or joining is None:
            return
        if not joining.done():
            if not client.pending:
                joining.cancel()
            await asyncio.wait([joining])
        client.end_gets()
        if self._creator:
            closed = client.close(drop=False)
            await asyncio.wait([closed])
            closed.cancelled() or closed.exception()  # lost, and so closed
        await client.leave()
        if self._place is not None:
            place, self._place = self._place, None
            if self._server is not None:
                place.store.forget(self._server)
            await places.leave(place)


def _namespace(namespace: object) -> str:
    own = actor.own_namespace()
    return own if namespace is None else check_name(namespace, "namespace")
