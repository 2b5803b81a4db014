"""What went where: counters of messages and bytes by route, and what a group shows of itself.

The counters are plain and unlocked: they belong to the loop. Snapshots are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class RouteCount:
    """Messages and payload bytes that one route carried in one direction."""

    messages: int = 0
    nbytes: int = 0


class Traffic:
    """Counters of one direction, by the name of the route."""

    __slots__ = ("_routes",)

    def __init__(self) -> None:
        self._routes: dict[str, RouteCount] = {}

    def count(self, route: str, nbytes: int) -> None:
        """Count one message of that many payload bytes."""
        entry = self._routes.get(route)
        if entry is None:
            entry = self._routes[route] = RouteCount()
        entry.messages += 1
        entry.nbytes += nbytes

    def snapshot(self) -> dict[str, RouteCount]:
        """A copy of the counters."""
        return {name: RouteCount(c.messages, c.nbytes) for name, c in self._routes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """A group at one moment.

    ``sent`` and ``received`` map the name of a route (``"memory"``, ``"link"``, ``"gloo"``) to the
    messages it has carried and their bytes: those of the tensors and buffers in them and of what
    else was packed, frame headers not counted. A message counts as sent when its memory is the
    caller's again, as received when a ``recv`` gets it. ``bulk_route`` is how large messages leave,
    ``device_route`` how those on a device do; None before the first one.
    """

    group: str
    peer: str
    state: str
    sent: Mapping[str, RouteCount] = field(default_factory=dict)
    received: Mapping[str, RouteCount] = field(default_factory=dict)
    pending_sends: int = 0
    pending_recvs: int = 0
    unreceived: int = 0
    bulk_route: str | None = None
    device_route: str | None = None
