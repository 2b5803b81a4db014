"""One worker's runtime: it is found by the others, and makes and caches its groups.

A group's link is dialled by whichever side needs it first. When both dial at once, the link that
rank 0 dials wins and the other one is refused; the refused side waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .address import WorkerAddress
from .errors import AddressError, ClosedError, Refusal, UsageError
from .group import CollectiveGroup
from .options import Options
from .presence import Presence
from .rendezvous.tcp import TCPBoard
from .runtime import Runtime
from .session import LIVE, Session, State
from .transport.handshake import MAX_TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .rendezvous.base import Store
    from .transport.base import Hello, Link

Members = tuple[WorkerAddress, WorkerAddress]
"""The two addresses of a group, sorted."""

_current: dict[asyncio.AbstractEventLoop, list[Collective]] = {}


@dataclass(slots=True, eq=False)
class _Cached:
    """A group and what is behind it; ``claimed`` once anybody here has asked for it."""

    group: CollectiveGroup
    session: Session
    key: str
    claimed: bool = False


class Collective:
    """The runtime of one worker in one event loop; made by ``aiocomm.open``.

    Attributes:
        address: of this worker.
        options: the settings it was opened with.
    """

    def __init__(self, address: WorkerAddress, store: Store, options: Options) -> None:
        self.address = address
        self.options = options
        self._runtime = Runtime(asyncio.get_running_loop(), options, str(address))
        self._groups: dict[str, list[_Cached]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # sessions that are being taken down
        self._closing: asyncio.Task[None] | None = None
        self._presence = Presence(
            store,
            address,
            accept=self._accept,
            connected=self._connected,
            options=options,
        )

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
            group_name: any non-empty text, some 1000 letters at most; None for the one group that
                these two need most often.

        Raises:
            AddressError: not two addresses, the same one twice, this worker is not among them, or
                a name that is empty, too long or no UTF-8; the text says which is wrong.
            ClosedError: the runtime is closed.
            WrongLoopError: called from another event loop, or in a forked child.
        """
        members = self._members(worker_addresses)
        if group_name is not None and (not isinstance(group_name, str) or not group_name.strip()):
            raise AddressError(f"group name {group_name!r} is empty: give it text, or leave it out")
        check_names(members, group_name or "")
        self._runtime.check()
        for cached in self._find(members, group_name or ""):
            if cached.session.state in LIVE or cached.session.state is State.LOST:
                break
        else:
            cached = self._make(members, group_name or "")
        cached.claimed = True
        if cached.session.state is State.LOST:
            self._drop(cached)  # its messages can be taken; the next call makes a new group
        return cached.group

    async def ready(self) -> None:
        """Be found by others; done already when ``aiocomm.open`` has given this one.

        Raises:
            RendezvousError, NetworkError: the board, or an address to listen at, cannot be had.
            ClosedError: the runtime is closed.

        Cancellation: safe; what was begun goes on for the next call.
        """
        self._runtime.check()
        await self._presence.open()

    async def aclose(self) -> None:
        """Close every group (pending sends leave first) and stop being found. Idempotent.

        Raises:
            WrongLoopError: called in another event loop.

        Cancellation: the closing goes on in the background.
        """
        self._runtime.check_loop()
        await asyncio.shield(self._close(drain=True))

    async def abort(self) -> None:
        """Close at once; whatever is pending fails with ClosedError. Idempotent.

        Raises:
            WrongLoopError: called in another event loop.

        Cancellation: the closing goes on in the background.
        """
        self._runtime.check_loop()
        await asyncio.shield(self._close(drain=False))

    # --- opening and closing ---

    async def _open(self) -> None:
        await self._presence.open()
        self._become_current()

    def _become_current(self) -> None:
        _current.setdefault(self._runtime.loop, []).append(self)

    def _close(self, *, drain: bool) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = self._runtime.loop.create_task(self._run_close(drain=drain))
        elif not drain:  # cuts the draining short
            for cached in self._cached():
                cached.session.close(drain=False)
        return self._closing

    async def _run_close(self, *, drain: bool) -> None:
        hide(self)
        self._runtime.refuse(
            ClosedError(f"the runtime of {self.address} is closed: open a new one")
        )
        try:
            await asyncio.gather(*(each.session.close(drain=drain) for each in self._cached()))
            await asyncio.gather(*self._ending)
        finally:
            try:
                await self._presence.aclose()
            finally:
                self._runtime.close()

    # --- groups ---

    def _members(self, worker_addresses: Sequence[WorkerAddress | str]) -> Members:
        if isinstance(worker_addresses, str) or not isinstance(worker_addresses, Iterable):
            raise AddressError(f"{worker_addresses!r} is no list: give one of two addresses")
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

    def _cached(self) -> list[_Cached]:
        return [cached for siblings in self._groups.values() for cached in siblings]

    def _find(self, members: Members, name: str) -> list[_Cached]:
        return self._groups.setdefault(_key(members, name), [])

    def _make(self, members: Members, name: str) -> _Cached:
        key = _key(members, name)
        rank = members.index(self.address)
        peer = members[1 - rank]
        shown = name or f"{members[0]}|{members[1]}"

        session = Session(
            self._runtime,
            name=shown,
            peer=str(peer),
            rank=rank,
            connect=lambda: self._presence.connect(peer, key),
            ended=lambda ending: self._ended(cached, ending),
        )
        group = CollectiveGroup(self._runtime, session, name=shown, members=members, rank=rank)
        cached = _Cached(group, session, key)
        self._find(members, name).append(cached)
        return cached

    def _ended(self, cached: _Cached, ending: asyncio.Task[None]) -> None:
        # A group that the peer made, filled and closed before anybody asked for it here is kept,
        # so that no message is lost.
        session = cached.session
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        if session.state is not State.LOST or cached.claimed or not session.receiving.unreceived:
            self._drop(cached)

    def _drop(self, cached: _Cached) -> None:
        siblings = self._groups.get(cached.key, [])
        if cached in siblings:
            siblings.remove(cached)
        if not siblings:
            self._groups.pop(cached.key, None)

    # --- being dialled ---

    def _accept(self, hello: Hello) -> Refusal | None:
        """Whether a link is welcome; called on the loop once the dialler has proved itself."""
        try:
            members, name = _read_key(hello)
        except (ValueError, TypeError, RecursionError):
            return Refusal.BAD_REQUEST
        if hello.recipient != str(self.address) or self.address not in members:
            return Refusal.NOT_A_MEMBER
        for cached in self._find(members, name):
            session = cached.session
            if session.state is State.UP:
                if session.peer_incarnation == hello.incarnation:
                    return Refusal.LINKED
                session.peer_restarted()
                break
            if session.dialling and cached.group.rank == 0:
                return Refusal.CROSSED
            if session.wants_link:
                return None
        return None if self._closing is None else Refusal.CLOSED

    def _connected(self, link: Link) -> None:
        """A link that was accepted is up."""
        members, name = _read_key(link.peer)
        for cached in self._find(members, name):
            if cached.session.wants_link:
                break
        else:
            cached = self._make(members, name)
        cached.session.link_up(link, inbound=True)


def current(address: WorkerAddress | str | None = None) -> Collective:
    """The runtime that is open in the running loop.

    Args:
        address: which one, where several workers share the loop.

    Raises:
        UsageError: none is open here, several and no address was given, or no loop is running.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        raise UsageError("no event loop is running here, and a runtime is open in one")
    opened = _current.get(loop, [])
    if address is not None:
        wanted = WorkerAddress.parse(address)
        opened = [collective for collective in opened if collective.address == wanted]
    if len(opened) == 1:
        return opened[0]
    if not opened:
        raise UsageError("no runtime is open in this loop: use 'async with aiocomm.open(...)'")
    names = ", ".join(str(collective.address) for collective in opened)
    raise UsageError(f"several runtimes are open in this loop ({names}): say which address")


def hide(collective: Collective) -> None:
    """Let ``current`` not find a runtime: it is closed, or no worker's."""
    loop = collective._runtime.loop
    if collective in _current.get(loop, ()):
        _current[loop].remove(collective)
        if not _current[loop]:
            del _current[loop]


@contextlib.asynccontextmanager
async def open(
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
    async with store if store is not None else TCPBoard.from_env() as board:
        collective = Collective(parsed, board, options or Options())
        try:
            await collective._open()
            yield collective
        except BaseException:
            await collective.abort()
            raise
        await collective.aclose()


def open_soon(address: WorkerAddress, *, store: Store, options: Options) -> Collective:
    """The runtime of one worker at once: what it needs is opened behind the calls that are made.

    For code whose calls must take their place in the order before it can await anything. A failed
    opening fails the works that need it, and is begun again for the next ones. Close it with
    ``aclose`` or ``abort``.

    Raises:
        RuntimeError: no loop is running.
    """
    collective = Collective(address, store, options)
    collective._become_current()
    collective._presence.begin()
    return collective


def _key(members: Members, name: str) -> str:
    return json.dumps([str(members[0]), str(members[1]), name])


def check_names(members: Members, name: str = "") -> None:
    """Refuse a group that no link could be agreed on for.

    Raises:
        AddressError: its names cannot travel in a hello.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise AddressError(f"group name {name!r} is not UTF-8 text: give it other text") from error
    size = len(json.dumps(_key(members, name)))
    if size > MAX_TEXT:
        names = [each for each in (name, members[0].name, members[1].name) if each]
        raise AddressError(
            f"the names of a group and of its members take {size} bytes as JSON and {MAX_TEXT} "
            f"fit: give shorter ones than {', '.join(f'{each[:40]!r}...' for each in names)}"
        )


def _read_key(hello: Hello) -> tuple[Members, str]:
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
