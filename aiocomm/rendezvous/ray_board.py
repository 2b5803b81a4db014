"""The board for Ray: workers of one Ray cluster find one another by a name and nothing else.

``RayBoard()`` is the same expression in every driver and actor, and nobody is told to serve it: an
actor of that name carries it (``ray_actor``), made by whoever comes first. This file may not know
how an actor is got, lost and got again (``ray_client``), nor on what thread (``ray_session``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from .ray_client import RayPlace, RaySite
from .ray_session import RaySession
from .threaded import ThreadedBoard

if TYPE_CHECKING:
    from concurrent.futures import Future


class RayBoard(ThreadedBoard[RayPlace]):
    """A board in a named actor of Ray, in the cluster to which this process is connected.

    Nothing happens at construction; opening is counted, and the same board may be shared by several
    event loops and threads of one process. A board can be pickled (its name travels).

    The actor belongs to the process that needed it first, and is not detached. When it dies, by
    itself or with that process, the others make another one and write again what they had written;
    so its death costs no more than what dead processes wrote. It ends when the last board of its
    name is closed.

    Args:
        name: of the actor.
        namespace: of Ray; by default that of the job. Equal names in two namespaces are two boards.
        timeout: seconds to get the actor when opening, and to wait for the answer to a write.

    Raises:
        UsageError: an argument is not usable.
    """

    def __init__(
        self, name: str = "aiocomm", *, namespace: str | None = None, timeout: float = 300.0
    ) -> None:
        for what, text in (("name", name), ("namespace", "n" if namespace is None else namespace)):
            if not isinstance(text, str) or not text:
                raise UsageError(f"board {what} {text!r} is not usable: give a non-empty string")
        super().__init__(timeout)
        self._site = RaySite(name, namespace, float(timeout))

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._site.name

    @property
    def namespace(self) -> str | None:
        """The actor's namespace; None is that of the job, which is known when the board is open."""
        place = self._place
        return self._site.namespace if place is None else place.namespace

    def _start(self, after: Future[None] | None) -> RaySession:
        return RaySession(self._site, after)

    def _unanswered(self) -> str:
        return f"Ray did not answer within {self._timeout:g} s: the cluster of {self} hangs"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.name, self.namespace, self._timeout))

    def __repr__(self) -> str:
        place = self._place
        state = "open" if place is not None else "closed" if self._session is None else "opening"
        where = "" if self.namespace is None else f"{self.namespace}/"
        return f"<RayBoard {where}{self.name} {state}>"


def _rebuild(name: str, namespace: str | None, timeout: float) -> RayBoard:
    return RayBoard(name, namespace=namespace, timeout=timeout)
