"""One script for a machine with a GPU: is everything right there, and how fast is it?

    python benchmarks/gpu.py                  # all of it, in under five minutes, on one GPU
    python benchmarks/gpu.py kinds memory     # some of it
    python benchmarks/gpu.py --rehearse       # without a GPU: does the script itself work?

Needs torch, anyio and uvloop, and the clone. Each check runs in processes of its own, with a limit
of time; one that fails is shown with its traceback, and the next one runs. Prints a table and
writes JSON. The exit status is 0 when every check held, 1 when one did not, 2 when there is no GPU
and nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# Where the script is run by its path, its folder comes first, and hides nothing that is needed.

import torch  # noqa: E402

import aiocomm  # noqa: E402
from benchmarks.on_chip import alone, checks, figures  # noqa: E402
from benchmarks.on_chip.chip import CUDA, REHEARSAL, Chip  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

LIMIT = 285.0
"""Seconds for all of it."""
NO_GPU = 2
WARNING = "REHEARSAL ON THE CPU: nothing of a GPU was checked or measured"


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: as it is asked for.
        run: what each process does.
        processes: how many.
        seconds: its limit.
        chip_only: it cannot be rehearsed.
        options: of the runtimes.
        environment: of the processes.
    """

    name: str
    run: Callable[..., Coroutine[Any, Any, dict[str, Any]]]
    processes: int = 2
    seconds: float = 60.0
    chip_only: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What it is about: the first line of its text."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


EXPANDABLE = "expandable_segments:True"
CHECKS = (
    Check("kinds", checks.kinds),
    Check("order", checks.order),
    Check("streams", checks.streams),
    Check("then", checks.then_on_device),
    Check("refusals", checks.refusals),
    Check("poller", alone.poller, processes=1, chip_only=True),
    Check("nccl-alone", alone.nccl_alone, processes=1, chip_only=True),
    Check("nccl-two", checks.nccl_refuses, chip_only=True, options={"device_route": "nccl"}),
    Check(
        "expandable",
        checks.expandable,
        chip_only=True,
        environment={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PYTORCH_ALLOC_CONF": EXPANDABLE},
    ),
    Check("death", alone.peer_death, processes=1),
    Check("memory", figures.memory, seconds=100),
    Check("throughput", figures.throughput, seconds=80),
    Check("latency", figures.latency),
    Check("lag", figures.lag),
)


@dataclass
class Result:
    """How one check ended."""

    name: str
    title: str
    outcome: str  # "held", "FAILED", "left out"
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run(check: Check, kind: str, seconds: float) -> Result:
    """Run one check in new processes, at most so many seconds. Raises nothing of it."""
    result = Result(check.name, check.title, "held")
    start = time.perf_counter()
    try:
        with patch.dict(os.environ, check.environment):
            found = aiocomm.run_local(
                check.run,
                check.processes,
                kind,
                timeout=seconds,
                options=aiocomm.Options(**check.options),
            )
    except Exception:
        result.outcome, result.error = "FAILED", traceback.format_exc()
    else:
        for notes in found:
            result.notes.update(notes)
    result.seconds = time.perf_counter() - start
    return result


async def describe(collective: aiocomm.Collective, rank: int, kind: str) -> dict[str, Any]:
    """What the chip is, asked in a process of its own: this one never touches it."""
    chip = Chip(kind)
    chip.begin()
    return chip.describe()


def report(results: list[Result], machine: dict[str, Any], *, rehearsal: bool) -> str:
    """The table, and the traceback of whatever failed."""
    lines = [WARNING] if rehearsal else []
    lines.append(", ".join(f"{name} {value}" for name, value in machine.items()))
    width = max((len(each.name) for each in results), default=0)
    for each in results:
        lines.append(f"{each.name:{width}}  {each.outcome:8}  {each.seconds:6.1f} s  {each.title}")
        lines.extend(f"{'':{width}}    {line}" for line in _shown(each.notes))
        if each.error:
            last = each.error.strip().splitlines()[-1]
            lines.append(f"{'':{width}}    {last}")
    lines += [f"\n--- {each.name} ---\n{each.error}" for each in results if each.error]
    if rehearsal:
        lines.append(WARNING)
    return "\n".join(lines)


def _shown(notes: dict[str, Any]) -> list[str]:
    lines, plain = [], []
    for name, value in notes.items():
        if isinstance(value, dict) and any(isinstance(row, dict) for row in value.values()):
            for label, row in value.items():
                cells = ", ".join(f"{key} {_number(cell)}" for key, cell in row.items())
                lines.append(f"{label}: {cells}")
        else:
            plain.append(f"{name} {_number(value)}")
    return ([", ".join(plain)] if plain else []) + lines


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", help=f"which: {', '.join(names)}; default: all")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, checking no GPU")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where results go")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all of it")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.checks) - set(names))
    if unknown:
        parser.error(f"there is no check {unknown[0]!r}: give some of {', '.join(names)}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for. Returns the exit status."""
    chosen = read(arguments)
    kind = REHEARSAL if chosen.rehearse else CUDA
    if not chosen.rehearse and not torch.cuda.is_available():
        print(
            "There is no CUDA device here: nothing was checked, nothing was measured.\n"
            "--rehearse runs the script itself on the CPU."
        )
        return NO_GPU
    end = time.monotonic() + chosen.limit
    machine: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    first = run(Check("describe", describe, processes=1), kind, 60.0)
    machine.update(first.notes)
    results = [first] if first.error else []
    for check in CHECKS:
        if chosen.checks and check.name not in chosen.checks:
            continue
        left = end - time.monotonic()
        if check.chip_only and chosen.rehearse:
            results.append(Result(check.name, check.title, "left out", error=""))
        elif left < 1:
            text = f"no time is left of {chosen.limit:g} s: raise --limit, or name this check"
            results.append(Result(check.name, check.title, "FAILED", error=text))
        else:
            print(f"{check.name}: {check.title}", file=sys.stderr, flush=True)
            results.append(run(check, kind, min(check.seconds, left)))
    print(report(results, machine, rehearsal=chosen.rehearse))
    outcome = {
        "rehearsal": chosen.rehearse,
        "machine": machine,
        "results": [asdict(each) for each in results],
    }
    chosen.json.write_text(json.dumps(outcome, indent=2))
    return int(any(each.outcome == "FAILED" for each in results))


if __name__ == "__main__":
    sys.exit(main())
