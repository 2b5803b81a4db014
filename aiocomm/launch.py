"""Local workers: n processes on this machine, a board between them, their results by rank.

The parent hosts the board and waits on pipes; it runs no loop and no worker. A child that loses
its parent ends itself, so nothing stays behind whichever way the parent goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from .collective import open as open_collective
from .errors import PeerLostError, UsageError
from .loops import check_no_loop, new_event_loop
from .rendezvous.tcp import TCPBoard

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from .options import Options
    from .rendezvous.base import Store

NAME = "worker"
"""Name of the worker group: rank r is at the address ``worker:r``."""

GRACE = 1.0
"""Seconds that the others get, once one has failed, to report a better reason or to end."""

DEATH_GRACE = 5.0
"""Seconds that a worker which has closed its pipe gets to end; torch takes a while to leave."""

ORPHAN_GRACE = 5.0
"""Seconds that a worker whose parent is gone gets to close before it is ended where it stands."""


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker, as text; the cause of the one raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True, slots=True)
class _Report:
    """What a worker ended with; ``result`` and ``error`` are pickled."""

    result: bytes | None = None
    error: bytes | None = None
    traceback: str = ""  # empty with an error: the worker died without a word


class _Orphaned(Exception):
    """The parent is gone, nobody is left to tell."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What every worker is to do."""

    fn: Callable[..., Coroutine[Any, Any, Any]]
    args: tuple[object, ...]
    board: Store
    options: Options | None


def run_local(
    fn: Callable[..., Coroutine[Any, Any, Any]],
    n: int,
    *args: object,
    store: Store | None = None,
    timeout: float | None = None,
    options: Options | None = None,
) -> list[Any]:
    """Run ``fn(collective, rank, *args)`` in n new processes and return the results by rank.

    Each process has one event loop (uvloop where it is installed) and one open runtime, at the
    address ``worker:rank``.

    Args:
        fn: an importable coroutine function; it and ``args`` are pickled.
        n: how many workers, at least 1.
        args: further arguments, the same for each.
        store: the board; default: one that this process hosts meanwhile.
        timeout: seconds until all must be done; None for no limit.
        options: the settings of every worker.

    Raises:
        WouldBlockError: this thread runs an event loop.
        UsageError: ``fn`` is not a coroutine function, n is less than 1, or ``fn`` or ``args``
            cannot be pickled.
        TimeoutError: not all were done in time; names those that were not.
        PeerLostError: a worker died without a word.
        Exception: whatever a worker raised, with its traceback as the cause; the others are ended.
    """
    check_no_loop("run_local waits for its workers: call it by asyncio.to_thread")
    if not inspect.iscoroutinefunction(fn):
        raise UsageError(f"{fn!r} is not a coroutine function: write 'async def'")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"{n!r} workers cannot be started: give an integer >= 1")
    board = store if store is not None else TCPBoard(port=0, serve=True)
    with board if isinstance(board, TCPBoard) else contextlib.nullcontext():
        return _Workers(n, _Job(fn, args, board, options)).run(timeout)


class _Workers:
    """The processes, from start to end."""

    def __init__(self, n: int, job: _Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        # A worker's pipe may outlive it, in a process that it has forked; this does not.
        self._deaths: list[int] = []
        self._reports: dict[int, _Report] = {}
        try:
            for rank in range(n):
                here, there = context.Pipe()
                process = context.Process(
                    target=_work, args=(there, rank, job), name=f"{NAME}:{rank}"
                )
                self._pipes.append(here)
                with there:
                    _start(process, job.fn)
                self._processes.append(process)
                self._deaths.append(_death_of(process))
        except BaseException:
            self._end()
            raise

    def run(self, timeout: float | None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while len(self._reports) < len(self._processes):
                if not self._collect(deadline):
                    missing = ", ".join(f"{NAME}:{rank}" for rank in self._running())
                    raise TimeoutError(f"not done within {timeout:g} s: {missing}")
                if any(report.result is None for report in self._reports.values()):
                    self._raise_reason()
            results = [self._reports[rank].result for rank in range(len(self._processes))]
            for process in self._processes:
                process.join(GRACE)
            return [pickle.loads(result) for result in results if result is not None]
        finally:
            self._end()

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self._reports]

    def _collect(self, deadline: float | None) -> bool:
        """Take in what workers report; False when time is up."""
        watched: dict[Any, int] = {}
        for rank in self._running():
            watched[self._pipes[rank]] = watched[self._deaths[rank]] = rank
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(watched), left)
        for rank in {watched[each]: None for each in ready}:
            self._reports[rank] = self._report_of(rank)
        return bool(ready)

    def _report_of(self, rank: int) -> _Report:
        pipe, process = self._pipes[rank], self._processes[rank]
        with contextlib.suppress(EOFError, OSError):  # the latter in the middle of a report
            if pipe.poll():
                report: _Report = pipe.recv()
                return report
        process.join(DEATH_GRACE)
        error = PeerLostError(
            f"{NAME}:{rank} died without a word (exit code {process.exitcode}): what there was to "
            "say, if anything, is on its stderr"
        )
        return _Report(error=pickle.dumps(error))

    def _raise_reason(self) -> None:
        """Raise what went wrong first; those whose peer was lost are seldom the reason."""
        deadline = time.monotonic() + GRACE
        while self._running() and self._reason() is None and self._collect(deadline):
            pass
        error, text = self._reason() or self._errors()[0]  # in the order in which they came
        raise error from RemoteTraceback(text) if text else None

    def _errors(self) -> list[tuple[Exception, str]]:
        return [
            (pickle.loads(report.error), report.traceback)
            for report in self._reports.values()
            if report.error is not None
        ]

    def _reason(self) -> tuple[Exception, str] | None:
        for error, text in self._errors():
            if not isinstance(error, PeerLostError) or not text:
                return error, text
        return None

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        if _HAS_PIDFD:
            for death in self._deaths:
                os.close(death)


_HAS_PIDFD = hasattr(os, "pidfd_open")


def _death_of(process: SpawnProcess) -> int:
    """A descriptor that is readable once the process has ended."""
    assert process.pid is not None
    return os.pidfd_open(process.pid) if _HAS_PIDFD else process.sentinel


def _start(process: SpawnProcess, fn: object) -> None:
    try:
        with _interrupts_held():
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{fn!r} or its arguments cannot be sent to a new process ({error}): define the "
            "function at the top of a module, and pass what pickle takes"
        ) from error


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back until a process is started.

    The new process inherits the mask, and so is not interrupted in the second that its imports
    take, before it can say that it does not want to be. This process would leave it half started:
    another thread takes the signal, and the main thread, masked or not, raises KeyboardInterrupt.
    multiprocessing's tracker, which the first start would start as well, lifts the mask: it goes
    before.
    """
    held = False

    def hold(number: int, frame: object) -> None:
        nonlocal held
        held = True

    in_main = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is not None  # a handler of C could not be put back
    )
    handler = signal.signal(signal.SIGINT, hold) if in_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if in_main:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


# --- in the child ---


def _work(pipe: Connection[Any, Any], rank: int, job: _Job) -> None:
    # The terminal interrupts every process of the job: the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A collection that walks through all that torch has imported stops the loop for 60 ms and more.
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            report = _Report(result=pickle.dumps(runner.run(_main(pipe, rank, job))))
    except _Orphaned:
        return
    except asyncio.CancelledError:
        failure = RuntimeError(f"{NAME}:{rank} let a cancellation of its own escape")
        report = _Report(error=_dump(failure), traceback=traceback.format_exc())
    except Exception as error:
        report = _Report(error=_dump(error), traceback=traceback.format_exc())
    with contextlib.suppress(ConnectionError):  # the parent has gone meanwhile
        pipe.send(report)


async def _main(pipe: Connection[Any, Any], rank: int, job: _Job) -> Any:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    orphaned = False

    def parent_gone() -> None:
        nonlocal orphaned
        orphaned = True
        loop.remove_reader(pipe.fileno())
        loop.call_later(ORPHAN_GRACE, os._exit, 1)
        task.cancel()

    loop.add_reader(pipe.fileno(), parent_gone)  # the parent writes nothing
    try:
        address = f"{NAME}:{rank}"
        async with open_collective(address, store=job.board, options=job.options) as collective:
            return await job.fn(collective, rank, *job.args)
    except asyncio.CancelledError:
        if orphaned:
            raise _Orphaned from None
        raise
    finally:
        loop.remove_reader(pipe.fileno())
        # uvloop has made it otherwise for good, and a report may be more than the pipe holds.
        os.set_blocking(pipe.fileno(), True)


def _dump(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        # An exception class of the user's own that does not survive pickling.
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data
