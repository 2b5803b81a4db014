"""Bars on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io

from rich.console import Console

from aiocomm.demo.display import showing
from aiocomm.demo.records import Direction, Settings

SETTINGS = Settings(steps=2, trajectories=3)


def drawn(*, terminal: bool, quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with showing(console, SETTINGS, quiet=quiet) as display:
        display.update(Direction.WEIGHTS, 1, 1000)
        display.update(Direction.TRAJECTORIES, 3, 500)
        display.update(Direction.TRAJECTORIES, 6, 1000)
        display.update(Direction.WEIGHTS, 2, 2000)
    return file.getvalue()


def test_bars_on_a_terminal() -> None:
    text = drawn(terminal=True)
    assert "\x1b[" in text
    for word in ("weights", "trajectories", "2/2", "6/6", "GB/s"):
        assert word in text


def test_lines_elsewhere() -> None:
    text = drawn(terminal=False)
    assert "\x1b[" not in text
    lines = text.splitlines()
    assert lines[0].startswith("weights 1/2 ")
    assert lines[-1].startswith("weights 2/2 ")
    assert "trajectories 6/6 " in lines[-1]
    assert len(lines) == 3  # the first, and the end of each direction: not one for each message


def test_nothing_when_quiet() -> None:
    assert drawn(terminal=True, quiet=True) == drawn(terminal=False, quiet=True) == ""
