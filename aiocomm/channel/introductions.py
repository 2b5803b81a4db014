"""How a client and a channel's actor learn of each other without a board.

The call by which a client joins brings back the record of the actor's runtime, where others would
read it on a board; so a channel needs no second actor, and there is none whose death could matter.
The actor is told nothing of the client, and waits until the client dials. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from dataclasses import dataclass

from ..errors import RendezvousTimeout, UsageError
from ..rendezvous.base import Store, check_key, check_timeout, check_value

# Of two workers that look for each other the one that sorts first has its way: the client, which
# alone can dial.
CLIENT, SERVER = "channel-client", "channel-server"


def new_address(kind: str) -> str:
    """An address for a runtime of this kind."""
    return f"{kind}-{uuid.uuid4().hex[:12]}:0"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a runtime would have written on a board, and the address that it has."""

    address: str
    key: str
    record: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a client that joins: whom it has joined, and the bounds of the channel."""

    server: Introduction
    maxsize: int
    max_bytes: int


class Introductions(Store):
    """The records that one runtime was told, and its own.

    Args:
        address: of the runtime.
        host: numeric address at which the others reach this process.
    """

    def __init__(self, address: str, host: str) -> None:
        self.address = address
        self._host = host
        self._records: dict[str, bytes] = {}
        self._uses: Counter[str] = Counter()  # of a record that was told, by several channels' ends
        self._own: str | None = None
        self._changed = asyncio.Event()

    @property
    def host(self) -> str:
        """The address that was given to the constructor."""
        return self._host

    @property
    def own(self) -> Introduction:
        """What others are to be told of this runtime.

        Raises:
            UsageError: it is not open.
        """
        if self._own is None:
            raise UsageError(f"{self.address} is not open")
        return Introduction(self.address, self._own, self._records[self._own])

    def introduce(self, other: Introduction) -> None:
        """Take in what another runtime says of itself."""
        self._records[other.key] = other.record
        self._uses[other.key] += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget(self, other: Introduction) -> None:
        """It is not needed any more; to be called once for each ``introduce``."""
        self._uses[other.key] -= 1
        if self._uses[other.key] <= 0:
            del self._uses[other.key]
            self._records.pop(other.key, None)

    async def aopen(self) -> None:
        """See `Store.aopen`."""

    async def aclose(self) -> None:
        """See `Store.aclose`."""

    async def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        check_key(key)
        check_timeout(timeout)
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                while key not in self._records:
                    await self._changed.wait()
        except TimeoutError as error:
            raise RendezvousTimeout(
                f"nobody introduced {key!r} to {self.address} within {timeout:g} s"
            ) from error
        return self._records[key]

    async def set(self, key: str, value: bytes) -> None:
        """See `Store.set`: what a runtime writes is its own record."""
        check_key(key)
        check_value(key, value)
        self._own = key
        self._records[key] = value

    async def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        check_key(key)
        return self._records.pop(key, None) is not None
