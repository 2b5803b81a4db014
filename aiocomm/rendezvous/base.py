"""The contract of a board: an async key-value store on which workers find one another.

It may not know what the keys mean, nor by what a board is carried (a torch store, an actor,
memory). Limits on keys and values stand here and not in each board, so that what works on one works
on all. Rejected: a synchronous contract with the waiting left to the caller (each would bring its
own thread per wait), and watching a key for changes (nobody needs it; waiting until it exists is
enough).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from ..errors import UsageError
from ..options import MIB

if TYPE_CHECKING:
    from types import TracebackType

MAX_KEY_BYTES = 4096
"""Longest key, in bytes of UTF-8."""

MAX_VALUE_BYTES = 4 * MIB
"""Largest value, in bytes. Boards are for addresses, not for data (torch's store ends at 8 MiB)."""


class Store(ABC):
    """An async key-value board shared by the workers of one job.

    Opening is counted: several runtimes of one process, in one event loop or in several, may share
    one board, and the last ``aclose`` ends it. A board belongs to the process that opened it.
    """

    @property
    @abstractmethod
    def host(self) -> str:
        """Numeric address by which the other workers of this board reach this process.

        Raises:
            UsageError: the board is not open.
        """

    @abstractmethod
    async def aopen(self) -> None:
        """Connect, or count one more user of a board that is connected.

        Raises:
            RendezvousTimeout: no board answered in time.
            RendezvousError: the board cannot be reached or served.

        Cancellation: as if it had not been called.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Count one user less; the last one disconnects and fails what still waits (ClosedError).

        Bounded, idempotent, and it never raises because of the board's state.

        Cancellation: the board closes all the same.
        """

    @abstractmethod
    async def get(self, key: str, timeout: float) -> bytes:
        """Return the value of a key, waiting until it exists.

        Args:
            key: not empty, at most 4096 bytes of UTF-8, without NUL.
            timeout: seconds to wait; 0 looks once.

        Raises:
            RendezvousTimeout: the key did not appear in time; the text names both.
            RendezvousError: the board is gone.
            ClosedError: the board was closed on this side.
            UsageError: an argument is not usable, or the board is not open.

        Cancellation: nothing is left behind, and nothing is consumed.
        """

    @abstractmethod
    async def set(self, key: str, value: bytes) -> None:
        """Write a value of at most 4 MiB; whoever waits for the key is woken.

        Raises:
            RendezvousError: the board is gone.
            ClosedError: the board was closed on this side.
            UsageError: an argument is not usable, or the board is not open.

        Cancellation: the value may have been written or not.
        """

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Delete a key; True if it existed.

        Raises:
            RendezvousError: the board is gone.
            ClosedError: the board was closed on this side.
            UsageError: the key is not usable, or the board is not open.

        Cancellation: the key may have been deleted or not.
        """

    async def __aenter__(self) -> Self:
        await self.aopen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def check_key(key: str) -> None:
    """Refuse a key that no board takes.

    Raises:
        UsageError: not a string, empty, too long, with a NUL, or not UTF-8.
    """
    if not isinstance(key, str) or not key:
        raise UsageError(f"board key {key!r} is not usable: give a non-empty string")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"board key {key!r} is not usable: it is not UTF-8 text") from error
    if size > MAX_KEY_BYTES:
        raise UsageError(f"board key {key[:40]!r}... has {size} bytes: at most {MAX_KEY_BYTES} fit")
    if "\0" in key:
        raise UsageError(f"board key {key!r} is not usable: it contains a NUL character")


def check_value(key: str, value: bytes) -> None:
    """Refuse a value that no board takes.

    Raises:
        UsageError: not bytes, or too large.
    """
    if not isinstance(value, bytes):
        raise UsageError(f"value for board key {key!r} is {type(value).__name__}: give bytes")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(
            f"value for board key {key!r} has {len(value)} bytes: at most {MAX_VALUE_BYTES} fit; "
            "a board is for addresses, send data through a group"
        )


def check_timeout(timeout: float) -> None:
    """Refuse what is not a time-out in seconds (infinity is one).

    Raises:
        UsageError: not a number, NaN, negative, or too large for a float.
    """
    try:
        usable = isinstance(timeout, int | float) and not math.isnan(timeout)
    except OverflowError as error:
        raise UsageError(
            f"a time-out of {int(timeout).bit_length()} bits is not usable: give a smaller one"
        ) from error
    if isinstance(timeout, bool) or not usable:
        raise UsageError(f"time-out {timeout!r} is not usable: give seconds >= 0")
    if timeout < 0:
        raise UsageError(f"time-out {timeout!r} is negative: give seconds >= 0")
