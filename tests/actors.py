"""Ray actors of the tests: they do what they are told with ``self.comm`` and report as plain data.

A failure is reported as its class and text, since what travels through Ray would be wrapped. Tests
share actors by the module: starting one takes half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

import aiocomm
from aiocomm import Options
from aiocomm.worker import BlockingWorker, Worker

WAIT = 240.0  # seconds; guards against hanging, nothing waits that long

# Threads of Ray's gRPC, which makes them as it is busy; as the kernel names them.
GRPC = {
    "default-executo",
    "event_engine",
    "grpc_global_tim",
    "grpcpp_sync_ser",
    "resolver-execut",
    "timer_manager",
}

OPTIONS = Options(eager_limit=1024, close_timeout=5.0, stall_timeout=10.0)


class Talker(Worker):
    """An async actor."""

    async def send(self, obj: Any, *peer: Any) -> Any:
        return await _outcome(self.comm.send(obj, *peer))

    async def recv(self, *peer: Any) -> Any:
        return await _outcome(self.comm.recv(*peer))

    async def echo(self, name: str, rank: int, count: int = 1) -> None:
        for _ in range(count):
            await self.comm.send(await self.comm.recv(name, rank), name, rank)

    async def call(self, func: Callable[..., Any], *args: Any) -> Any:
        """What ``func(self, *args)`` returns; a coroutine is awaited."""
        found = func(self, *args)
        return await found if asyncio.iscoroutine(found) else found

    async def whoami(self) -> dict[str, Any]:
        current = aiocomm.current()
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        return {"address": str(current.address), "pid": os.getpid(), "loop": loop}


class Blocker(BlockingWorker):
    """An actor without an event loop."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def send(self, obj: Any, *peer: Any) -> None:
        self.comm.send(obj, *peer)

    def recv(self, *peer: Any) -> Any:
        return self.comm.recv(*peer)

    def call(self, func: Callable[..., Any], *args: Any) -> Any:
        return func(self, *args)


async def _outcome(work: Any) -> Any:
    try:
        return await work
    except aiocomm.errors.AiocommError as error:
        return type(error).__name__, str(error)


def get(refs: Any) -> Any:
    """The results, soon enough for a test."""
    return ray.get(refs, timeout=WAIT)


def again(call: Callable[[], Any]) -> Any:
    """Call an actor that Ray is starting again until it answers."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return get(call())
        except RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # nothing signals that an actor is back


def _threads() -> Iterator[str]:
    """The names of the threads, as the kernel knows them."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            yield (thread / "comm").read_text().strip()


def held(worker: Worker) -> dict[str, int]:
    """What the actor's process holds; of tensors those of 1 MiB or more."""
    gc.collect()
    large = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.nbytes >= 1 << 20
    ]
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": sum(name not in GRPC for name in _threads()),
        "groups": sum(map(len, worker.comm._collective._groups.values())),
        "tensors": len(large),
    }
