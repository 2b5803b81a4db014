"""The runtime through which the channels of one event loop reach their actors.

There is one for each loop, whatever else is open there: it is made for the first channel, shared by
all, and closed with the last. It is not among those that ``aiocomm.current`` finds, since it is
nobody's worker. When a loop ends first, ``asyncio.run`` closes it, as every asynchronous generator.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..collective import hide
from ..collective import open as open_runtime
from .introductions import CLIENT, Introductions, new_address

if TYPE_CHECKING:
    from ..collective import Collective

_places: dict[asyncio.AbstractEventLoop, Place] = {}


class Place:
    """A runtime, and how many channels use it.

    Attributes:
        store: whom it knows.
        collective: the runtime itself, once it is open.
    """

    collective: Collective

    def __init__(self, host: str) -> None:
        self.store = Introductions(new_address(CLIENT), host)
        self.users = 0
        self._context: Any = open_runtime(self.store.address, store=self.store)
        self.opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        self.collective = await self._context.__aenter__()
        hide(self.collective)

    async def close(self) -> None:
        """Close the runtime, if it was opened."""
        await asyncio.wait([self.opening])
        if not self.opening.cancelled() and self.opening.exception() is None:
            await self._context.__aexit__(None, None, None)


async def enter(host: str) -> Place:
    """The place of the running loop; to be left again.

    Args:
        host: numeric address of this process, for the runtime if there is none yet.

    Raises:
        NetworkError: the runtime cannot be opened.

    Cancellation: as if it had not been called.
    """
    loop = asyncio.get_running_loop()
    for other in [*_places]:  # other threads come and go here with loops of their own
        if other.is_closed():
            _places.pop(other, None)
    place = _places.get(loop)
    if place is None:
        place = _places[loop] = Place(host)
    place.users += 1
    try:
        await asyncio.shield(place.opening)
    except BaseException:
        await leave(place)
        raise
    return place


async def leave(place: Place) -> None:
    """Let go of a place; the last one closes it.

    Cancellation: it is closed all the same, by whoever ends the loop.
    """
    place.users -= 1
    if not place.users:
        loop = asyncio.get_running_loop()
        if _places.get(loop) is place:
            del _places[loop]
        await place.close()
