"""aiocomm for code without an event loop: the same classes, whose calls block.

One loop runs in a thread of its own for each ``open``; calls enter it by the runtime's one door,
and wait for their work on the calling thread. ``async_op=True`` gives the work itself, whose
``wait``, ``done`` and ``then`` may be used from any thread that runs no loop.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from anyio.from_thread import start_blocking_portal

from . import collective as _async
from .comm import Comm as _AsyncComm
from .errors import ClosedError
from .loops import check_no_loop
from .portal import loop_options, perform

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from concurrent.futures import Future

    import torch
    from anyio.from_thread import BlockingPortal

    from .address import WorkerAddress
    from .comm import Peer
    from .group import CollectiveGroup as _AsyncGroup
    from .handles import AsyncWork
    from .options import Options
    from .rendezvous.base import Store
    from .runtime import Runtime
    from .stats import GroupStatistics

T = TypeVar("T")

INSTEAD = "use aiocomm.open and await, or call it by asyncio.to_thread"
IN_ACTOR = "subclass aiocomm.worker.Worker and await, or call it by asyncio.to_thread"


class CollectiveGroup:
    """A group of two workers; see ``aiocomm.CollectiveGroup`` for what each call takes and raises.

    With ``async_op=False``, the default here, a call blocks and returns the result.
    """

    def __init__(self, group: _AsyncGroup, portal: BlockingPortal) -> None:
        self._group = group
        self._portal = portal

    def __repr__(self) -> str:
        return f"<blocking {self._group!r}>"

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._group.name

    @property
    def rank(self) -> int:
        """This worker's rank in the group, 0 or 1."""
        return self._group.rank

    @property
    def peer(self) -> WorkerAddress:
        """The other member."""
        return self._group.peer

    @property
    def members(self) -> tuple[WorkerAddress, WorkerAddress]:
        """Both members, by rank."""
        return self._group.members

    @overload
    def send(self, obj: object, async_op: Literal[False] = False) -> None: ...
    @overload
    def send(self, obj: object, async_op: Literal[True]) -> AsyncWork[None]: ...
    def send(self, obj: object, async_op: bool = False) -> AsyncWork[None] | None:
        """Send an object, and wait until its memory is the caller's again."""
        return perform(lambda: self._group.send(obj), async_op, instead=INSTEAD)

    @overload
    def recv(self, async_op: Literal[False] = False, timeout: float | None = None) -> Any: ...
    @overload
    def recv(self, async_op: Literal[True]) -> AsyncWork[Any]: ...
    def recv(self, async_op: bool = False, timeout: float | None = None) -> Any:
        """Wait for the next object of the peer, and return it.

        After ``timeout`` seconds TimeoutError; the object is then for the next call.
        """
        return perform(lambda: self._group.recv(), async_op, timeout, instead=INSTEAD)

    @overload
    def send_tensor(self, tensor: torch.Tensor, async_op: Literal[False] = False) -> None: ...
    @overload
    def send_tensor(self, tensor: torch.Tensor, async_op: Literal[True]) -> AsyncWork[None]: ...
    def send_tensor(self, tensor: torch.Tensor, async_op: bool = False) -> AsyncWork[None] | None:
        """Send one tensor to a ``recv_tensor``, and wait until it is the caller's again."""
        return perform(lambda: self._group.send_tensor(tensor), async_op, instead=INSTEAD)

    @overload
    def recv_tensor(
        self,
        tensor: torch.Tensor,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def recv_tensor(
        self, tensor: torch.Tensor, async_op: Literal[True]
    ) -> AsyncWork[torch.Tensor]: ...
    def recv_tensor(
        self, tensor: torch.Tensor, async_op: bool = False, timeout: float | None = None
    ) -> AsyncWork[torch.Tensor] | torch.Tensor:
        """Wait until the next tensor of the peer is in ``tensor``, and return it.

        After ``timeout`` seconds TimeoutError; what comes is then for the next call, but a transfer
        that was under way may write to ``tensor`` until it ends.
        """
        return perform(lambda: self._group.recv_tensor(tensor), async_op, timeout, instead=INSTEAD)

    def ready(self) -> None:
        """Connect to the peer now, and set the bulk route up.

        Raises: as ``aiocomm.CollectiveGroup.ready``, and as every call here WouldBlockError on a
        thread that runs an event loop, ClosedError once the runtime is closed.
        """
        _call(self._group._runtime, lambda: self._portal.start_task_soon(self._group.ready))

    def statistics(self) -> GroupStatistics:
        """What went where so far."""
        return _call(
            self._group._runtime, lambda: self._portal.start_task_soon(self._group.statistics)
        )

    def close(self) -> None:
        """Drain and close the group. Idempotent."""
        self._end(self._group.aclose)

    def abort(self) -> None:
        """Close the group at once. Idempotent."""
        self._end(self._group.abort)

    def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(ClosedError):  # the runtime is closed, and so is the group
            _call(self._group._runtime, lambda: self._portal.start_task_soon(end))


class Collective:
    """The runtime of one worker; made by ``aiocomm.blocking.open``."""

    def __init__(self, collective: _async.Collective, portal: BlockingPortal) -> None:
        self._collective = collective
        self._portal = portal

    def __repr__(self) -> str:
        return f"<blocking {self._collective!r}>"

    @property
    def address(self) -> WorkerAddress:
        """This worker's address."""
        return self._collective.address

    def create_collective_group(
        self, worker_addresses: Sequence[WorkerAddress | str], group_name: str | None = None
    ) -> CollectiveGroup:
        """The group of these two workers: see ``aiocomm.Collective.create_collective_group``."""
        create = self._collective.create_collective_group
        group = _call(
            self._collective._runtime,
            lambda: self._portal.start_task_soon(create, worker_addresses, group_name),
        )
        return CollectiveGroup(group, self._portal)


class Comm:
    """What an actor without an event loop calls ``self.comm``; see ``aiocomm.worker``.

    The calls of ``aiocomm.comm.Comm``, from any thread that runs no event loop. With
    ``async_op=False``, the default here, a call blocks and returns the result. The runtime is
    opened behind the calls, in a loop that runs in a thread of its own until ``close``.

    Args:
        address: this worker's.
        board: where the workers find one another.
        options: the settings.

    Attributes:
        address: this worker's; its ``name`` and ``rank``.
    """

    def __init__(self, address: WorkerAddress, *, board: Store, options: Options) -> None:
        self.address = address
        self._ending = threading.Lock()
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(_portal())
            self._comm = self._portal.call(_make_comm, address, board, options)
            self._stack = stack.pop_all()

    def __repr__(self) -> str:
        return f"<blocking {self._comm!r}>"

    @overload
    def send(
        self, obj: object, dst_group: str, dst_rank: int, async_op: Literal[False] = False
    ) -> None: ...
    @overload
    def send(
        self, obj: object, dst_group: str, dst_rank: int, async_op: Literal[True]
    ) -> AsyncWork[None]: ...
    def send(
        self, obj: object, dst_group: str, dst_rank: int, async_op: bool = False
    ) -> AsyncWork[None] | None:
        """Send an object to a worker, and wait until its memory is the caller's again."""
        return perform(
            lambda: self._to((dst_group, dst_rank)).send(obj), async_op, instead=IN_ACTOR
        )

    @overload
    def recv(
        self,
        src_group: str,
        src_rank: int,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def recv(self, src_group: str, src_rank: int, async_op: Literal[True]) -> AsyncWork[Any]: ...
    def recv(
        self, src_group: str, src_rank: int, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Wait for the next object of a worker, and return it.

        After ``timeout`` seconds TimeoutError; the object is then for the next call.
        """
        return perform(
            lambda: self._from((src_group, src_rank)).recv(), async_op, timeout, instead=IN_ACTOR
        )

    @overload
    def send_tensor(
        self, tensor: torch.Tensor, dst_group: str, dst_rank: int, async_op: Literal[False] = False
    ) -> None: ...
    @overload
    def send_tensor(
        self, tensor: torch.Tensor, dst_group: str, dst_rank: int, async_op: Literal[True]
    ) -> AsyncWork[None]: ...
    def send_tensor(
        self, tensor: torch.Tensor, dst_group: str, dst_rank: int, async_op: bool = False
    ) -> AsyncWork[None] | None:
        """Send one tensor to a ``recv_tensor``, and wait until it is the caller's again."""
        return perform(
            lambda: self._to((dst_group, dst_rank)).send_tensor(tensor), async_op, instead=IN_ACTOR
        )

    @overload
    def recv_tensor(
        self,
        tensor: torch.Tensor,
        src_group: str,
        src_rank: int,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> torch.Tensor: ...
    @overload
    def recv_tensor(
        self, tensor: torch.Tensor, src_group: str, src_rank: int, async_op: Literal[True]
    ) -> AsyncWork[torch.Tensor]: ...
    def recv_tensor(
        self,
        tensor: torch.Tensor,
        src_group: str,
        src_rank: int,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> AsyncWork[torch.Tensor] | torch.Tensor:
        """Wait until the next tensor of a worker is in ``tensor``, and return it.

        After ``timeout`` seconds TimeoutError, as ``CollectiveGroup.recv_tensor``.
        """
        return perform(
            lambda: self._from((src_group, src_rank)).recv_tensor(tensor),
            async_op,
            timeout,
            instead=IN_ACTOR,
        )

    def group(self, name: str, rank: int) -> CollectiveGroup:
        """The group that ``send`` to that worker uses now."""
        group = self._call(self._comm.group, name, rank)
        return CollectiveGroup(group, self._portal)

    def ready(self) -> None:
        """Be found by the other workers, which begins by itself.

        Raises: as ``aiocomm.comm.Comm.ready``, and as every call here WouldBlockError on a thread
        that runs an event loop, ClosedError once it is closed.
        """
        self._call(self._comm.ready)

    def close(self) -> None:
        """Drain and close; every call raises ClosedError from then on. Idempotent."""
        self._end(self._comm.aclose)

    def abort(self) -> None:
        """Close at once. Idempotent."""
        self._end(self._comm.abort)

    def _to(self, peer: Peer) -> _AsyncGroup:
        return self._comm.linked(peer) or self._call(self._comm.to, peer)

    def _from(self, peer: Peer) -> _AsyncGroup:
        return self._comm.linked(peer) or self._call(self._comm.source, peer)

    def _call(self, call: Callable[..., Any], *args: object) -> Any:
        runtime = self._comm._collective._runtime
        return _call(runtime, lambda: self._portal.start_task_soon(call, *args))

    def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        check_no_loop(INSTEAD)
        with self._ending, contextlib.suppress(ClosedError):
            self._call(end)
            self._stack.close()


@contextlib.contextmanager
def open(
    address: WorkerAddress | str | None = None,
    *,
    store: Store | None = None,
    options: Options | None = None,
) -> Iterator[Collective]:
    """Open the runtime of one worker, with an event loop in a thread of its own.

    Takes and raises what ``aiocomm.open`` does. Leaving the block drains and closes.

    Raises:
        WouldBlockError: this thread runs an event loop: use ``async with aiocomm.open``.
    """
    check_no_loop(INSTEAD)
    with (
        _portal() as portal,
        portal.wrap_async_context_manager(
            _async.open(address, store=store, options=options)
        ) as collective,
    ):
        yield Collective(collective, portal)


def _portal() -> contextlib.AbstractContextManager[BlockingPortal]:
    return start_blocking_portal(backend_options=loop_options())


async def _make_comm(address: WorkerAddress, board: Store, options: Options) -> _AsyncComm:
    return _AsyncComm(address, board=board, options=options)


def _call(runtime: Runtime, start: Callable[[], Future[T]]) -> T:
    check_no_loop(INSTEAD)
    runtime.check_open()  # the loop's thread is gone, or was never forked
    try:
        outcome = start()
    except RuntimeError as error:
        raise ClosedError("the runtime is closed: open a new one") from error
    return outcome.result()
