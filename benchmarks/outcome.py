"""What a benchmark comes to: a table, the raw figures, and bars, for terminals, JSON and markdown.

Pure: measures nothing. A bar is a bound on one figure; it says by how much it was met or missed,
and that it was not judged where a figure is missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from aiocomm.demo.figures import median

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, in words, and whether it was met; None where it could not be judged."""

    text: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """In one or two words."""
        return {True: "met", False: "MISSED", None: "not judged"}[self.met]


@dataclass
class Outcome:
    """A table, the figures behind it, and the bars."""

    name: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def bar(self, text: str, met: bool) -> None:
        """Note a bar, and whether it was met."""
        self.bars.append(Bar(text, met))

    def at_most(self, what: str, value: float | None, limit: float, unit: str = "x") -> None:
        """Note a bar from above; None is a figure that is not there."""
        self._bound(what, "at most", value, limit, unit)

    def at_least(self, what: str, value: float | None, limit: float, unit: str = "x") -> None:
        """Note a bar from below."""
        self._bound(what, "at least", value, limit, unit)

    def _bound(self, what: str, side: str, value: float | None, limit: float, unit: str) -> None:
        if value is None:
            self.bars.append(Bar(f"{what}: {side} {limit:g} {unit}: no figure", None))
            return
        met = value <= limit if side == "at most" else value >= limit
        apart = f"{abs(value / limit - 1):.0%} {'over' if value > limit else 'under'} it"
        text = f"{what}: {side} {limit:g} {unit}: {value:.3g} {unit}, {apart}"
        self.bars.append(Bar(text, met))

    @property
    def met(self) -> bool:
        """Whether no bar was missed."""
        return all(bar.met is not False for bar in self.bars)

    def show(self, console: Console) -> None:
        """Print table and bars."""
        table = Table(title=self.name)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for bar in self.bars:
            console.print(f"  {bar.verdict}: {bar.text}", highlight=False, markup=False)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        bars = [{"bar": bar.text, "met": bar.met} for bar in self.bars]
        return {"name": self.name, "figures": self.figures, "bars": bars}

    def as_markdown(self) -> str:
        """For ``--markdown``."""
        lines = [f"## {self.name[0].upper()}{self.name[1:]}", ""]
        lines.append(_row(self.columns))
        lines.append(_row(["---", *["---:"] * (len(self.columns) - 1)]))
        lines += [_row(row) for row in self.rows]
        if self.bars:
            lines += ["", *(f"- {bar.verdict}: {bar.text}" for bar in self.bars)]
        return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    texts = [cell.replace("|", "\\|").replace("\n", ": ") for cell in cells]
    return "| " + " | ".join(texts) + " |"


def in_words(machine: Mapping[str, Any]) -> str:
    """A machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def write_json(path: str, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """All outcomes and the machine as one JSON file."""
    content = {"machine": machine, "benchmarks": [each.as_json() for each in outcomes]}
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def write_markdown(path: str, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """All tables and bars as one page."""
    parts = ["# Figures\n", f"Made by `python -m benchmarks --markdown`: {in_words(machine)}.\n"]
    Path(path).write_text("\n".join([*parts, *(each.as_markdown() for each in outcomes)]))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of neighbouring rounds."""
    return median([a / b for a, b in zip(ours, theirs, strict=True)])
