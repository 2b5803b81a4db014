"""A peer's processes as the benchmarks see them: started, asked, and ended without a trace.

They speak JSON lines over a socket in a folder of their own, since libraries print to stdout as
they like. Whatever they start carries a mark in its environment and is found by it at the end:
Ray's daemons leave every process group and session. A peer that crashes, hangs or complains raises
``PeerFailed`` with one line of why; nobody else is harmed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .lines import Line

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "AIOCOMM_BENCHMARK"
START = 120.0  # seconds that a peer may take to be there
ANSWER = 120.0  # and for one round
END = 15.0  # and to be gone
AFTER_FAILURE = 2.0  # the same once it has failed
POLL = 0.05


class PeerFailed(Exception):
    """A peer that cannot be measured, and why, in one line."""


@dataclass(slots=True, eq=False)
class _Control:
    """The control socket of one process, and what came of a line."""

    socket: socket.socket
    came: bytes = b""

    def take(self) -> dict[str, Any] | None:
        """The next line, if it is whole."""
        line, newline, rest = self.came.partition(b"\n")
        if not newline:
            return None
        self.came = rest
        answer: dict[str, Any] = json.loads(line)
        return answer


class Pair:
    """The processes of one line of the tables. Leaving ``with`` ends them.

    Raises:
        PeerFailed: on entering, when they do not start.
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self._mark = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: dict[int, _Control] = {}
        self._exits = contextlib.ExitStack()
        self._folder = Path()
        self._grace = END

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(prefix="aiocomm-", ignore_cleanup_errors=True)
        self._folder = Path(self._exits.enter_context(folder))
        try:
            self._start()
        except BaseException:
            self._grace = AFTER_FAILURE
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> float:
        """All processes do it at once; the seconds that the receiver took for a stream, the first
        rank for anything else.

        Raises:
            PeerFailed: one of them could not, or not in time.
        """
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        for end in self._ends.values():
            with contextlib.suppress(OSError):  # why will be seen in what it said before
                end.socket.sendall(line)
        try:
            answers = self._read(list(self._ends.values()), time.monotonic() + ANSWER)
        except BaseException:
            self._grace = AFTER_FAILURE
            raise
        return float(answers[-1 if do == "stream" else 0]["seconds"])

    def close(self) -> None:
        """Hang up, wait, and kill what is left. Idempotent."""
        for end in self._ends.values():
            end.socket.close()
        self._ends = {}
        deadline = time.monotonic() + self._grace
        while _alive(self._processes) or list(marked(self._mark)):
            if time.monotonic() > deadline:
                for pid in marked(self._mark):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(POLL)
        self._processes = []
        self._exits.close()

    def _start(self) -> None:
        deadline = time.monotonic() + START
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self._folder / "control"))
            server.listen()
            server.settimeout(POLL)
            self._launch()
            found: dict[int, _Control] = {}
            while len(found) < self.line.processes:
                with contextlib.suppress(TimeoutError):
                    end = _Control(server.accept()[0])
                    self._exits.callback(end.socket.close)
                    found[self._read([end], deadline)[0]["rank"]] = end
                if any(process.poll() is not None for process in self._processes):
                    raise PeerFailed(f"did not start: {self._last_words()}")
                if time.monotonic() > deadline:
                    raise PeerFailed(f"did not start in {START:g} s: {self._last_words()}")
        self._ends = dict(sorted(found.items()))
        self._read(list(self._ends.values()), deadline)  # they are connected to each other

    def _launch(self) -> None:
        with open(self._folder / "output", "wb") as output:
            for command in commands(self.line, str(self._folder)):
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_environment(self._mark),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the benchmarks, which end it in order
                )
                self._processes.append(process)

    def _read(self, ends: Sequence[_Control], deadline: float) -> list[dict[str, Any]]:
        """The next answer of each; the first complaint ends it, whoever else is still at it."""
        answers: dict[_Control, dict[str, Any]] = {}
        while True:
            for end in ends:
                if end not in answers and (answer := end.take()) is not None:
                    if "error" in answer:
                        raise PeerFailed(answer["error"])
                    answers[end] = answer
            waiting = {end.socket: end for end in ends if end not in answers}
            if not waiting:
                return [answers[end] for end in ends]
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise PeerFailed(f"no answer in time: {self._last_words()}")
            for one in ready:
                waiting[one].came += (data := _receive(one))
                if not data:
                    raise PeerFailed(f"ended: {self._last_words()}")

    def _last_words(self) -> str:
        lines = (self._folder / "output").read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"


def commands(line: Line, folder: str) -> list[list[str]]:
    """What to start for a line.

    Raises:
        PeerFailed: there is no mpiexec.
    """
    base = [sys.executable, "-m", f"{__package__}", line.module, line.variant]
    if line.module == "mpi":
        # The one beside this interpreter first: it belongs to the mpich that pip installed.
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        launcher = shutil.which("mpiexec", path=folders)
        if launcher is None:
            raise PeerFailed("not installed: pip install mpich (mpiexec is missing)")
        return [[launcher, "-n", "2", *base, "mpi", folder]]
    return [[*base, str(rank), folder] for rank in range(line.processes)]


def marked(mark: str) -> Iterator[int]:
    """Processes with that mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is somebody else's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _alive(processes: list[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is None for process in processes)


def _environment(mark: str) -> dict[str, str]:
    # Ray's workers do not start where they are told to, and must find this package too.
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(places)}


def _receive(one: socket.socket) -> bytes:
    try:
        return one.recv(1 << 16)
    except ConnectionError:
        return b""
