"""The peers' rounds: every line does every cell, in turns, each in processes of its own.

Lines of one stage are all alive at once and take turns round by round, the first one changing, so
that whatever else the machine does hits all alike; those of other stages come after them, since a
Ray that rests is busy. A line that fails is out of that cell, with the reason in one line, and gets
new processes for the next one; one that does not start is out of all.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiocomm.demo.figures import median

from .outcome import Outcome, ratios
from .peers.lines import OURS
from .peers.pair import Pair, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .peers.lines import Line


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a column of the table.

    Attributes:
        name: as in the table.
        do: ``exchange`` or ``stream``.
        arguments: of that method of ``peers.end.End``.
    """

    name: str
    do: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a benchmark wants measured, and how often; one more round comes first and warms up."""

    cells: Sequence[Cell]
    rounds: int


@dataclass
class Scores:
    """Seconds by cell and line, and why a line has none."""

    lines: Sequence[Line]
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def median(self, cell: str, line: str) -> float | None:
        """Of the rounds; None where there are none."""
        samples = self.seconds.get(cell, {}).get(line)
        return median(samples) if samples else None

    def ratio(self, cell: str, above: str, below: str) -> float | None:
        """Time of one line in times of another: round by round where they took turns."""
        a, b = (self.seconds.get(cell, {}).get(line) for line in (above, below))
        if not a or not b:
            return None
        stages = {line.stage for line in self.lines if line.name in (above, below)}
        if len(a) == len(b) and len(stages) == 1:
            return ratios(a, b)
        return median(a) / median(b)

    def table(
        self,
        title: str,
        cells: Sequence[Cell],
        text: Callable[[Cell, float], str],
        compared: Sequence[str] | None = None,
    ) -> Outcome:
        """Rows for all lines that take part.

        Args:
            title: of the table.
            cells: its columns.
            text: what to show of the seconds of one.
            compared: names of the cells that show the ratio to aiocomm in brackets; default: all.
        """
        outcome = Outcome(title, ("", *(cell.name for cell in cells)))
        kinds = {cell.do for cell in cells}
        for line in self.lines:
            if not kinds & line.does:
                continue
            texts = []
            for cell in cells:
                value = self.median(cell.name, line.name)
                ratio = self.ratio(cell.name, line.name, OURS)
                shown = "" if value is None else text(cell, value)
                if ratio is not None and (compared is None or cell.name in compared):
                    shown += f" ({_times(cell, ratio)})"
                texts.append(shown)
            reason = self.reasons.get(line.name)
            outcome.rows.append((f"{line.name}\n{reason}" if reason else line.name, *texts))
        outcome.figures = {"seconds": self.seconds, "reasons": self.reasons}
        return outcome


def _times(cell: Cell, ratio: float) -> str:
    return f"{ratio if cell.do == 'exchange' else 1 / ratio:.2f}"


def measure(
    plans: Mapping[str, Plan],
    lines: Sequence[Line],
    *,
    say: Callable[[str], None] = lambda text: None,
    start: Callable[[Line], Any] = Pair,
) -> dict[str, Scores]:
    """Carry out all plans; the scores by the name of the plan.

    Args:
        plans: by name.
        lines: who takes part. Those that are not installed are noted as such.
        say: told what is going on.
        start: makes the processes of a line, a context manager with ``ask``.
    """
    scores = {name: Scores(lines) for name in plans}
    dead = {line.name: reason for line in lines if (reason := line.missing())}
    for stage in sorted({line.stage for line in lines}):
        with ExitStack() as exits:
            field_ = _Field(exits, start, dead)
            present = [line for line in lines if line.stage == stage and line.name not in dead]
            if plans and present:
                say(f"taking turns: {', '.join(line.name for line in present)}")
            for name, plan in plans.items():
                for cell in plan.cells:
                    able = [line for line in present if cell.do in line.does]
                    say(f"{name}: {cell.name}")
                    _rounds(field_, able, cell, plan.rounds, scores[name])
    for each in scores.values():
        each.reasons.update(dead)
    return scores


def _rounds(field_: _Field, lines: Sequence[Line], cell: Cell, rounds: int, scores: Scores) -> None:
    found: dict[str, list[float]] = {line.name: [] for line in lines}
    scores.seconds.setdefault(cell.name, {}).update(found)
    left = list(lines)
    for number in range(rounds + 1):
        turn = number % max(1, len(left))
        for line in left[turn:] + left[:turn]:
            try:
                seconds = field_.ask(line, cell)
            except PeerFailed as error:
                scores.reasons[line.name] = f"failed at {cell.name}: {error}"
                left.remove(line)
                continue
            if number:  # the first round warms up
                found[line.name].append(seconds)


class _Field:
    """The processes that are alive, by line; started when first asked."""

    def __init__(
        self, exits: ExitStack, start: Callable[[Line], Any], dead: dict[str, str]
    ) -> None:
        self._exits = exits
        self._start = start
        self._dead = dead
        self._alive: dict[str, ExitStack] = {}
        self._pairs: dict[str, Any] = {}

    def ask(self, line: Line, cell: Cell) -> float:
        """The seconds of one round.

        Raises:
            PeerFailed: it has none; its processes are gone.
        """
        if line.name in self._dead:
            raise PeerFailed(self._dead[line.name])
        if line.name not in self._pairs:
            # Closed with the stage, or before it when it fails; closing twice does nothing.
            own = self._alive[line.name] = self._exits.enter_context(ExitStack())
            try:
                self._pairs[line.name] = own.enter_context(self._start(line))
            except PeerFailed as error:
                self._dead[line.name] = f"failed: {error}"
                raise
        try:
            return float(self._pairs[line.name].ask(cell.do, **cell.arguments))
        except PeerFailed:
            del self._pairs[line.name]
            self._alive[line.name].close()
            raise
