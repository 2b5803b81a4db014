"""The messages of a sending lane that a bulk route has, until it is done with them.

Tells the lane how each ends. When the direction is over, those that were allowed to go on still end
well if their route says so in time. Knows neither order nor envelopes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..errors import AiocommError, RouteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..entries import Outgoing


class Moves:
    """Bulk that is on its way.

    Args:
        ended: told of each, once: the message, the name of its route, and its error or None.
    """

    def __init__(self, ended: Callable[[Outgoing, str, BaseException | None], None]) -> None:
        self._ended = ended
        self._moving: dict[Outgoing, tuple[asyncio.Future[None], str]] = {}

    def __contains__(self, entry: Outgoing) -> bool:
        return entry in self._moving

    def add(self, entry: Outgoing, route: str, moved: asyncio.Future[None]) -> None:
        """A route has this message; it may be done with it already."""
        if moved.done():
            self._ended(entry, route, _error(moved))
            return
        self._moving[entry] = moved, route

        def over(moved: asyncio.Future[None]) -> None:
            error = _error(moved)  # asked for even where nobody waits: it is no news then
            if self._moving.pop(entry, None) is not None:
                self._ended(entry, route, error)

        moved.add_done_callback(over)

    async def settle(self, timeout: float, error: BaseException) -> None:
        """Wait for what is on its way, at most so many seconds; what is left then has failed.

        Cancellation: safe, what is left fails all the same.
        """
        try:
            late = [moved for entry, (moved, _) in self._moving.items() if entry.owner is not None]
            if late:
                await asyncio.wait(late, timeout=timeout)
        finally:
            left, self._moving = self._moving, {}
            for entry, (_, route) in left.items():
                self._ended(entry, route, error)


def _error(moved: asyncio.Future[None]) -> BaseException | None:
    return None if moved.cancelled() else moved.exception()


def as_route_error(error: BaseException) -> AiocommError:
    """An error of ours as it is, any other as a RouteError that chains it."""
    if isinstance(error, AiocommError):
        return error
    wrapped = RouteError(f"a transfer failed: {error}")
    wrapped.__cause__ = error
    return wrapped
