"""What all groups of one worker share: its loop, its options, a place for large copies, and the
one door through which other threads come in.

The runtime belongs to the loop it was opened in. A call from the thread of that loop goes straight
through. A call from a thread without a loop enters by one locked queue, which is refused after
close, so no call can slip in behind the closing. A call from any other loop, or in a forked
child, is an error at once. Knows nothing of groups, links or messages.

Rejected: the loop's default executor for copies (users fill it with their own waits), anyio's
worker threads (they outlive the runtime inside the same ``asyncio.run``).
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from asyncio import _get_running_loop
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from .copier import Copier, default_threads
from .errors import ClosedError, WrongLoopError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from .options import Options

COPY_LIMIT = 1 << 20
"""Bytes up to which a copy stays on the loop: some 0.2 ms; handing it to a thread costs 0.1 ms."""

T = TypeVar("T")

_open: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """The loop-bound part that the groups of one worker share.

    Args:
        loop: the running loop it belongs to.
        options: the settings.
        name: who it is for, in error texts.
        needs: what to do about a loop that has ended, in error texts.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        name: str,
        needs: str = "open it in a loop that lives as long as it is used",
    ) -> None:
        self.loop = loop
        self.options = options
        self.name = name
        self._needs = needs
        self._lock = threading.Lock()
        self._entries: deque[tuple[Callable[[], None], Callable[[Exception], object]]] = deque()
        self._woken = False  # the loop, for entries
        self._refusal: Exception | None = None
        self._copier: Copier | None = None
        self._closed = False
        _open.add(self)

    @property
    def here(self) -> bool:
        """Whether a call may go straight through: on the loop, with nobody before it."""
        return _get_running_loop() is self.loop and not self._entries and self._refusal is None

    def enter(self, entry: Callable[[], None], failed: Callable[[Exception], object]) -> None:
        """Run ``entry()`` on the loop, in the order of the calls of ``enter``.

        On the loop's own thread it runs at once, and what it raises is raised here. From a thread
        without a loop it is queued, and an error that it raises is given to ``failed``.

        Raises:
            ClosedError: the runtime is closed.
            WrongLoopError: the thread runs another loop, or the process is a forked child.
        """
        if self._refusal is not None:
            raise self._refused()
        running = _get_running_loop()
        if running is self.loop:
            if self._entries:
                self._run_entries()
            entry()
        elif running is None:
            self._enqueue(entry, failed)
        else:
            raise WrongLoopError(
                f"the runtime of {self.name} was opened in another event loop: use it there, or "
                "open one runtime for each loop under an address of its own"
            )

    def check(self) -> None:
        """Whether a call may be made here and now, on the loop itself.

        Raises:
            ClosedError: the runtime is closed.
            WrongLoopError: the running loop is not the runtime's, or the process is a forked child.
        """
        self.check_open()
        self.check_loop()

    def check_loop(self) -> None:
        """Whether the running loop is the runtime's, which may be closed.

        Raises:
            WrongLoopError: it is not.
        """
        if _get_running_loop() is not self.loop:
            raise WrongLoopError(f"call this in the event loop in which {self.name} was opened")

    def check_open(self) -> None:
        """Whether calls are let in at all; from any thread.

        Raises:
            ClosedError: the runtime is closed.
            WrongLoopError: the process is a forked child.
        """
        if self._refusal is not None:
            raise self._refused()

    def off_loop(self, call: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run a large copy in a copying thread; begun in the order of the calls.

        Cancellation: the copy runs on, and holds its arguments until it is over.

        Raises:
            ClosedError: the runtime is closed.
        """
        if self._copier is None:
            if self._closed:
                raise self._refused()
            self._copier = Copier(self.loop, default_threads())
        return self._copier.run(call, *args)

    def refuse(self, error: Exception) -> None:
        """Let no call in from here on; what came in before still runs."""
        with self._lock:
            if self._refusal is None:
                self._refusal = error
        if _get_running_loop() is self.loop:
            self._run_entries()

    def close(self) -> None:
        """Refuse every call and end the copier; copies under way end first."""
        self._closed = True
        self.refuse(ClosedError(f"the runtime of {self.name} is closed: open a new one"))
        _open.discard(self)
        if self._copier is not None:
            self._copier.close()

    def _refused(self) -> Exception:
        # A new one each time: one exception would collect the frames, and what they hold, of all.
        return copy.copy(self._refusal)  # type: ignore[return-value]

    def _enqueue(self, entry: Callable[[], None], failed: Callable[[Exception], object]) -> None:
        with self._lock:
            if self._refusal is not None:
                raise self._refused()
            self._entries.append((entry, failed))
            if self._woken:
                return
            # Under the lock: what a second thread posts to the loop after its own call of
            # ``enter``, a cancellation say, must not overtake the entries.
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._run_entries)
            except BaseException as error:
                self._woken = False
                if not isinstance(error, RuntimeError):  # an interrupt: the next call wakes it
                    raise
                self._entries.clear()
                self._refusal = ClosedError(
                    f"the event loop of {self.name} is closed: {self._needs}"
                )
                raise self._refused() from error

    def _run_entries(self) -> None:
        self._woken = False  # first: what is appended from here on wakes the loop again
        while self._entries:
            entry, failed = self._entries.popleft()
            try:
                entry()
            except Exception as error:
                failed(error)


def _refuse_in_child() -> None:
    # Sockets, threads and locks of the parent cannot be used in a forked child; say so at once.
    for runtime in list(_open):
        runtime._lock = threading.Lock()
        runtime._entries.clear()
        runtime._woken = False
        runtime._refusal = WrongLoopError(
            f"the runtime of {runtime.name} was opened in process {os.getppid()}, before this one "
            "was forked: open a new one here, or start processes with 'spawn'"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
