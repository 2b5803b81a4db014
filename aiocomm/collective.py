"""One worker's runtime: it is found by the others, and makes and caches its groups.

A group's link is dialled by whichever side needs it first. When both dial at once, the link that
rank 0 dials wins and the other one is refused; the refused side waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import uuid
from typing import TYPE_CHECKING

from .address import WorkerAddress
from .connect import Connector
from .errors import AddressError, ClosedError, Refusal, UsageError
from .group import CollectiveGroup, GroupState
from .options import Options
from .rendezvous.tcp import TCPBoard
from .runtime import Runtime
from .transport.heart import Heart
from .transport.listener import Listener

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .rendezvous.base import Store
    from .transport.base import Hello, Link

log = logging.getLogger("aiocomm")

_current: dict[asyncio.AbstractEventLoop, list[Collective]] = {}


class Collective:
    """The runtime of one worker in one event loop; made by ``aiocomm.open``.

    Attributes:
        address: of this worker.
        options: the settings it was opened with.
    """

    def __init__(self, address: WorkerAddress, store: Store, options: Options) -> None:
        self.address = address
        self.options = options
        self._store = store
        self._runtime = Runtime(asyncio.get_running_loop(), options, str(address))
        self._incarnation = uuid.uuid4().hex
        self._groups: dict[str, list[CollectiveGroup]] = {}
        self._closing: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._heart: Heart | None = None
        self._connector: Connector | None = None

    def __repr__(self) -> str:
        groups = sum(map(len, self._groups.values()))
        return f"<Collective {self.address}: {groups} groups>"

    def create_collective_group(
        self,
        worker_addresses: Sequence[WorkerAddress | str],
        group_name: str | None = None,
    ) -> CollectiveGroup:
        """The group of these two workers: the cached one, or a new one.

        Touches no network: the link and the bulk routes come on first use. Either order of the
        addresses means the same group; ranks 0 and 1 follow the sorted addresses. Two groups of
        the same workers under different names are independent of each other.

        Args:
            worker_addresses: two addresses, or their strings; one of them is this worker's.
            group_name: any non-empty text; None for the one group that these two need most often.

        Raises:
            AddressError: not two addresses, the same one twice, this worker is not among them, or
                an empty name; the text says which is wrong.
            ClosedError: the runtime is closed.
            WrongLoopError: called from another event loop, or in a forked child.
        """
        members = self._members(worker_addresses)
        if group_name is not None and (not isinstance(group_name, str) or not group_name.strip()):
            raise AddressError(f"group name {group_name!r} is empty: give it text, or leave it out")
        self._runtime.check()
        cached = self._find(members, group_name or "")
        group = cached[0] if cached else self._make(members, group_name or "")
        group.claimed = True
        if group.state is GroupState.LOST:
            self._drop(group)  # its messages can be taken; the next call makes a new one
        return group

    async def aclose(self) -> None:
        """Close every group (pending sends leave first) and stop being found. Idempotent.

        Cancellation: the closing goes on in the background.
        """
        await asyncio.shield(self._close(drain=True))

    async def abort(self) -> None:
        """Close at once; whatever is pending fails with ClosedError. Idempotent.

        Cancellation: the closing goes on in the background.
        """
        await asyncio.shield(self._close(drain=False))

    # --- opening and closing ---

    async def _open(self) -> None:
        loop = self._runtime.loop
        await self._store.aopen()
        self._heart = Heart(self.options)
        self._listener = await Listener.open(
            self._store.host,
            incarnation=self._incarnation,
            accept=self._accept,
            connected=self._connected,
            heart=self._heart,
            options=self.options,
        )
        self._connector = Connector(
            self._store, self.address, self._incarnation, self._heart, self.options
        )
        await self._connector.publish(self._listener.endpoint)
        _current.setdefault(loop, []).append(self)

    def _close(self, *, drain: bool) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = self._runtime.loop.create_task(self._run_close(drain=drain))
        return self._closing

    async def _run_close(self, *, drain: bool) -> None:
        loop = self._runtime.loop
        if self in _current.get(loop, ()):
            _current[loop].remove(self)
            if not _current[loop]:
                del _current[loop]
        self._runtime.refuse(
            ClosedError(f"the runtime of {self.address} is closed: open a new one")
        )
        groups = [group for cached in self._groups.values() for group in cached]
        closings = [group.aclose() if drain else group.abort() for group in groups]
        try:
            await asyncio.gather(*closings)
            if self._connector is not None:
                await self._connector.withdraw()
        finally:
            if self._listener is not None:
                await self._listener.aclose()
            self._runtime.close()
            await self._store.aclose()

    # --- groups ---

    def _members(
        self, worker_addresses: Sequence[WorkerAddress | str]
    ) -> tuple[WorkerAddress, WorkerAddress]:
        if isinstance(worker_addresses, str):
            raise AddressError(f"{worker_addresses!r} is one string: give a list of two addresses")
        addresses = sorted(WorkerAddress.parse(address) for address in worker_addresses)
        if len(addresses) != 2:
            listed = ", ".join(map(str, addresses)) or "none"
            raise AddressError(
                f"a group has two members, and {len(addresses)} addresses were given: {listed}"
            )
        first, second = addresses
        if first == second:
            raise AddressError(f"{first} was given twice: a worker cannot form a group with itself")
        if self.address not in (first, second):
            raise AddressError(
                f"{self.address} is not a member of ({first}, {second}): a worker can only make "
                "groups that it is in"
            )
        return first, second

    def _find(
        self, members: tuple[WorkerAddress, WorkerAddress], name: str
    ) -> list[CollectiveGroup]:
        """The cached groups of these members: the last may be live, those before it have ended
        with messages in them that nobody has asked for yet."""
        return self._groups.setdefault(_key(members, name), [])

    def _make(
        self, members: tuple[WorkerAddress, WorkerAddress], name: str
    ) -> CollectiveGroup:
        key = _key(members, name)
        peer = members[1 - members.index(self.address)]

        async def connect() -> Link:
            assert self._connector is not None
            return await self._connector.connect(peer, key)

        group = CollectiveGroup(
            self._runtime,
            name=name or f"{members[0]}|{members[1]}",
            key=key,
            members=members,
            rank=members.index(self.address),
            connect=connect,
            ended=self._ended,
        )
        self._find(members, name).append(group)
        return group

    def _ended(self, group: CollectiveGroup) -> None:
        # A group that the peer made, filled and closed before anybody asked for it here is kept,
        # so that no message is lost.
        if group.state is GroupState.LOST and not group.claimed and group.unreceived:
            return
        self._drop(group)

    def _drop(self, group: CollectiveGroup) -> None:
        for key, cached in list(self._groups.items()):
            if group in cached:
                cached.remove(group)
                if not cached:
                    del self._groups[key]

    # --- being dialled ---

    def _accept(self, hello: Hello) -> Refusal | None:
        """Whether a link is welcome; called on the loop once the dialler has proved itself."""
        if self._closing is not None:
            return Refusal.CLOSED
        try:
            members, name = _read_key(hello)
        except (ValueError, TypeError):
            return Refusal.BAD_REQUEST
        if hello.recipient != str(self.address) or self.address not in members:
            return Refusal.NOT_A_MEMBER
        group = self._live(members, name)
        if group.state is GroupState.UP:
            if group.peer_incarnation == hello.incarnation:
                return Refusal.LINKED
            group.peer_restarted()
            self._live(members, name)
        elif group.state is GroupState.CONNECTING and group.rank == 0:
            return Refusal.CROSSED
        return None

    def _connected(self, link: Link) -> None:
        """A link that was accepted is up."""
        members, name = _read_key(link.peer)
        self._live(members, name).link_up(link, inbound=True)

    def _live(self, members: tuple[WorkerAddress, WorkerAddress], name: str) -> CollectiveGroup:
        cached = self._find(members, name)
        live = (GroupState.NEW, GroupState.CONNECTING, GroupState.UP)
        if cached and cached[-1].state in live:
            return cached[-1]
        return self._make(members, name)


def current(address: WorkerAddress | str | None = None) -> Collective:
    """The runtime that is open in the running loop.

    Args:
        address: which one, where several workers share the loop.

    Raises:
        UsageError: none is open here, or several and no address was given.
        RuntimeError: no loop is running.
    """
    opened = _current.get(asyncio.get_running_loop(), [])
    if address is not None:
        wanted = WorkerAddress.parse(address)
        opened = [collective for collective in opened if collective.address == wanted]
    if len(opened) == 1:
        return opened[0]
    if not opened:
        raise UsageError("no runtime is open in this loop: use 'async with aiocomm.open(...)'")
    names = ", ".join(str(collective.address) for collective in opened)
    raise UsageError(f"several runtimes are open in this loop ({names}): say which address")


@contextlib.asynccontextmanager
async def open(  # noqa: A001 - aiocomm.open reads as the built-in does
    address: WorkerAddress | str | None = None,
    *,
    store: Store | None = None,
    options: Options | None = None,
) -> AsyncIterator[Collective]:
    """Open the runtime of one worker in the running loop.

    Leaving the block drains and closes it; leaving by an exception drops what is pending.

    Args:
        address: of this worker, as ``"trainer:0"``; default: the environment's AIOCOMM_ADDRESS.
        store: the board on which the workers find one another; default: a ``TCPBoard`` at the
            environment's MASTER_ADDR and MASTER_PORT.
        options: the settings.

    Raises:
        AddressError: the address is not usable, or neither given nor in the environment.
        RendezvousError: the board cannot be reached.

    Cancellation: what was opened is closed again.
    """
    if address is None:
        address = os.environ.get("AIOCOMM_ADDRESS")
        if not address:
            raise AddressError("no address: give one, or set AIOCOMM_ADDRESS to 'name:rank'")
    parsed = WorkerAddress.parse(address)
    collective = Collective(
        parsed, store if store is not None else TCPBoard.from_env(), options or Options()
    )
    try:
        await collective._open()
        yield collective
    except BaseException:
        await collective.abort()
        raise
    await collective.aclose()


def _key(members: tuple[WorkerAddress, WorkerAddress], name: str) -> str:
    return json.dumps([str(members[0]), str(members[1]), name])


def _read_key(hello: Hello) -> tuple[tuple[WorkerAddress, WorkerAddress], str]:
    """Members and name of the group that a link is for.

    Raises:
        ValueError, TypeError: not of the form that ``_key`` writes, or not about sender and
            recipient.
    """
    first, second, name = json.loads(hello.group)
    members = (WorkerAddress.parse(first), WorkerAddress.parse(second))
    if not members[0] < members[1] or {first, second} != {hello.sender, hello.recipient}:
        raise ValueError(f"{hello.group!r} is no group of {hello.sender} and {hello.recipient}")
    if not isinstance(name, str):
        raise TypeError("the group name is not text")
    return members, name
