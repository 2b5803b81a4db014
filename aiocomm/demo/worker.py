"""The two coroutines of the demo, each the only work of one process and one event loop.

The trainer changes the weights and streams them out, and takes trajectories in meanwhile; the
rollout takes weights in and sends trajectories made for each version while the next version
arrives. Both streams are asyncio tasks on both sides. Making, changing and checking data runs in
threads made beforehand, so that the loop does nothing but communicate. Whether checksums agree is
not judged here: both ends keep books, and the parent compares them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .checksum import checksum, memory_of
from .lag import LagWatch
from .messages import make_trajectory
from .model import advance, file_weights, model_weights
from .records import Books, Carried, Direction, Received, Role, Sent

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ..collective import Collective
    from ..group import CollectiveGroup
    from ..handles import AsyncWork
    from .records import Settings

AHEAD = 2
"""Receives posted ahead, and versions of the weights that may be ahead of the trajectories."""

T = TypeVar("T")


async def work(
    collective: Collective, rank: int, settings: Settings, progress: socket.socket
) -> Books:
    """The coroutine function for ``run_local``: rank 0 is the trainer, rank 1 the rollout."""
    torch.set_num_threads(1)  # two processes share the machine, and count their threads
    role = Role(rank)
    members = [f"{collective.address.name}:{each}" for each in Role]
    member = Member(role, collective.create_collective_group(members), progress)
    tasks = (
        [send_weights, take_trajectories]
        if role is Role.TRAINER
        else [take_weights, send_trajectories]
    )
    try:
        made = await member.off_loop(make_weights, settings) if role is Role.TRAINER else {}
        shared = Shared(made)
        # What importing torch made is never garbage, and looking through it stops the process for
        # 60 ms or more: it was the largest loop lag here before this line was.
        gc.collect()
        gc.freeze()
        async with LagWatch() as watch:
            try:
                async with asyncio.TaskGroup() as group:
                    for task in tasks:
                        group.create_task(task(member, settings, shared), name=task.__name__)
            except ExceptionGroup as errors:
                raise _first(errors) from errors
            return member.books(str(collective.address), watch)
    finally:
        member.close()


# --- the four tasks ---


class Shared:
    """What the two tasks of one process share, and how they wait for each other."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.free = asyncio.Semaphore(AHEAD)
        self.versions: asyncio.Queue[int] = asyncio.Queue()


async def send_weights(member: Member, settings: Settings, shared: Shared) -> None:
    """Trainer: change the weights, send them, and so on, a bounded way ahead of the rollout."""
    for step in range(settings.steps):
        if settings.trajectories:
            await shared.free.acquire()
        await member.off_loop(advance, shared.weights, step)
        # Completed means that the weights may be changed again.
        await member.send({"step": step, "weights": shared.weights})


async def take_trajectories(member: Member, settings: Settings, shared: Shared) -> None:
    """Trainer: take in what the rollout sends."""

    def taken(number: int, message: Any) -> None:
        if (number + 1) % settings.trajectories == 0:
            shared.free.release()

    await member.receive(settings.total(Direction.TRAJECTORIES), taken)


async def take_weights(member: Member, settings: Settings, shared: Shared) -> None:
    """Rollout: take in each version; the next one arrives while this one is checked."""

    def taken(step: int, message: Any) -> None:
        shared.versions.put_nowait(step)
        if step == settings.corrupt:
            flip_bit(message["weights"])

    await member.receive(settings.steps, taken)


async def send_trajectories(member: Member, settings: Settings, shared: Shared) -> None:
    """Rollout: trajectories for each version, once it is there."""
    for step in range(settings.steps if settings.trajectories else 0):
        await shared.versions.get()
        for number in range(step * settings.trajectories, (step + 1) * settings.trajectories):
            await member.send(await member.off_loop(make_trajectory, settings.seed, step, number))


# --- one end, and its books ---


class Member:
    """One end of the group; sends, receives and writes down what it saw."""

    def __init__(self, role: Role, group: CollectiveGroup, progress: socket.socket) -> None:
        self._role = role
        self._group = group
        self._progress = progress
        self._sent: list[Sent] = []
        self._received: list[Received] = []
        self._completed: list[int] = []
        self._threads: list[int] = [threads()]
        self._routes: set[str] = set()
        # One thread makes and checks what is sent, the other checks what has come.
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="demo-make")
        self._checkers = ThreadPoolExecutor(1, thread_name_prefix="demo-check")

    async def off_loop(self, call: Callable[..., T], *args: Any) -> T:
        """Run ``call(*args)`` in the thread that makes messages."""
        return await asyncio.get_running_loop().run_in_executor(self._makers, call, *args)

    async def send(self, message: object) -> None:
        """Send a message whose checksum is taken before the clock starts."""
        digest = await self.off_loop(checksum, message)
        called = time.monotonic_ns()
        await self._group.send(message)
        self._sent.append(Sent(digest, called))
        self._count_threads()

    async def receive(self, total: int, taken: Callable[[int, Any], None]) -> None:
        """Receive that many messages in order, with further receives posted before each.

        Args:
            total: how many.
            taken: called with number and message, before its checksum is taken.
        """
        loop = asyncio.get_running_loop()
        self._tell()  # that it begins
        posted: deque[AsyncWork[Any]] = deque()
        try:
            for number in range(total):
                while len(posted) < min(AHEAD, total - number):
                    # The time is taken on completion and not when this task gets its turn.
                    posted.append(self._group.recv().then(self._arrived))
                message = await posted.popleft()
                self._tell()
                taken(number, message)
                digest = await loop.run_in_executor(self._checkers, checksum, message)
                del message  # the next one may be as large
                self._received.append(Received(digest, self._completed[number]))
                self._count_threads()
        finally:
            for work in posted:
                work.cancel()

    def books(self, address: str, watch: LagWatch) -> Books:
        """Everything that was written down."""
        loop = type(asyncio.get_running_loop())
        return Books(
            role=self._role,
            address=address,
            pid=os.getpid(),
            loop=f"{loop.__module__}.{loop.__qualname__}",
            sent=tuple(self._sent),
            received=tuple(self._received),
            routes={
                route: Carried(count.messages, count.nbytes)
                for route, count in self._group.statistics().sent.items()
            },
            threads=(min(self._threads), max(self._threads)),
            lag=watch.lag(),
        )

    def close(self) -> None:
        """End the threads, once they are done with what they are at."""
        self._makers.shutdown(cancel_futures=True)
        self._checkers.shutdown(cancel_futures=True)

    def _count_threads(self) -> None:
        """Note the number of threads; from anew when a route was used first, for it has its own."""
        statistics = self._group.statistics()
        if statistics.state != "up":
            return  # the other end has finished first, and what belonged to the link is gone
        used = {f"out {route}" for route in statistics.sent}
        used |= {f"in {route}" for route in statistics.received}
        if used != self._routes:
            self._routes = used
            self._threads.clear()
        self._threads.append(threads())

    def _arrived(self, message: object) -> object:
        self._completed.append(time.monotonic_ns())
        return message

    def _tell(self) -> None:
        """Let the parent know how far it is; a count that finds no room is made up by the next."""
        counts = self._group.statistics().received.values()
        note = {
            "direction": self._role.receives,
            "messages": sum(count.messages for count in counts),
            "nbytes": sum(count.nbytes for count in counts),
        }
        try:
            self._progress.send(json.dumps(note).encode())
        except (BlockingIOError, ConnectionError):
            return  # nobody looks, or nobody looks any more


def threads() -> int:
    """Native threads of this process, those of torch and Gloo included."""
    return len(list(Path("/proc/self/task").iterdir()))


def make_weights(settings: Settings) -> dict[str, torch.Tensor]:
    """What the trainer begins with."""
    if settings.weights is not None:
        return file_weights(settings.weights)
    return model_weights(settings.parameters, settings.seed)


def flip_bit(weights: dict[str, torch.Tensor]) -> None:
    """Flip the lowest bit in the middle of the largest tensor."""
    largest = max(weights.values(), key=lambda tensor: tensor.numel() * tensor.element_size())
    memory = memory_of(largest)
    memory[len(memory) // 2] ^= 1


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The first error itself: what a task group makes of one error says little to a reader."""
    error = errors.exceptions[0]
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
