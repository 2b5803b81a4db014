"""One worker's being there for others: the board, the listener, the record, and the dials.

Opened once, whoever asks first: before the worker is used (``aiocomm.open``), or behind it, when
calls have to take their place in the order before anything can be awaited (an actor). An opening
that failed is begun again by the next one who needs it. Knows nothing of groups.

Rejected: a second, lazy kind of ``Collective`` (two ways to open are two ways to fail).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING

from .connect import Connector
from .errors import AiocommError, ClosedError
from .loops import join
from .transport.heart import Heart
from .transport.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from .address import WorkerAddress
    from .errors import Refusal
    from .options import Options
    from .rendezvous.base import Store
    from .transport.base import Hello, Link

log = logging.getLogger("aiocomm")


class Presence:
    """The board, the listener and the dials of one worker in its loop.

    Args:
        store: the board; opened and closed here, as one more of its users.
        address: the worker's.
        accept: asked for every peer that dials; see ``Listener.open``.
        connected: given every link that a peer dialled.
        options: the settings.
    """

    def __init__(
        self,
        store: Store,
        address: WorkerAddress,
        *,
        accept: Callable[[Hello], Refusal | None],
        connected: Callable[[Link], None],
        options: Options,
    ) -> None:
        self._store = store
        self._address = address
        self._accept = accept
        self._connected = connected
        self._options = options
        self._incarnation = uuid.uuid4().hex
        self._opening: asyncio.Task[Connector] | None = None
        self._listener: Listener | None = None
        self._closed = False

    async def open(self) -> None:
        """Be found by others from here on, or join the opening that has begun.

        Raises:
            RendezvousError: the board cannot be reached.
            NetworkError: no address to listen at.
            ClosedError: closed on this side.

        Cancellation: the opening goes on for others who wait for it; ``aclose`` ends it.
        """
        await join(self._begin(), self._ended)

    def begin(self) -> None:
        """Open without waiting; a failure is logged, and the next who needs it tries again."""
        self._begin().add_done_callback(self._report)

    async def connect(self, peer: WorkerAddress, group: str) -> Link:
        """Open where that is still to be done, and dial the peer.

        Raises: as ``open`` and ``Connector.connect``.

        Cancellation: safe; a dial under way is dropped.
        """
        try:
            connector = await join(self._begin(), self._ended)
        except AiocommError as error:
            # One for each who waits: they write their group and peer into it.
            raise error.again() from error
        return await connector.connect(peer, group)

    async def aclose(self) -> None:
        """Stop listening and leave the board. Idempotent.

        Cancellation: listening has stopped already.
        """
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is None:
            return
        opening.cancel()
        await asyncio.wait([opening])
        if self._listener is not None:
            try:
                await self._listener.aclose()
            finally:
                self._listener = None
                await self._store.aclose()

    def _begin(self) -> asyncio.Task[Connector]:
        if self._closed:
            raise self._ended()
        opening = self._opening
        if opening is None or _failed(opening):
            opening = asyncio.get_running_loop().create_task(self._open())
            self._opening = opening
        return opening

    def _ended(self) -> ClosedError:
        return ClosedError(f"the runtime of {self._address} is closed: open a new one")

    async def _open(self) -> Connector:
        await self._store.aopen()
        listener = None
        try:
            heart = Heart(self._options)
            listener = await Listener.open(
                self._store.host,
                incarnation=self._incarnation,
                accept=self._accept,
                connected=self._connected,
                heart=heart,
                options=self._options,
            )
            connector = Connector(
                self._store, self._address, self._incarnation, heart, self._options
            )
            await connector.publish(listener.endpoint)
        except BaseException:
            try:
                if listener is not None:
                    await listener.aclose()
            finally:
                await self._store.aclose()
            raise
        self._listener = listener
        return connector

    def _report(self, opening: asyncio.Task[Connector]) -> None:
        if not opening.cancelled() and (error := opening.exception()) is not None:
            log.warning(
                "%s is not found by others yet, its calls try again: %s", self._address, error
            )


def _failed(opening: asyncio.Task[Connector]) -> bool:
    return opening.done() and (opening.cancelled() or opening.exception() is not None)
