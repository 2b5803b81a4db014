"""The embedded board: ``torch.distributed.TCPStore``, made safe for event loops.

``TCPBoard(host, port)`` is the same expression in every process and nobody is told to be the
master: who can bind the address serves, the others are its clients. This file says who may serve
where; it may not know torch, sockets or how the waiting is done (``connect``, ``session``).
Rejected: a pure Python client of torch's wire protocol, which is private to torch.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING

from ..errors import UsageError
from .connect import Place, Site
from .session import Session
from .threaded import ThreadedBoard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future


class TCPBoard(ThreadedBoard[Place]):
    """A board on a TCP port, served by the first process that comes.

    Nothing happens at construction; opening is counted, and the same board may be shared by several
    event loops and threads of one process. When the process that serves it ends or closes it, the
    board is gone for all: let the one that lives longest serve. A board can be pickled (its address
    travels, not its connection).

    Args:
        host: address or name of the serving host, by which the others reach it; exactly this
            address is bound, never all interfaces.
        port: TCP port; 0 takes a free one and needs ``serve=True`` (``port`` tells which).
        serve: True must serve, False may not, None serves if it is the first that can.
        timeout: seconds to wait for a server when opening, and for the answer to a write.

    Raises:
        UsageError: an argument is not usable.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 29500,
        *,
        serve: bool | None = None,
        timeout: float = 300.0,
    ) -> None:
        _check_host(host)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise UsageError(f"board port {port!r} is not usable: give an integer in 0..65535")
        if serve not in (True, False, None):
            raise UsageError(f"serve={serve!r} is not usable: give True, False or None")
        if port == 0 and serve is not True:
            raise UsageError("board port 0 needs serve=True: clients must know the port")
        super().__init__(timeout)
        self._site = Site(host, port, serve, shared=False, timeout=float(timeout))

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, timeout: float = 300.0
    ) -> TCPBoard:
        """The board at ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

        A process with ``RANK`` 0 or none may serve it. A torch store that sits on the port already
        (of torchrun's agent, or of ``init_process_group`` in this process) is used instead, under
        keys that begin with ``aiocomm/``; and an ``init_process_group`` that comes later in the
        serving process finds the port shared, not taken.

        Args:
            environ: variables to read, by default those of the process.
            timeout: seconds, as for the class.

        Raises:
            UsageError: a variable is missing or not usable.
        """
        variables = os.environ if environ is None else environ
        host = variables.get("MASTER_ADDR", "")
        if not host:
            raise UsageError("MASTER_ADDR is not set: set it and MASTER_PORT, or give a TCPBoard")
        port = _number(variables, "MASTER_PORT")
        may_serve = variables.get("RANK") is None or _number(variables, "RANK") == 0
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            may_serve = False  # torchrun's agent serves there
        board = cls(host, port, serve=None if may_serve else False, timeout=timeout)
        board._site = Site(host, port, board._site.serve, shared=True, timeout=float(timeout))
        return board

    @property
    def port(self) -> int:
        """The board's port; the chosen one if 0 was asked for and the board is open."""
        place = self._place
        return self._site.port if place is None else place.port

    @property
    def serving(self) -> bool:
        """Whether this process serves the board; False while it is not open."""
        place = self._place
        return place is not None and place.serving

    def __reduce__(self) -> tuple[object, ...]:
        place = self._place
        serve = False if place is not None else self._site.serve
        site = Site(self._site.host, self.port, serve, self._site.shared, self._site.timeout)
        return (_rebuild, (site,))

    def __repr__(self) -> str:
        if self._place is None:
            state = "closed" if self._session is None else "opening"
        else:
            state = "serving" if self._place.serving else "client"
        return f"<TCPBoard {self._site.host}:{self.port} {state}>"

    def _start(self, after: Future[None] | None) -> Session:
        return Session(self._site, after)

    def _unanswered(self) -> str:
        return (
            f"what listens at {self._site} accepts connections but did not answer within "
            f"{self._site.timeout:g} s: it hangs, or is no board"
        )


def _rebuild(site: Site) -> TCPBoard:
    board = TCPBoard(site.host, site.port, serve=site.serve, timeout=site.timeout)
    board._site = site
    return board


def _check_host(host: str) -> None:
    if not isinstance(host, str) or not host or host != host.strip():
        raise UsageError(f"board host {host!r} is not usable: give an address or a name")
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return  # a name
    if wildcard:
        raise UsageError(f"board host {host!r} is no address: give the one that others dial")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None or not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name}={text!r} in the environment is not a number >= 0")
    return int(text)
