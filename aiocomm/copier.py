"""The threads that make the large copies of one runtime, so that the loop does not stand still.

``memmove`` releases the interpreter's lock, so copies run beside the loop and beside each other;
one core alone copies at a third or less of what the memory of a host can do. The threads start with
the first copy, are as many as ``threads`` says however many copies wait, and end with the runtime.

Rejected: ``ThreadPoolExecutor`` with ``run_in_executor``, which takes 40 us of the loop for each
call where this takes 10 (two futures for each call, a wake-up for each result).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

T = TypeVar("T")

MOST_THREADS = 4
NICENESS = 5
"""How much the copying threads give way to the others."""


def default_threads() -> int:
    """One for each core, up to a few: two cores copy shared memory 1.8 times as fast as one."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


class Copier:
    """Runs calls in its threads; used on one loop.

    Args:
        loop: where results are wanted.
        threads: how many.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[tuple[asyncio.Future[Any], Any, tuple[object, ...]] | None] = (
            SimpleQueue()
        )
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._telling = False
        self._threads = [
            threading.Thread(target=self._work, name=f"aiocomm-copy_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, call: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Begin ``call(*args)`` in the order of the calls; with several threads they may overlap.

        Cancellation: of the future: the call runs all the same, and holds its arguments until then.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, call, args))
        return future

    def close(self) -> None:
        """End the threads, once what was begun has ended."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            # Where cores are scarce the loop goes first: of threads alike it would wait its turn.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
        while (job := self._jobs.get()) is not None:
            future, call, args = job
            value, error = None, None
            try:
                value = call(*args)
            except BaseException as failure:  # whatever it is, it belongs to who asked
                error = failure
            del job, call, args
            self._ended.append((future, value, error))
            del future, value, error
            if not self._telling:  # one wake-up for all that have ended by the time it is heard
                self._telling = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._telling = False  # before looking: what ends from here on wakes the loop again
        ended = self._ended
        while ended:
            future, value, error = ended.popleft()
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
