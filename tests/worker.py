"""The inside of a worker process that a test has started, and the stage it shares with the others.

Runs one importable function (a coroutine function on the loop that was asked for, a plain function
without a loop) and reports its value or exception with the traceback, and whatever was left behind
or would only have been logged. See tests/processes.py for the outside.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import loops
from .leaks import Snapshot

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do."""

    call: bytes  # pickled (function, args, kwargs)
    rank: int
    count: int
    loop: str
    grace: float  # seconds for what it leaves behind to end by itself
    path: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Post:
    """A named value for everybody on the stage, pickled."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class End:
    """How a worker's function ended; value and error are pickled."""

    value: bytes | None = None
    error: bytes | None = None
    trace: str = ""
    complaints: list[str] = field(default_factory=list)


def encode(message: object) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> Any | None:
        """The next whole message, if it is there."""
        if len(self._bytes) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        message = pickle.loads(bytes(self._bytes[_LENGTH.size : end]))
        del self._bytes[:end]
        return message


class Stage:
    """Named values that the workers of one test, and the test itself, show one another.

    A value that was once set stays; whoever waits for it later has it at once. The first argument
    of every function that a test runs in a worker.

    Args:
        rank: number of this worker, in the order of starting, from 0.
        count: how many workers the test has announced.
    """

    def __init__(self, control: socket.socket, decoder: Decoder, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self._control = control
        self._decoder = decoder
        self._posts: dict[str, bytes] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._lock = threading.Lock()
        self._take_posts()

    def set(self, name: str, value: object = None) -> None:
        """Show a value (picklable, small) to everybody; from any thread."""
        self._posts[name] = post = pickle.dumps(value)
        with self._lock:
            self._control.sendall(encode(Post(name, post)))

    async def wait(self, name: str) -> Any:
        """The value of that name, once somebody has set it."""
        while name not in self._posts:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(name, []).append(waiter)
            await waiter
        return pickle.loads(self._posts[name])

    async def barrier(self, name: str) -> None:
        """Wait until all workers of the test have come to the barrier of that name."""
        self.set(f"{name}/{self.rank}")
        for rank in range(self.count):
            await self.wait(f"{name}/{rank}")

    def wait_blocking(self, name: str) -> Any:
        """The same as ``wait`` for a function without a loop; from one thread at a time."""
        while name not in self._posts:
            self._read()
        return pickle.loads(self._posts[name])

    def barrier_blocking(self, name: str) -> None:
        """The same as ``barrier`` for a function without a loop."""
        self.set(f"{name}/{self.rank}")
        for rank in range(self.count):
            self.wait_blocking(f"{name}/{rank}")

    def _read(self) -> None:
        data = self._control.recv(65536)
        if not data:  # the test is gone: so is all reason to live
            os._exit(1)
        self._decoder.feed(data)
        self._take_posts()

    def _take_posts(self) -> None:
        while (post := self._decoder.next()) is not None:
            self._posts.setdefault(post.name, post.value)
            for waiter in self._waiters.pop(post.name, ()):
                if not waiter.done():
                    waiter.set_result(None)


def main(control_fd: int) -> int:
    """Run the one job that comes through the socket; the exit status."""
    control = socket.socket(fileno=control_fd)
    decoder = Decoder()
    job: Job = _receive(control, decoder)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.path
    tempfile.tempdir = None
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # As in pytest's configuration. What a destructor or thread raises is only printed by Python.
    warnings.simplefilter("error")
    complaints: list[str] = []
    sys.unraisablehook = lambda unraisable: complaints.append(
        f"unraisable in {unraisable.object!r}: {unraisable.err_msg or ''}\n"
        + "".join(traceback.format_exception(unraisable.exc_value))
    )
    threading.excepthook = lambda failure: complaints.append(
        f"in thread {failure.thread!r}:\n" + "".join(traceback.format_exception(failure.exc_value))
    )
    stage = Stage(control, decoder, job.rank, job.count)
    end = _run(stage, job, complaints)
    control.sendall(encode(end))
    control.shutdown(socket.SHUT_WR)
    return 0 if end.error is None and not end.trace else 1


def _receive(control: socket.socket, decoder: Decoder) -> Any:
    """The first message; what came after it stays in the decoder."""
    while True:
        message = decoder.next()
        if message is not None:
            return message
        data = control.recv(65536)
        if not data:
            os._exit(1)
        decoder.feed(data)


def _run(stage: Stage, job: Job, complaints: list[str]) -> End:
    try:
        function, args, kwargs = pickle.loads(job.call)
        before = Snapshot.take()
        if inspect.iscoroutinefunction(function):
            value = _run_on_loop(
                stage, job.loop, partial(function, stage, *args, **kwargs), complaints
            )
        else:
            value = function(stage, *args, **kwargs)
        function = args = kwargs = None
        encoded = pickle.dumps(value)
        del value
        complaints += before.left(files=False, grace=job.grace)
        return End(value=encoded, complaints=complaints)
    except BaseException as error:
        # Whatever it is belongs to the test, which raises it again.
        trace = "".join(traceback.format_exception(error))
        try:
            encoded = pickle.dumps(error)
            pickle.loads(encoded)
        except Exception:
            encoded = None
        return End(error=encoded, trace=trace, complaints=complaints)


def _run_on_loop(stage: Stage, name: str, call: Callable[[], Any], complaints: list[str]) -> Any:
    contexts: list[loops.Context] = []

    async def body() -> Any:
        control = stage._control
        asyncio.get_running_loop().add_reader(control.fileno(), stage._read)
        try:
            value = await call()
            gc.collect()
            complaints.extend(await loops.stragglers())
            return value
        finally:
            asyncio.get_running_loop().remove_reader(control.fileno())

    with asyncio.Runner(debug=True, loop_factory=partial(loops.make, name, contexts)) as runner:
        value = runner.run(body())
    gc.collect()
    complaints.extend(map(loops.describe, contexts))
    return value
