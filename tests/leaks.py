"""What a test, or a worker process, has left behind.

Compares two pictures of this process: Python threads, sockets, child processes, entries of
/dev/shm and of the temporary folder; on demand also every file descriptor and native thread. Knows
nothing of pytest. The end of a thread or socket that lives in C++ (Gloo's, TCPStore's) cannot be
awaited, so a difference is looked at again until it is gone or a grace time is over; a test that
leaves nothing pays for one look. Rejected: naming what aiocomm makes and looking for that only,
which cannot see what was forgotten.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GRACE = 30.0  # seconds that threads and sockets of C++ get to end; only a leak takes so long
_PAUSE = 0.02
_TASKS = Path("/proc/self/task")
_FDS = Path("/proc/self/fd")
_SHM = Path("/dev/shm")

KEPT: set[str] = set()  # descriptors and pids that the test helpers keep for the whole session
OTHERS: list[Callable[[], frozenset[str]]] = []  # say which sockets are somebody else's


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this process held at one moment."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    children: frozenset[int]
    shared: frozenset[str]
    temporary: frozenset[str]
    descriptors: frozenset[str]
    native: int

    @classmethod
    def take(cls) -> Snapshot:
        descriptors = _descriptors()
        return cls(
            threads=frozenset(_threads()),
            sockets=frozenset(name for name in descriptors if name.startswith("socket:")),
            children=frozenset(_children()),
            shared=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
            temporary=frozenset(os.listdir(tempfile.gettempdir())),
            descriptors=frozenset(descriptors),
            native=len(os.listdir(_TASKS)) if _TASKS.is_dir() else 0,
        )

    def left(self, *, files: bool = True, tight: bool = False, grace: float = GRACE) -> list[str]:
        """Lines that name what is there now and was not then; empty when nothing is.

        Args:
            files: compare shared memory and the temporary folder, which all processes share.
            tight: compare every file descriptor and the number of native threads too.
            grace: seconds for what ends by itself to end.
        """
        return until_empty(lambda: self._compare(files, tight), grace)

    def _compare(self, files: bool, tight: bool) -> list[str]:
        now = Snapshot.take()
        found = [f"thread {thread!r}" for thread in now.threads - self.threads]
        if sockets := now.sockets - self.sockets:
            others = frozenset[str]().union(*(each() for each in OTHERS))
            found += [f"open {name}" for name in sockets - others]
        found += [f"child process {pid}: {_command(pid)}" for pid in now.children - self.children]
        if files:
            found += [
                f"shared memory /dev/shm/{name}"
                for name in now.shared - self.shared
                if not _held_by_others(f"{_SHM}/{name}")
            ]
            found += [f"temporary file {name}" for name in now.temporary - self.temporary]
        if tight:
            found += [f"open {name}" for name in now.descriptors - self.descriptors - now.sockets]
            if now.native > self.native:
                found.append(f"native threads: {self.native} before, {now.native} after")
        return found


def until_empty(look: Callable[[], list[str]], grace: float = GRACE) -> list[str]:
    """What ``look`` finds, looked at again until it is nothing or the grace time is over."""
    gc.collect()
    deadline = time.monotonic() + grace
    while True:
        found = look()
        if not found or time.monotonic() > deadline:
            return found
        # Nothing signals the end of a native thread or of a socket that C++ holds.
        time.sleep(_PAUSE)
        gc.collect()


def _threads() -> list[threading.Thread]:
    # A thread of C++ that once ran Python code stays listed for ever as a dummy.
    return [
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) and thread.is_alive()
    ]


def _descriptors() -> list[str]:
    """What every file descriptor stands for; numbers are left out since they are used again."""
    names = []
    for entry in os.listdir(_FDS) if _FDS.is_dir() else ():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            names.append(os.readlink(_FDS / entry))
    return [name for name in names if name not in KEPT]


def _children() -> list[int]:
    pids: list[int] = []
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            pids.extend(map(int, (task / "children").read_text().split()))
    # Python's own helper of multiprocessing lives as long as the process.
    return [pid for pid in pids if str(pid) not in KEPT and "multiprocessing" not in _command(pid)]


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip() or "(zombie)"


def _held_by_others(path: str) -> bool:
    """Whether a process that does not descend from this one has the file mapped."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            mapped = path in Path(f"/proc/{entry}/maps").read_text()
        except OSError:
            continue
        if mapped and not _descends(int(entry)):
            return True
    return False


def _descends(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(status.rpartition(")")[2].split()[1])
    return False
