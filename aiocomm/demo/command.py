"""The commands as typer sees them: options, exit statuses, and where output goes.

Exit status of ``demo``: 0, every message arrived as it was sent; 1, at least one byte differs, or a
message is missing; 2, the run could not be made or did not come to its end (wrong options, no such
file, a process that died, a time-out); 130, Ctrl-C.
"""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path  # noqa: TC003  (typer reads the annotations when it runs)
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .. import __version__
from ..launch import NAME
from .display import showing
from .records import Role, Settings
from .report import make_report, show
from .run import run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Status(enum.IntEnum):
    """Exit statuses."""

    SAME = 0
    DIFFERS = 1
    FAILED = 2
    INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        print(f"aiocomm {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Ordered, awaitable exchange of tensors and Python objects between pairs of workers."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Times that the weights are sent.")] = 20,
    trajectories: Annotated[int, typer.Option(min=0, help="Messages back per step.")] = 8,
    seed: Annotated[int, typer.Option(help="Of weights and trajectories.")] = 0,
    params: Annotated[
        float, typer.Option(min=0.1, max=20_000, help="Size of the model, in millions.")
    ] = 50.0,
    weights: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Send the tensors of this safetensors file instead."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds that everything may take.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the figures there.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    corrupt: Annotated[
        int | None,
        typer.Option(
            min=0, help="Flip one bit of this step's weights on arrival: proves that it is noticed."
        ),
    ] = None,
) -> None:
    """A trainer streams weights to a rollout, which streams trajectories back.

    Two processes, one event loop each. Every message is checked by a checksum on both sides. Exit
    status 0: all the same; 1: a message differs; 2: the run failed; 130: interrupted.
    """
    if corrupt is not None and corrupt >= steps:
        raise typer.BadParameter(f"there are steps 0 to {steps - 1}", param_hint="--corrupt")
    if weights is not None:
        _check_weights(weights)
    settings = Settings(
        steps=steps,
        trajectories=trajectories,
        seed=seed,
        parameters=params * 1e6,
        weights=None if weights is None else str(weights),
        corrupt=corrupt,
    )
    raise typer.Exit(_demo(settings, timeout, json_file, quiet=quiet))


def _demo(settings: Settings, timeout: float | None, json_file: Path | None, *, quiet: bool) -> int:
    console = Console()
    start = time.monotonic()
    try:
        with showing(console, settings, quiet=quiet) as display:
            books = run(settings, display, timeout=timeout)
    except KeyboardInterrupt:
        return _end(Status.INTERRUPTED, "interrupted; both processes were ended")
    except Exception as error:
        return _end(Status.FAILED, _describe(error))
    report = make_report(settings, books, time.monotonic() - start)
    if not quiet:
        show(report, console)
    if json_file is not None:
        try:
            json_file.write_text(report.to_json() + "\n")
        except OSError as error:
            return _end(Status.FAILED, f"the figures could not be written: {error}")
    if report.differences:
        return _end(Status.DIFFERS, *map(str, report.differences))
    return Status.SAME


def _describe(error: Exception) -> str:
    """What ended the run, after the worker's own traceback where there is one."""
    if error.__cause__ is not None:
        print(error.__cause__, file=sys.stderr)
    roles = ", ".join(f"{NAME}:{role} is the {role.name.lower()}" for role in Role)
    return f"the run failed: {type(error).__name__}: {error} ({roles})"


def _end(status: Status, *lines: str) -> int:
    for line in lines:
        print(f"aiocomm demo: {line}", file=sys.stderr)
    return status


def _check_weights(path: Path) -> None:
    """Refuse a file that cannot be read before two processes are started for it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            if not tensors.keys():
                _refuse_weights(f"{path} has no tensors")
    except (SafetensorError, OSError) as error:
        _refuse_weights(f"{path} cannot be read: {error}")


def _refuse_weights(text: str) -> NoReturn:
    raise typer.BadParameter(text, param_hint="--weights")
