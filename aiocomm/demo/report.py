"""What the run came to: both books compared, message by message, and the figures of each direction.

``Report`` is plain data, for ``--json`` and for tests; ``show`` draws it. Times of both processes
are comparable, for Linux has one monotonic clock for all processes of a host, and both are on one.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from .figures import busy, percentile
from .records import Direction, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from .records import Books, Carried, Settings

LATENCY = "latency: from the call of send to the completion of recv in the other process"


@dataclass(frozen=True, slots=True)
class Difference:
    """A message that is not the same on both sides; a checksum is None where there is none."""

    direction: Direction
    number: int
    sent: str | None
    received: str | None

    def __str__(self) -> str:
        if self.received is None:
            return f"{self.direction} message {self.number} was sent and never received"
        if self.sent is None:
            return f"{self.direction} message {self.number} was received and never sent"
        return (
            f"{self.direction} message {self.number} differs: "
            f"checksum {self.sent} sent, {self.received} received"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionReport:
    """One direction; times in seconds, None where there were no messages.

    ``transfer`` is the time in which at least one message was under way, and ``rate`` the bytes by
    that time. ``latency`` is from the call of send to the completion of recv.
    """

    direction: Direction
    messages: int
    nbytes: int
    transfer: float
    rate: float | None
    latency_p50: float | None
    latency_p99: float | None
    routes: dict[str, Carried]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One process; threads are the least and the most seen once every route was set up."""

    role: str
    address: str
    pid: int
    loop: str
    threads: tuple[int, int]
    lag_p99: float
    lag_largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run; ``compared`` counts the messages whose checksums of both sides were compared."""

    settings: Settings
    seconds: float
    compared: int
    differences: tuple[Difference, ...]
    directions: tuple[DirectionReport, ...]
    workers: tuple[WorkerReport, ...]

    def to_json(self) -> str:
        """The report as JSON, with the fields named as here."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def make_report(settings: Settings, books: Sequence[Books], seconds: float) -> Report:
    """Compare the books of trainer and rollout.

    Args:
        settings: of the run.
        books: by role.
        seconds: that everything took.
    """
    by_role = {each.role: each for each in books}
    differences: list[Difference] = []
    directions = []
    for role in Role:
        sender, receiver = by_role[role], by_role[Role(1 - role)]
        differences += compare(role.sends, settings.total(role.sends), sender, receiver)
        directions.append(_direction(role.sends, sender, receiver))
    return Report(
        settings=settings,
        seconds=seconds,
        compared=sum(settings.total(direction) for direction in Direction),
        differences=tuple(differences),
        directions=tuple(directions),
        workers=tuple(_worker(each) for each in books),
    )


def compare(direction: Direction, total: int, sender: Books, receiver: Books) -> list[Difference]:
    """Every message of that direction whose two checksums are not one and the same."""
    found = []
    for number in range(max(total, len(sender.sent), len(receiver.received))):
        sent = sender.sent[number].checksum if number < len(sender.sent) else None
        received = receiver.received[number].checksum if number < len(receiver.received) else None
        if sent is None or received is None or sent != received:
            found.append(Difference(direction, number, sent, received))
    return found


def _direction(direction: Direction, sender: Books, receiver: Books) -> DirectionReport:
    times = [
        (sent.called, received.completed)
        for sent, received in zip(sender.sent, receiver.received, strict=False)
    ]
    latencies = [(completed - called) / 1e9 for called, completed in times]
    transfer = busy(times) / 1e9
    nbytes = sum(route.nbytes for route in sender.routes.values())
    return DirectionReport(
        direction=direction,
        messages=sum(route.messages for route in sender.routes.values()),
        nbytes=nbytes,
        transfer=transfer,
        rate=nbytes / transfer if transfer else None,
        latency_p50=percentile(latencies, 50) if latencies else None,
        latency_p99=percentile(latencies, 99) if latencies else None,
        routes=sender.routes,
    )


def _worker(books: Books) -> WorkerReport:
    return WorkerReport(
        role=books.role.name.lower(),
        address=books.address,
        pid=books.pid,
        loop=books.loop,
        threads=books.threads,
        lag_p99=books.lag.p99,
        lag_largest=books.lag.largest,
    )


# --- drawing ---


def show(report: Report, console: Console) -> None:
    """Draw the tables and the verdict."""
    console.print(_direction_table(report))
    console.print(LATENCY, highlight=False)
    console.print(_worker_table(report))
    if report.differences:
        console.print(f"{len(report.differences)} of {report.compared} messages differ")
    else:
        console.print(
            f"{report.compared} messages compared on both sides, all the same to the byte; "
            f"{report.seconds:.1f} s in all",
            highlight=False,
        )


def _direction_table(report: Report) -> Table:
    table = Table()
    table.add_column("direction")
    for heading in ("messages", "MB", "GB/s", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="right")
    table.add_column("route")
    for each in report.directions:
        table.add_row(
            each.direction,
            str(each.messages),
            f"{each.nbytes / 1e6:,.1f}",
            "-" if each.rate is None else f"{each.rate / 1e9:.2f}",
            _milliseconds(each.latency_p50),
            _milliseconds(each.latency_p99),
            ", ".join(f"{name} {route.messages}" for name, route in each.routes.items()),
        )
    return table


def _worker_table(report: Report) -> Table:
    table = Table()
    for heading in ("process", "loop", "threads", "largest lag ms", "p99 lag ms"):
        table.add_column(heading, justify="left" if heading in ("process", "loop") else "right")
    for each in report.workers:
        least, most = each.threads
        table.add_row(
            f"{each.role} ({each.address})",
            each.loop,
            f"{most} constant" if least == most else f"{least} to {most}",
            _milliseconds(each.lag_largest),
            _milliseconds(each.lag_p99),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
