"""Many actors at once: made with their addresses and placement, waited for, and ended together.

``launch`` returns at once, as Ray does; what it has made is undone when a part of it fails. Knows
Ray's actors and placement groups, and of aiocomm only what an actor is told about itself.

Rejected: waiting in ``launch`` (it would stop the loop of whoever is async), and ending actors by
Ray's own graceful exit (an async actor then goes on until its last method returns).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, overload

from .address import WorkerAddress
from .collective import check_names
from .comm import Seat
from .errors import MissingPackageError, RendezvousTimeout, UsageError
from .loops import check_no_loop
from .options import Options

try:
    import ray
    from ray.actor import ActorClass
    from ray.exceptions import RayActorError
    from ray.util import placement_group, remove_placement_group
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as _error:
    raise MissingPackageError(
        "aiocomm on Ray needs ray, which is not installed: pip install 'aiocomm[ray]'"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from .rendezvous.base import Store

log = logging.getLogger("aiocomm")

CLOSE_MARGIN = 5.0
"""Seconds beyond ``Options.close_timeout`` that actors get to close before they are killed."""

END_TIMEOUT = 15.0
"""Seconds to wait for the end of actors that were killed."""

PATIENCE = 10.0
"""Seconds of waiting for actors to start after which a warning says who is missing."""

STRATEGIES = {name.lower(): name for name in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")}

_OURS = ("name", "scheduling_strategy", "placement_group", "placement_group_bundle_index")


def actor_name() -> str | None:
    """Name of the actor that this process is; None or empty outside of one."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_actor_name() if context.get_actor_id() is not None else None


class Workers(Sequence[Any]):
    """The actors of one group of workers, by rank. Made by ``launch``.

    A block ``with`` or ``async with`` waits for them at its beginning and closes them at its end;
    leaving by an exception kills them, and so does a cancelled or interrupted beginning.

    Attributes:
        group: the name of the group.
        addresses: of the actors, by rank.
    """

    def __init__(self, group: str, close_timeout: float) -> None:
        self.group = group
        self._close_timeout = close_timeout
        self._handles: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._ended = False

    @property
    def addresses(self) -> list[WorkerAddress]:
        return [WorkerAddress(self.group, rank) for rank in range(len(self._handles))]

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self._handles[rank]

    def __len__(self) -> int:
        return len(self._handles)

    def __repr__(self) -> str:
        return f"<Workers {self.group}: {len(self)} actors>"

    async def ready(self, timeout: float | None = None) -> Self:
        """Wait until every actor is there and found by others; itself.

        Args:
            timeout: seconds; None waits for as long as Ray looks for room, and after a while a
                warning says who is missing.

        Raises:
            ray.exceptions.RayActorError: an actor died; with the traceback of its constructor.
            RendezvousError: an actor cannot reach the board.
            RendezvousTimeout: not all were there in time.
            Whatever it is, all actors are ended first, and their placement is given back.

        Cancellation: the actors stay.
        """
        asked = self._ask("_comm_ready")
        notice = asyncio.get_running_loop().call_later(PATIENCE, self._notice, asked)
        try:
            try:
                async with asyncio.timeout(timeout) as scope:
                    await asyncio.gather(*asked)
            except TimeoutError as error:
                if scope.expired():
                    raise RendezvousTimeout(self._lateness(asked, timeout)) from error
                raise
        except Exception:
            self.kill()
            raise
        finally:
            notice.cancel()
        return self

    def wait(self, timeout: float | None = None) -> Self:
        """Like ``ready``, for code without an event loop.

        Raises: as ``ready``, and WouldBlockError on a thread that runs an event loop.
        """
        check_no_loop("'await' the workers' ready()")
        asked = waiting = self._ask("_comm_ready")
        begun = time.monotonic()
        deadline = math.inf if timeout is None else begun + timeout
        notice = begun + PATIENCE
        try:
            while waiting:  # one by one, so that a failure need not wait for the others
                until = min(deadline, notice)
                left = None if until == math.inf else max(0.0, until - time.monotonic())
                done, waiting = ray.wait(waiting, timeout=left)
                if done:
                    ray.get(done)
                elif until == deadline:
                    raise RendezvousTimeout(self._lateness(asked, timeout))
                else:
                    self._notice(asked)
                    notice = math.inf
        except Exception:
            self.kill()
            raise
        return self

    async def aclose(self) -> None:
        """Close the communication of every actor, then end them all. Idempotent.

        Pending sends leave first; methods that still run are ended with their actor.

        Cancellation: the actors are killed.
        """
        if self._end_begun():
            return
        closing = [asyncio.ensure_future(ref) for ref in self._ask("_comm_close")]
        try:
            done, _ = await asyncio.wait(closing, timeout=self._close_timeout)
        finally:
            for future in closing:
                future.cancel()  # those that are late
            self.kill()
        for future in done:
            self._note(future.exception())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT):
                await asyncio.gather(*self._deaths(), return_exceptions=True)

    def close(self) -> None:
        """Like ``aclose``, for code without an event loop.

        Raises:
            WouldBlockError: this thread runs an event loop.
        """
        check_no_loop("'await' the workers' aclose()")
        if self._end_begun():
            return
        try:
            closing = self._ask("_comm_close")
            done, _ = ray.wait(closing, num_returns=len(closing), timeout=self._close_timeout)
            for ref in done:
                try:
                    ray.get(ref)
                except Exception as error:
                    self._note(error)
        finally:
            self.kill()
        deaths = self._deaths()
        ray.wait(deaths, num_returns=len(deaths), timeout=END_TIMEOUT)

    def kill(self) -> None:
        """End all actors at once, for good; never waits. Idempotent."""
        self._ended = True
        if not ray.is_initialized():  # all is gone already
            return
        for handle in self._handles:
            with contextlib.suppress(ValueError):  # of a Ray that was shut down since
                ray.kill(handle)
        placement, self._placement = self._placement, None
        if placement is not None:
            remove_placement_group(placement)

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:  # an interrupt: nobody will leave the block
            self.kill()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    async def __aenter__(self) -> Self:
        try:
            return await self.ready()
        except BaseException:  # a cancellation: nobody will leave the block
            self.kill()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.aclose()
        else:
            self.kill()

    def _place(
        self, n: int, placement: str | PlacementGroup | None, demands: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """What ``.options()`` of each actor is told about its place."""
        if placement is None:
            return [{}] * n
        if isinstance(placement, PlacementGroup):
            if placement.bundle_count < n:
                raise UsageError(
                    f"the placement group has {placement.bundle_count} bundles for {n} actors: "
                    "give one with a bundle for each"
                )
            places = placement
        elif isinstance(placement, str) and placement in STRATEGIES:
            bundles = [_bundle(demands)] * n
            places = self._placement = placement_group(bundles, strategy=STRATEGIES[placement])
        else:
            raise UsageError(
                f"placement {placement!r} is not usable: give None, a placement group, or one of "
                f"{', '.join(STRATEGIES)}"
            )
        return [
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(places, rank)}
            for rank in range(n)
        ]

    def _end_begun(self) -> bool:
        return self._ended or not ray.is_initialized() or not self._handles

    def _ask(self, method: str) -> list[Any]:
        once = {"max_task_retries": 0}  # that an actor is gone is an answer; Ray prints retries
        return [getattr(handle, method).options(**once).remote() for handle in self._handles]

    def _deaths(self) -> list[Any]:
        """Calls that fail once the actors are gone."""
        return self._ask("_comm_close")

    def _note(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, RayActorError):  # it is gone, as it should
            log.warning("an actor of group %s was not closed well: %s", self.group, error)

    def _notice(self, asked: list[Any]) -> None:
        log.warning("%s (still waiting)", self._lateness(asked, PATIENCE))

    def _lateness(self, asked: list[Any], seconds: float | None) -> str:
        there = ray.wait(asked, num_returns=len(asked), timeout=0)[0]
        named = zip(self.addresses, asked, strict=True)
        return (
            f"{', '.join(str(address) for address, ref in named if ref not in there)} did not "
            f"start within {seconds:g} s: has the cluster room for what they ask for "
            "('ray status' tells), and does their constructor end?"
        )


def launch(
    cls: Any,
    n: int,
    *args: Any,
    group: str,
    kwargs: Mapping[str, Any] | None = None,
    placement: str | PlacementGroup | None = None,
    actor_options: Mapping[str, Any] | None = None,
    board: Store | None = None,
    options: Options | None = None,
) -> Workers:
    """Make n actors that find one another: ``group:0`` to ``group:n-1``, their names in Ray too.

    Returns at once; errors of a constructor arrive in ``Workers.ready`` or ``wait``, and wherever
    the actor is called.

    Args:
        cls: what ``@ray.remote`` made of a subclass of ``Worker`` or ``BlockingWorker``.
        n: how many.
        *args: for the constructor of each; its rank is ``self.comm.address.rank``.
        group: name of the group.
        kwargs: for the constructor of each.
        placement: None leaves it to Ray; ``"pack"``, ``"spread"``, ``"strict_pack"`` or
            ``"strict_spread"`` reserves what the actors ask for, until they are closed or killed
            by what is returned here (else until the job ends); a placement group of one's own gives
            its bundles by rank, and stays.
        actor_options: what ``.options()`` of an actor takes, ``num_gpus`` or ``max_restarts`` say.
        board: where they find one another and others; default: the class' ``comm_board``.
        options: the settings of their communication; default: the class' ``comm_options``.

    Raises:
        UsageError: an argument is not usable; the text says which.
        AddressError: no worker can have that name, or it is too long for two of them to meet.
        ValueError: Ray has an actor of that name.
        TypeError: the constructor does not take these arguments.
        Whatever it is, what was made is undone.
    """
    _check(cls, n, actor_options)
    check_names((WorkerAddress.of(group, 0), WorkerAddress.of(group, max(1, n - 1))))
    used = Seat(  # by the actors; refused here if it is not usable
        board=cls.comm_board if board is None else board,
        options=cls.comm_options if options is None else options,
    )
    workers = Workers(group, (used.options or Options()).close_timeout + CLOSE_MARGIN)
    try:
        demands = {**getattr(cls, "_default_options", {}), **(actor_options or {})}
        strategies = workers._place(n, placement, demands)
        for rank, strategy in enumerate(strategies):
            address = WorkerAddress.of(group, rank)
            seat = Seat(address, board, options)
            chosen = {**(actor_options or {}), **strategy, "name": str(address)}
            actor = cls.options(**chosen)
            workers._handles.append(actor.remote(*args, **(kwargs or {}), aiocomm_seat=seat))
    except BaseException:
        workers.kill()
        raise
    return workers


def _check(cls: Any, n: int, actor_options: Mapping[str, Any] | None) -> None:
    if not (isinstance(cls, ActorClass) and hasattr(cls, "_comm_ready")):
        raise UsageError(
            f"{cls!r} is no class of actors that communicate: write @ray.remote over a subclass of "
            "aiocomm.worker.Worker"
        )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{n!r} actors cannot be launched: give a number of 1 or more")
    if wrong := [name for name in _OURS if name in (actor_options or {})]:
        raise UsageError(f"actor_options has {wrong[0]!r}: that follows from group and placement")


def _bundle(demands: Mapping[str, Any]) -> dict[str, float]:
    """What one actor asks for, as a placement group says it."""
    cpus, gpus = demands.get("num_cpus"), demands.get("num_gpus")
    bundle = {"CPU": 1.0 if cpus is None else cpus, "GPU": gpus or 0.0}
    bundle |= demands.get("resources") or {}
    if memory := demands.get("memory"):
        bundle["memory"] = memory
    bundle = {name: amount for name, amount in bundle.items() if amount}
    if not bundle:
        raise UsageError(
            "actors that ask for nothing cannot be placed: give num_cpus, num_gpus or resources "
            "in actor_options, or placement=None"
        )
    return bundle
