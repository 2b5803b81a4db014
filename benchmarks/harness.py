"""Two worker processes for a benchmark, and the tables and files that its figures end in.

Both processes have a runtime open, and an event loop of the wanted kind. Differs from
``aiocomm.run_local`` in that the loop and the options can be chosen, which users have no need to.
Knows nothing of what is measured.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

import aiocomm
from aiocomm.demo.figures import median

if TYPE_CHECKING:
    from rich.console import Console

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


@contextmanager
def folder() -> Iterator[str]:
    """A path for sockets and files of one benchmark; short, as Unix sockets need it."""
    with tempfile.TemporaryDirectory(prefix="aiocomm-") as path:
        yield path


@dataclass
class Outcome:
    """What a benchmark came to: a table, the raw figures, and whether each bar was met."""

    name: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[tuple[str, bool]] = field(default_factory=list)

    def bar(self, text: str, met: bool) -> None:
        """Note a bar, and whether it was met."""
        self.bars.append((text, met))

    @property
    def met(self) -> bool:
        """Whether all bars were."""
        return all(met for _, met in self.bars)

    def show(self, console: Console) -> None:
        """Print table and bars."""
        table = Table(title=self.name)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for text, met in self.bars:
            console.print(f"  {'met ' if met else 'MISSED'}: {text}", highlight=False)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        bars = [{"bar": text, "met": met} for text, met in self.bars]
        return {"name": self.name, "figures": self.figures, "bars": bars}


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "aiocomm": aiocomm.__version__,
    }


def write(path: str, outcomes: Sequence[Outcome]) -> None:
    """All outcomes and the machine as one JSON file."""
    content = {"machine": machine(), "benchmarks": [each.as_json() for each in outcomes]}
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of neighbouring rounds."""
    return median([a / b for a, b in zip(ours, theirs, strict=True)])
