"""Two worker processes for a benchmark of aiocomm alone, and the machine that all run on.

Both processes have a runtime open, and an event loop of the wanted kind. Differs from
``aiocomm.run_local`` in that the loop and the options can be chosen, which users have no need to.
Knows nothing of what is measured.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib.metadata
import multiprocessing
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import aiocomm

NAME = "bench"
MEMBERS = (f"{NAME}:0", f"{NAME}:1")
LOOPS = ("uvloop", "asyncio")

Main = Callable[..., Coroutine[Any, Any, Any]]


def run_pair(
    main: Main, *args: object, loop: str = "uvloop", options: aiocomm.Options | None = None
) -> list[Any]:
    """Run ``main(collective, rank, *args)`` in two new processes; the results by rank.

    An error in one ends both.
    """
    context = multiprocessing.get_context("spawn")
    with (
        aiocomm.TCPBoard(port=0, serve=True) as board,
        ProcessPoolExecutor(2, mp_context=context) as pool,
    ):
        futures = [
            pool.submit(_work, main, rank, args, board, loop, options or aiocomm.Options())
            for rank in (0, 1)
        ]
        done, pending = concurrent.futures.wait(futures, return_when=FIRST_EXCEPTION)
        if pending:
            for process in multiprocessing.active_children():
                process.terminate()
        for future in done:
            future.result()  # raises what ended the other one
        return [future.result() for future in futures]


def _work(
    main: Main,
    rank: int,
    args: tuple[object, ...],
    board: Any,
    loop: str,
    options: aiocomm.Options,
) -> Any:
    # What the imports made is never garbage; one look through it takes 60 ms, whoever is measured.
    gc.collect()
    gc.freeze()

    async def run() -> Any:
        async with aiocomm.open(MEMBERS[rank], store=board, options=options) as collective:
            return await main(collective, rank, *args)

    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(run())


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Maker of the loop of that name, ``uvloop`` or ``asyncio``."""
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def threads() -> int:
    """Native threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


@contextmanager
def folder() -> Iterator[str]:
    """A path for sockets and files of one benchmark; short, as Unix sockets need it."""
    with tempfile.TemporaryDirectory(prefix="aiocomm-") as path:
        yield path


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks of every benchmark."""

    quick: bool = False


def machine() -> dict[str, Any]:
    """Where the figures come from, and when."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _read("/proc/cpuinfo", r"model name\s*: (.*)"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "load": round(os.getloadavg()[0], 2),
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "uvloop": importlib.metadata.version("uvloop"),
        "aiocomm": aiocomm.__version__,
    }


def _read(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
