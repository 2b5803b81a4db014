"""How a worker is found by the others, and how it reaches them: the board, then a dial.

A record on the board is where a worker can be dialled. A record may be stale (its process died, a
successor is about to write its own), and the other side may be dialling at the same moment; so a
dial is tried again, with a growing pause, as long as there is hope.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from .errors import (
    AuthenticationError,
    HandshakeError,
    NetworkError,
    PeerLostError,
    Refusal,
    RefusedError,
    RendezvousTimeout,
)
from .transport.base import Hello
from .transport.endpoint import Endpoint
from .transport.link import dial

if TYPE_CHECKING:
    from .address import WorkerAddress
    from .options import Options
    from .rendezvous.base import Store
    from .transport.base import Link
    from .transport.heart import Heart

log = logging.getLogger("aiocomm")

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0
"""Seconds between two dials; doubled each time."""

PATIENCE = 10.0
"""Seconds of waiting for a peer to appear after which a warning names it."""

_HOPEFUL = (Refusal.CROSSED, Refusal.LINKED, Refusal.STALE, Refusal.CLOSED)


class Connector:
    """Publishes one worker, and dials others for it.

    Args:
        store: the board.
        address: this worker's.
        incarnation: names this life of it.
        heart: keeps the links that are made alive.
        options: the settings.
    """

    def __init__(
        self,
        store: Store,
        address: WorkerAddress,
        incarnation: str,
        heart: Heart,
        options: Options,
    ) -> None:
        self._store = store
        self._address = address
        self._incarnation = incarnation
        self._heart = heart
        self._options = options

    async def publish(self, endpoint: Endpoint) -> None:
        """Write this worker's record on the board.

        Cancellation: safe; the record may be there or not.
        """
        await self._store.set(_record_key(self._address), endpoint.to_bytes())

    async def connect(self, peer: WorkerAddress, group: str) -> Link:
        """Wait for the peer to appear, which a warning tells of after a while, and dial it.

        Raises:
            RendezvousTimeout: it did not appear, or was not reached, within ``connect_timeout``.
            PeerLostError: its record is there and its process is not.
            AuthenticationError, RefusedError: it answered, and will never agree.

        Cancellation: safe; a dial under way is dropped.
        """
        loop = asyncio.get_running_loop()
        timeout = self._options.connect_timeout
        deadline = loop.time() + timeout
        unreachable: tuple[str, float] | None = None  # incarnation, and since when
        pause = FIRST_PAUSE
        while True:
            endpoint = await self._look_up(peer, deadline - loop.time())
            hello = Hello(
                group=group,
                sender=str(self._address),
                recipient=str(peer),
                incarnation=self._incarnation,
            )
            cause: Exception
            try:
                return await dial(
                    endpoint,
                    hello,
                    heart=self._heart,
                    options=self._options,
                    timeout=max(0.0, min(deadline - loop.time(), self._options.peer_timeout)),
                )
            except AuthenticationError:
                raise
            except RefusedError as error:
                if error.code not in _HOPEFUL:
                    raise
                cause, unreachable = error, None
            except (HandshakeError, NetworkError) as error:
                cause = error
                if unreachable is None or unreachable[0] != endpoint.incarnation:
                    unreachable = (endpoint.incarnation, loop.time())
                elif loop.time() - unreachable[1] > self._options.peer_timeout:
                    raise PeerLostError(
                        f"{peer} is on the board, but nobody has answered there for "
                        f"{self._options.peer_timeout:g} s: did its process die?"
                    ) from error
            if loop.time() + pause > deadline:
                raise RendezvousTimeout(
                    f"{peer} was not reached within {timeout:g} s; the last attempt: {cause}"
                ) from cause
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _look_up(self, peer: WorkerAddress, remaining: float) -> Endpoint:
        notice = asyncio.get_running_loop().call_later(
            PATIENCE,
            log.warning,
            "%s is still waiting for %s to appear on the board: was it started, with the same "
            "board and address?",
            self._address,
            peer,
        )
        try:
            record = await self._store.get(_record_key(peer), max(0.0, remaining))
        except RendezvousTimeout as error:
            raise RendezvousTimeout(
                f"{peer} did not appear on the board within {self._options.connect_timeout:g} s: "
                "was it started, with the same board and address?"
            ) from error
        finally:
            notice.cancel()
        return Endpoint.from_bytes(record)


def _record_key(address: WorkerAddress) -> str:
    return f"worker/{address}"
