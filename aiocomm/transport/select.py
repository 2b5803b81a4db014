"""Which bulk routes there are, in which order they are tried, and how one is made.

The one place that a new backend is entered in. Small messages never come here: they ride in
their envelope, and between two members of one process every message is handed over by the link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ProtocolError
from .gloo import GlooRoute
from .stream import StreamRoute

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from .base import Link, Route

ROUTES = (GlooRoute.name, StreamRoute.name)
"""Names of all bulk routes for CPU memory, the best first."""


def candidates(pinned: str | None) -> tuple[str, ...]:
    """The routes to propose, in order: the pinned one alone, or all."""
    return (pinned,) if pinned is not None else ROUTES


def make_route(
    name: str,
    *,
    label: str,
    link: Link,
    loop: asyncio.AbstractEventLoop,
    sending: bool,
    publish: Callable[[str, bytes], None],
    stall_timeout: float,
) -> Route:
    """Make one end of a route, not set up yet.

    Args:
        name: one of ``ROUTES``.
        label: names the direction, the same at both ends.
        link: the control link of the two.
        loop: the loop of the runtime.
        sending: which end it is.
        publish: hands a key and its value to the peer's end.
        stall_timeout: as in ``Options``.

    Raises:
        ProtocolError: the peer proposed a route that this version does not have.
    """
    if name == GlooRoute.name:
        return GlooRoute(
            label,
            sending=sending,
            local_host=link.local_host,
            loop=loop,
            publish=publish,
            stall_timeout=stall_timeout,
        )
    if name == StreamRoute.name:
        return StreamRoute(link, loop, sending=sending)
    raise ProtocolError(f"the peer proposes a route {name!r} that is not known here")
