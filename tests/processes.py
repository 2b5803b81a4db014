"""Real worker processes for tests: start, signal, kill, collect, never longer than a time-out.

    async def echo(stage, text):            # importable; the stage comes first
        await stage.barrier("met")
        return text

    def test_echo(loop_name):
        with Workers(2, loop=loop_name) as workers:
            workers.start(echo, "a")
            workers.start(echo, "b")
            assert workers.join() == ["a", "b"]

A worker's exception is raised by ``join`` and ``result`` with its remote traceback as the cause.
What a worker left behind (tasks, threads, sockets, logged exceptions) fails ``join`` too, unless it
was started with ``strict=False``. At the time-out every worker writes its stacks, is killed, and
``WorkersTimeout`` shows them. Leaving the ``with`` block kills what still runs. Only processes
started here are ever signalled, by their own id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from . import loops
from .leaks import GRACE
from .nursery import STATUS, fork
from .worker import Decoder, End, Job, Post, Stage, encode

__all__ = [
    "Stage",
    "Worker",
    "WorkerDied",
    "WorkerDirty",
    "Workers",
    "WorkersTimeout",
    "run_workers",
]

TIMEOUT = 60.0  # seconds for all workers of one test; this guards against hanging, nothing else
_DUMP_GRACE = 3.0  # seconds for writing the stacks, whose end nothing tells


class WorkerDied(Exception):
    """A worker ended without a word, or its exception could not be pickled."""


class WorkerDirty(Exception):
    """A worker did its job but left something behind, or something would only have been logged."""


class WorkersTimeout(Exception):
    """The time-out of the test's workers; they are dead now, the text has their stacks."""


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Worker:
    """One process. Made by ``Workers.start``."""

    def __init__(self, workers: Workers, rank: int, name: str, strict: bool) -> None:
        self.rank = rank
        self.pid = 0
        self.status: int | None = None  # the exit status, or minus the signal that ended it
        self._name = name
        self._strict = strict
        self._workers = workers
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by Workers)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._killed = False
        self._end: End | None = None
        self._texts: tuple[str, str] | None = None
        self._decoder = Decoder()
        self._control: socket.socket | None = None
        self._status_fd = -1

    def __repr__(self) -> str:
        state = "running" if self.status is None else f"ended with {self.status}"
        return f"<Worker {self.rank} {self._name} pid {self.pid} {state}>"

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does; ``join`` then gives None for it."""
        self._killed = True
        self.signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP: the process hangs, its sockets stay open."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        with self._workers._changed:
            if self.status is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end of the process; its status, whatever its function did."""
        self._workers._await(lambda: self.status is not None)
        assert self.status is not None
        return self.status

    def result(self) -> Any:
        """Wait for the end of the process; what its function returned, or raise what it raised."""
        self.wait()
        end = self._end
        if end is None or (end.value is None and end.error is None):
            text = end.trace if end else f"it ended with {self.status} without a result"
            raise WorkerDied(f"{self!r}: {text}\n{self.stderr}")
        if end.error is not None:
            raise pickle.loads(end.error) from RemoteTraceback(f"{self!r}\n{end.trace}")
        complaints = end.complaints
        if self.status != 0:
            complaints = [*complaints, f"exit status {self.status} after its end:\n{self.stderr}"]
        if self._strict and complaints:
            raise WorkerDirty(f"{self!r} left behind:\n" + "\n".join(complaints))
        assert end.value is not None
        return pickle.loads(end.value)

    @property
    def complaints(self) -> list[str]:
        """What it left behind or would have logged; after its end."""
        return list(self._end.complaints) if self._end else []

    @property
    def failed(self) -> bool:
        """Whether it ended badly and not because the test killed it."""
        return self.status not in (None, 0) and not self._killed

    @property
    def stdout(self) -> str:
        return self._texts[0] if self._texts else _read(self._stdout)

    @property
    def stderr(self) -> str:
        return self._texts[1] if self._texts else _read(self._stderr)

    def _close(self) -> None:
        self._texts = (_read(self._stdout), _read(self._stderr))
        self._stdout.close()
        self._stderr.close()


class Workers:
    """The worker processes of one test.

    Args:
        count: how many there will be (what barriers wait for).
        loop: "asyncio" or "uvloop"; by default the kind that runs now, or uvloop outside of any.
        timeout: seconds that all of them together may take.

    In a coroutine, call the waiting methods through ``asyncio.to_thread``.
    """

    def __init__(
        self, count: int = 2, *, loop: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        self._count = count
        self._loop = loop or _running_loop_name()
        self._timeout = timeout
        self._workers: list[Worker] = []
        self._posts: dict[str, bytes] = {}
        self._changed = threading.Condition(threading.RLock())
        self._expired = False
        self._closing = False

    def __enter__(self) -> Workers:
        self._deadline = time.monotonic() + self._timeout
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._pump = threading.Thread(target=self._run_pump, name="test-workers", daemon=True)
        self._pump.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._kill_all()
        self._poke()
        self._pump.join()
        self._selector.close()
        for each in (self._woken, self._wake):
            each.close()
        for worker in self._workers:
            worker._close()

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        strict: bool = True,
        grace: float | None = None,
        **kwargs: Any,
    ) -> Worker:
        """Run ``function(stage, *args, **kwargs)`` in a process of its own, now.

        Args:
            function: an importable coroutine function, or a plain one that runs without a loop.
            strict: what it leaves behind counts as a failure.
            grace: seconds for it to end by itself; by default none where it is no failure.
        """
        if grace is None:
            grace = GRACE if strict else 0.0
        worker = Worker(self, len(self._workers), function.__qualname__, strict)
        call = pickle.dumps((function, args, kwargs))
        job = Job(call, worker.rank, self._count, self._loop, grace, sys.path, dict(os.environ))
        ours, theirs = socket.socketpair()
        status, status_theirs = os.pipe()
        try:
            fds = [theirs.fileno(), worker._stdout.fileno(), worker._stderr.fileno(), status_theirs]
            worker.pid = fork(fds)
        finally:
            theirs.close()
            os.close(status_theirs)
        worker._control, worker._status_fd = ours, status
        with self._changed:
            ours.sendall(encode(job))
            for name, value in self._posts.items():
                ours.sendall(encode(Post(name, value)))
            self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._selector.register(status, selectors.EVENT_READ, worker)
        self._poke()
        return worker

    def set(self, name: str, value: object = None) -> None:
        """Show a value to all workers, those that start later too."""
        self._post(Post(name, pickle.dumps(value)), None)

    def wait(self, name: str) -> Any:
        """The value of that name, once a worker has set it; at once raises what failed a worker."""
        self._await(lambda: name in self._posts or self._settled())
        if name not in self._posts:
            self.join()
            raise WorkerDied(f"all workers ended and none has set {name!r}")
        return pickle.loads(self._posts[name])

    def join(self) -> list[Any]:
        """What the functions returned, by rank; raises at once what failed one of them."""
        self._await(self._settled)
        for worker in self._workers:
            if worker.failed:
                worker.result()
        return [None if worker._killed else worker.result() for worker in self._workers]

    def _settled(self) -> bool:
        return self._all_over() or any(worker.failed for worker in self._workers)

    def _all_over(self) -> bool:
        return all(worker.status is not None for worker in self._workers)

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or (self._expired and self._all_over()))
            if condition() and not self._expired:
                return
        reports = [f"{worker!r}\n{worker.stderr}" for worker in self._workers]
        raise WorkersTimeout(f"after {self._timeout} s:\n" + "\n".join(reports))

    def _post(self, post: Post, source: Worker | None) -> None:
        with self._changed:
            self._posts.setdefault(post.name, post.value)
            for worker in self._workers:
                if worker is not source and worker.status is None and worker._control:
                    with contextlib.suppress(OSError):  # it has just ended
                        worker._control.sendall(encode(post))
            self._changed.notify_all()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake anyway
            self._wake.send(b"\0")

    # The pump thread: reads what the workers say, passes it on, and minds the clock.

    def _run_pump(self) -> None:
        dump_until: float | None = None
        while not (self._closing and all(self._is_over(worker) for worker in self._workers)):
            limit = dump_until if dump_until is not None else self._deadline
            expired = self._expired or self._closing
            timeout = None if expired else max(0.0, limit - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._read_control(key.data)
                else:
                    self._read_status(key.data)
            if expired or time.monotonic() < limit:
                continue
            if dump_until is None:
                self._signal_all(signal.SIGUSR1)  # faulthandler writes the stacks
                dump_until = time.monotonic() + _DUMP_GRACE
            else:
                with self._changed:
                    self._expired = True
                    self._kill_all()

    @staticmethod
    def _is_over(worker: Worker) -> bool:
        return worker._control is None and worker._status_fd == -1

    def _read_control(self, worker: Worker) -> None:
        assert worker._control is not None
        try:
            data = worker._control.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(worker._control)
            with self._changed:
                worker._control.close()
                worker._control = None
            return
        worker._decoder.feed(data)
        while (message := worker._decoder.next()) is not None:
            if isinstance(message, Post):
                self._post(message, worker)
            else:
                worker._end = message

    def _read_status(self, worker: Worker) -> None:
        # Its words first: they were all written before it ended.
        while worker._control is not None and _readable(worker._control):
            self._read_control(worker)
        data = os.read(worker._status_fd, STATUS.size)
        self._selector.unregister(worker._status_fd)
        os.close(worker._status_fd)
        with self._changed:
            worker._status_fd = -1
            worker.status = os.waitstatus_to_exitcode(STATUS.unpack(data)[0]) if data else -1
            self._changed.notify_all()

    def _signal_all(self, number: int) -> None:
        with self._changed:
            for worker in self._workers:
                worker.signal(number)

    def _kill_all(self) -> None:
        for worker in self._workers:
            if worker.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                    os.killpg(worker.pid, signal.SIGKILL)  # what it started: it leads a session


def run_workers(
    function: Callable[..., Any],
    count: int = 2,
    *args: Any,
    loop: str | None = None,
    timeout: float = TIMEOUT,
    strict: bool = True,
) -> list[Any]:
    """Run one function in ``count`` workers, told apart by ``stage.rank``; the results by rank."""
    with Workers(count, loop=loop, timeout=timeout) as workers:
        for _ in range(count):
            workers.start(function, *args, strict=strict)
        return workers.join()


def _read(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _running_loop_name() -> str:
    try:
        return loops.name_of(asyncio.get_running_loop())
    except RuntimeError:
        return "uvloop"
