"""A process that has imported torch and aiocomm and forks a worker for each request.

Importing torch costs a process about a second, a fork a few milliseconds, and the tests start
hundreds of workers. The nursery does nothing but import: it has one thread and no loop, so a fork
of it is as good as a fresh interpreter; workers leave by the normal end of the interpreter (atexit,
finalisation). Rejected: multiprocessing's forkserver, whose children skip that end and whose
resource tracker is one more process; a fork of pytest itself, which has threads.

A request is one packet with four descriptors (control socket, stdout, stderr, status pipe); the
answer is the worker's pid. The nursery writes the wait status into the pipe when the worker ends.
Started by the first ``fork`` as ``python -m tests.nursery FD``.
"""

from __future__ import annotations

import atexit
import gc
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

from .leaks import KEPT

_REPLY = struct.Struct("<q")
STATUS = struct.Struct("<i")


class _Nursery:
    """The nursery as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).resolve().parent.parent,
                stdin=subprocess.DEVNULL,
                # One thread only, or forking it would not be sound.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._kept = {os.readlink(f"/proc/self/fd/{self._socket.fileno()}"), str(self._process.pid)}
        KEPT.update(self._kept)

    def fork(self, fds: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [b"fork"], fds)
            answer = self._socket.recv(_REPLY.size)
        if not answer:
            raise ChildProcessError(f"the nursery ended with {self._process.wait()}")
        return int(_REPLY.unpack(answer)[0])

    def close(self) -> None:
        KEPT.difference_update(self._kept)
        self._socket.close()
        self._process.wait()


_nursery: _Nursery | None = None


def fork(fds: list[int]) -> int:
    """A new worker's pid; starts the nursery when it is the first.

    Args:
        fds: control socket, stdout, stderr, status pipe.
    """
    global _nursery
    if _nursery is None:
        _nursery = _Nursery()
        atexit.register(close)
    return _nursery.fork(fds)


def close() -> None:
    """End the nursery, if there is one. Idempotent."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


# --- inside the nursery ---


def _preload() -> None:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed  # noqa: F401

    import aiocomm  # noqa: F401
    from tests import worker  # noqa: F401

    gc.collect()
    gc.freeze()  # a worker's collections need not walk through torch


def serve(requests: socket.socket) -> int:
    """Serve until the other end is closed; returns in a worker too, with its control descriptor."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is woken:
                woken.recv(4096)
                _reap(statuses)
                continue
            message, fds, _flags, _address = socket.recv_fds(requests, 16, 4)
            if not message:
                return -1
            pid = os.fork()
            if pid == 0:
                return _become_worker(selector, (requests, woken, wake), statuses, fds)
            statuses[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            requests.send(_REPLY.pack(pid))


def _reap(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = statuses.pop(pid)
        try:
            os.write(fd, STATUS.pack(status))
        except BrokenPipeError:
            pass  # the test has gone on without this worker
        finally:
            os.close(fd)


def _become_worker(
    selector: selectors.BaseSelector,
    sockets: tuple[socket.socket, ...],
    statuses: dict[int, int],
    fds: list[int],
) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # so that a time-out ends what the worker has started, too
    selector.close()
    for each in sockets:
        each.close()
    for fd in statuses.values():
        os.close(fd)
    control, stdout, stderr, status = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (stdout, stderr, status):
        os.close(fd)
    return control


def main() -> None:
    _preload()
    control = serve(socket.socket(fileno=int(sys.argv[1])))
    if control >= 0:
        from tests import worker

        sys.exit(worker.main(control))


if __name__ == "__main__":
    main()
