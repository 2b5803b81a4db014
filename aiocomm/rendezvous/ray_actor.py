"""The inside of the actors: of one that carries a Ray board, and of one that holds an NCCL id.

They run in worker processes of Ray on one event loop, so nothing needs a lock; they may not know
what keys mean. They are pickled by value, so their process does not import aiocomm and torch with
it: this file must stay with the standard library, and what travels is made of built-in types.

Nobody polls a board. A client says by ``want`` which keys it wants; one long call of its own,
``listen``, is answered when there is news for it. So however many keys a process waits for, it
occupies one call (F33: Ray runs 1000 at a time unless told otherwise, and the next ``set`` would
queue behind them). A listen is answered with nothing after ``LISTEN`` seconds, and a client that
does not listen again within ``SLICE`` is dropped: Ray does not say when a caller dies.

Calls of one client may overtake one another. Whatever follows from their order carries a number of
the client's, and the higher one counts.

Rejected: a call for each waiting ``get`` (F33), a pub/sub of Ray (none is public).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypedDict

LISTEN = 2.0
"""Seconds after which a listen without news is answered: a process that is to end in good order
waits for its calls first, and Ray kills it after 5 s, without a goodbye to its peers."""

SLICE = 20.0
"""Seconds after which a client that does not listen is dropped."""


class News(TypedDict):
    """What a listen brings.

    ``found`` has values by key; ``lost`` the version of a write of this client, by key, that was
    overwritten or deleted by another.
    """

    found: dict[str, bytes]
    lost: dict[str, int]


class Write(TypedDict):
    """A value, and when it was written: versions grow from write to write, and actor to actor."""

    value: bytes
    version: int


@dataclass(slots=True)
class _Entry:
    value: bytes
    version: int
    client: str
    number: int


@dataclass(slots=True)
class _Client:
    found: dict[str, bytes] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: dict[str, int] = field(default_factory=dict)
    listening: int = 0
    heard: float = 0.0


class BoardActor:
    """A board; every method is a call of a client."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._clients: dict[str, _Client] = {}
        self._waiting: dict[str, set[str]] = {}
        self._version = 0
        self._over = False
        self._reaper: asyncio.Task[None] | None = None

    async def join(self, client: str, writes: dict[str, Write], wanted: dict[str, int]) -> bool:
        """Enter a client, with what it wrote before; False if this actor is over."""
        if self._over:
            return False
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        self._drop(client)
        self._clients[client] = mine = _Client(heard=_now())
        for key, write in writes.items():
            entry = self._entries.get(key)
            if entry is None or entry.version < write["version"]:
                self._version = max(self._version, write["version"])
                self._write(key, _Entry(write["value"], write["version"], client, 0))
            elif entry.client != client:  # somebody wrote it while this client was away
                mine.lost[key] = write["version"]
                mine.woken.set()
        for key, number in wanted.items():
            self._want(client, key, True, number)
        return True

    async def listen(self, client: str) -> News | None:
        """Wait for news; None if this client has to join (again)."""
        mine = self._clients.get(client)
        if mine is None:
            return None
        mine.listening += 1
        try:
            async with asyncio.timeout(LISTEN):
                await mine.woken.wait()
        except TimeoutError:
            pass
        finally:
            mine.listening -= 1
            mine.heard = _now()
        news: News = {"found": mine.found, "lost": mine.lost}
        mine.found, mine.lost = {}, {}
        mine.woken.clear()
        return news

    async def want(self, client: str, wanted: dict[str, bool], number: int) -> None:
        """Tell the client when a key is there, which may be now; or do so no more.

        Args:
            client: who.
            wanted: whether each of these keys is wanted.
            number: of this call.
        """
        mine = self._clients.get(client)
        for key, wants in wanted.items() if mine is not None else ():
            self._want(client, key, wants, number)

    async def look(self, key: str) -> bytes | None:
        """The value, or None."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    async def set(self, client: str, key: str, value: bytes, number: int) -> int:
        """Write, and tell those who wait; the version."""
        before = self._entries.get(key)
        if before is None or before.client != client or before.number < number:
            self._version += 1
            self._write(key, _Entry(value, self._version, client, number))
        return self._entries[key].version

    async def delete(self, client: str, key: str) -> bool:
        """Delete; whether there was something."""
        self._tell_lost(key, client)
        return self._entries.pop(key, None) is not None

    async def leave(self, client: str) -> bool:
        """Take a client out; True if it was the last one, and is to end this actor."""
        self._drop(client)
        self._over = self._over or not self._clients
        return self._over

    def _write(self, key: str, entry: _Entry) -> None:
        self._tell_lost(key, entry.client)
        self._entries[key] = entry
        for client in self._waiting.pop(key, ()):
            waiter = self._clients[client]
            waiter.wanted.pop(key, None)
            waiter.found[key] = entry.value
            waiter.woken.set()

    def _tell_lost(self, key: str, client: str) -> None:
        """To whoever wrote what stands there, unless it is this client."""
        before = self._entries.get(key)
        writer = None if before is None else self._clients.get(before.client)
        if before is not None and writer is not None and before.client != client:
            writer.lost[key] = before.version
            writer.woken.set()

    def _want(self, client: str, key: str, wants: bool, number: int) -> None:
        mine = self._clients[client]
        if mine.wanted.get(key, 0) > number:
            return  # a later word has overtaken this one
        self._unwait(client, mine, key)
        entry = self._entries.get(key)
        if wants and entry is None:
            mine.wanted[key] = number
            self._waiting.setdefault(key, set()).add(client)
        elif wants and entry is not None:
            mine.found[key] = entry.value
            mine.woken.set()

    def _unwait(self, client: str, mine: _Client, key: str) -> None:
        mine.wanted.pop(key, None)
        waiting = self._waiting.get(key, set())
        waiting.discard(client)
        if not waiting:
            self._waiting.pop(key, None)

    def _drop(self, client: str) -> None:
        mine = self._clients.pop(client, None)
        if mine is not None:
            for key in list(mine.wanted):
                self._unwait(client, mine, key)
            mine.woken.set()  # its listen, if one is left, ends

    async def _reap(self) -> None:
        """Drop the clients that died; end with the last one."""
        import ray

        while True:
            await asyncio.sleep(SLICE)
            horizon = _now() - SLICE
            for client, mine in list(self._clients.items()):
                if not mine.listening and mine.heard < horizon:
                    self._drop(client)
            if not self._clients:
                self._over = True
                ray.kill(ray.get_runtime_context().current_actor)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Offer(TypedDict):
    """What a store of an NCCL id says to a rank.

    ``world_size`` is None if the store was not made by ``create_nccl_communicator_in_ray``;
    ``spent`` if this rank has had its communicator: then the id is that of an earlier run.
    """

    nccl_id: object
    world_size: int | None
    spent: bool


class IDStoreActor:
    """Holds the id of one NCCL communicator while its ranks come.

    Args:
        nccl_id: as the backend made it.
        world_size: how many ranks there are, where somebody counts them.
    """

    def __init__(self, nccl_id: object, world_size: int | None = None) -> None:
        self._nccl_id = nccl_id
        self._world_size = world_size
        self._made: set[int] = set()
        self._complete = asyncio.Event()

    async def get(self) -> object:
        """The id."""
        return self._nccl_id

    async def offer_nccl_id(self, rank: int) -> Offer:
        """The id, and whether this rank should take it."""
        spent = rank in self._made
        return {"nccl_id": self._nccl_id, "world_size": self._world_size, "spent": spent}

    async def made(self, rank: int) -> bool:
        """The rank has its communicator; True if all have, and the caller is to end this actor."""
        self._made.add(rank)
        if len(self._made) == self._world_size:
            self._complete.set()
        return self._complete.is_set()

    async def wait_complete(self) -> None:
        """Wait until all ranks have theirs."""
        await self._complete.wait()
