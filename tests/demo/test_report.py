"""The verdict and the figures follow from the books."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from aiocomm.demo.records import Direction, Role
from aiocomm.demo.report import Difference, Report, compare, make_report, show

from .books import SETTINGS, books, run_of

GOOD = [("a", 10), ("b", 60)]


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_of_a_good_run() -> None:
    report = make_report(SETTINGS, run_of(GOOD), 1.5)
    weights, trajectories = report.directions
    assert report.differences == ()
    assert report.compared == 6
    assert weights.direction is Direction.WEIGHTS
    assert (weights.messages, weights.nbytes) == (2, 1000)
    assert weights.transfer == pytest.approx(0.030)
    assert weights.rate == pytest.approx(1000 / 0.030)
    assert weights.latency_p50 == pytest.approx(0.010)
    assert weights.latency_p99 == pytest.approx(0.020)
    assert trajectories.transfer == pytest.approx(0.006)  # two pairs that overlap
    assert [worker.threads for worker in report.workers] == [(7, 7), (7, 9)]


def test_what_is_shown() -> None:
    text = shown(make_report(SETTINGS, run_of(GOOD), 1.5))
    for word in ("weights", "trajectories", "gloo 2", "7 constant", "7 to 9", "3.00", "uvloop"):
        assert word in text
    assert "6 messages compared on both sides, all the same to the byte" in text
    assert "differ" not in text


def test_a_difference_is_named() -> None:
    report = make_report(SETTINGS, run_of([("a", 10), ("x", 60)]), 1.0)
    assert report.differences == (Difference(Direction.WEIGHTS, 1, "b", "x"),)
    assert str(report.differences[0]) == ("weights message 1 differs: checksum b sent, x received")
    assert "1 of 6 messages differ" in shown(report)


def test_a_missing_message_is_a_difference() -> None:
    report = make_report(SETTINGS, run_of(GOOD[:1]), 1.0)
    assert [str(each) for each in report.differences] == [
        "weights message 1 was sent and never received"
    ]


def test_a_message_that_nobody_sent_is_a_difference() -> None:
    sender = books(Role.TRAINER, [("a", 0)], [])
    receiver = books(Role.ROLLOUT, [], [("a", 1), ("b", 2)])
    found = compare(Direction.WEIGHTS, 1, sender, receiver)
    assert [str(each) for each in found] == ["weights message 1 was received and never sent"]


def test_messages_that_neither_side_has_are_differences() -> None:
    nothing = [books(Role.TRAINER, [], []), books(Role.ROLLOUT, [], [])]
    report = make_report(SETTINGS, nothing, 1.0)
    assert len(report.differences) == 6
    assert report.directions[0].rate is None
    assert "-" in shown(report)


def test_json_has_everything() -> None:
    found = json.loads(make_report(SETTINGS, run_of([("a", 10), ("x", 60)]), 1.0).to_json())
    assert found["settings"]["steps"] == 2
    assert found["directions"][0]["routes"] == {"gloo": {"messages": 2, "nbytes": 1000}}
    assert found["differences"][0]["received"] == "x"
    assert found["workers"][1]["role"] == "rollout"
