"""Ray actors that communicate: mixins that give an actor ``self.comm``, and ``launch``.

::

    @ray.remote(num_cpus=0)
    class Trainer(aiocomm.worker.Worker):
        async def step(self):
            await self.comm.send(weights, "rollout", 0)

    trainers = aiocomm.worker.launch(Trainer, 2, group="trainer")

``Worker`` is for async actors, and makes an actor one; ``BlockingWorker`` is for actors without an
event loop, with threads (``max_concurrency``) or without. The address comes from ``launch``, or
from the name of an actor that was made without it
(``Trainer.options(name="trainer:0").remote()``); Ray keeps both when it starts the actor again.
This file knows how Ray makes and ends actors; how groups are found is the business of ``comm``.

The runtime is opened by whoever comes first, the end of the actor's own ``__init__`` or its first
use of ``self.comm``, so that others find an actor, also one that was started again, before it is
called. That is why ``__init__`` is wrapped, and need not be called by the user's own.

Rejected: one runtime for each event loop of an actor with concurrency groups (an address is one
worker's), a decorator instead of a mixin (no type checker sees ``self.comm``), and addresses in
environment variables (a process of its own for each runtime environment).
"""

from __future__ import annotations

import functools
import inspect
from asyncio import _get_running_loop
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from . import blocking
from .address import WorkerAddress
from .comm import Comm, Seat
from .errors import AddressError, UsageError
from .options import Options
from .rendezvous.ray import RayBoard
from .worker_launch import Workers, actor_name, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rendezvous.base import Store

__all__ = ["BlockingWorker", "Worker", "Workers", "launch"]

C = TypeVar("C", Comm, blocking.Comm)


def _address_in(name: str | None) -> WorkerAddress | None:
    try:
        return WorkerAddress.parse(name) if name else None
    except AddressError:
        return None


def _taking_seat(init: Callable[..., None]) -> Callable[..., None]:
    """The same ``__init__``, which takes a seat too, and after which the actor is found by others.

    Ray checks the arguments of ``.remote()`` against the signature, so it is kept.
    """

    def taking(self: Any, *args: Any, aiocomm_seat: Seat | None = None, **kwargs: Any) -> None:
        if aiocomm_seat is not None:
            vars(self)["_comm_seat"] = aiocomm_seat  # a frozen dataclass refuses to be set
        init(self, *args, **kwargs)
        if self._comm_seat.address is not None or _address_in(actor_name()) is not None:
            self._comm_begin()

    functools.update_wrapper(taking, init)
    del taking.__wrapped__  # type: ignore[attr-defined]  # Ray would write to what it leads to
    own = inspect.signature(init)
    named = list(own.parameters.values())
    if init is object.__init__:
        named = named[:1]  # it names any arguments and takes none
    at = len(named) - (bool(named) and named[-1].kind is inspect.Parameter.VAR_KEYWORD)
    named.insert(
        at, inspect.Parameter("aiocomm_seat", inspect.Parameter.KEYWORD_ONLY, default=None)
    )
    taking.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    taking.takes_seat = True  # type: ignore[attr-defined]
    taking.stands_in = init is object.__init__  # type: ignore[attr-defined]
    return taking


def _own_init(cls: type) -> Callable[..., None]:
    """The class' ``__init__``, or the first one of its bases that somebody wrote."""
    for base in cls.__mro__:
        init: Callable[..., None] | None = vars(base).get("__init__")
        if init is not None and not getattr(init, "stands_in", False):
            return init
    raise AssertionError("object has one")


def _waits(method: object) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


class _Actor:
    """What both mixins share: who the actor is, and when it begins to be found."""

    comm_board: ClassVar[Store | None] = None
    """The board, where ``launch`` gives none; None is ``RayBoard()``."""

    comm_options: ClassVar[Options | None] = None
    """The settings, where ``launch`` gives none; None is ``Options()``."""

    _comm_seat = Seat()

    def __init_subclass__(cls, *, mixin: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        # A dataclass in the making gets no __init__ where there is one. Ray makes a subclass of
        # every actor's class, so whatever is left alone here takes a seat there.
        if mixin or ("__annotations__" in own and "__init__" not in own):
            return
        init = _own_init(cls)
        cls.__init__ = init if hasattr(init, "takes_seat") else _taking_seat(init)  # type: ignore[method-assign]

    def _comm_open(self, kind: Callable[..., C]) -> C:
        told = self._comm_seat
        seat = Seat(
            _address_in(actor_name()) if told.address is None else told.address,
            self.comm_board if told.board is None else told.board,
            self.comm_options if told.options is None else told.options,
        )
        board = RayBoard() if seat.board is None else seat.board
        options = Options() if seat.options is None else seat.options
        address = seat.address
        if address is None:
            raise AddressError(
                f"this actor has no address, its name is {actor_name()!r}: make it with "
                "aiocomm.worker.launch, or under a name like .options(name='trainer:0')"
            )
        return kind(address, board=board, options=options)


class Worker(_Actor, mixin=True):
    """Mixin for async actors: gives ``self.comm``.

    The runtime lives in the actor's event loop. An actor with concurrency groups has several: there
    the methods of the default group may use ``self.comm``, others get a WrongLoopError. Methods
    that are no coroutines run on the loop too.

    When the actor ends in good order its pending sends leave first, and its peers see a goodbye; a
    class with a ``__ray_shutdown__`` of its own calls that of this one.
    """

    @functools.cached_property
    def comm(self) -> Comm:
        """The actor's communication; see ``aiocomm.comm.Comm``.

        Raises:
            AddressError: the actor has no address.
            UsageError: no event loop runs in this thread.
        """
        return self._comm_open(Comm)

    def _comm_begin(self) -> None:
        if _get_running_loop() is not None:
            self.comm  # noqa: B018

    async def _comm_ready(self) -> None:
        """For ``Workers``: found by others, or why not."""
        await self.comm.ready()

    async def _comm_close(self) -> None:
        """For ``Workers``: drained and closed."""
        await self.comm.aclose()

    def __ray_shutdown__(self) -> None:
        """Called by Ray, on its own thread, when the actor ends in good order."""
        if "comm" in vars(self):
            self.comm.close_from_thread()


class BlockingWorker(_Actor, mixin=True):
    """Mixin for actors whose methods block, with several threads or one: gives ``self.comm``.

    The runtime lives in a loop of its own, in a thread of its own.

    Raises:
        UsageError: a subclass has a coroutine method, which would make it an async actor.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, _ in inspect.getmembers(cls, _waits):
            raise UsageError(
                f"{cls.__qualname__} is a BlockingWorker and its method {name} is a coroutine "
                "function, with which Ray makes an async actor: subclass Worker, or write it "
                "without async"
            )

    @functools.cached_property
    def comm(self) -> blocking.Comm:
        """The actor's communication; see ``aiocomm.blocking.Comm``.

        Raises:
            AddressError: the actor has no address.
        """
        return self._comm_open(blocking.Comm)

    def _comm_begin(self) -> None:
        self.comm  # noqa: B018

    def _comm_ready(self) -> None:
        """For ``Workers``: found by others, or why not."""
        self.comm.ready()

    def _comm_close(self) -> None:
        """For ``Workers``: drained and closed."""
        self.comm.close()

    def __ray_shutdown__(self) -> None:
        """Called by Ray when the actor ends in good order."""
        if "comm" in vars(self):
            self.comm.close()
