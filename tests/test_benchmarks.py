"""The benchmarks' own arithmetic and manners: bars, tables, files, turns, and peers that fail.

What they measure is nobody's business here; one of them runs for real, with the raw socket only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import aiocomm
from benchmarks import channel, events, groups, latency, ray, tensors, throughput, weights
from benchmarks.__main__ import read
from benchmarks.contest import Cell, Plan, Scores, measure
from benchmarks.harness import Settings
from benchmarks.outcome import Outcome, write_json, write_markdown
from benchmarks.payloads import check, make, stream_of
from benchmarks.peers import pair
from benchmarks.peers.lines import FLOOR, LINES, OURS, SHARED, Line, chosen
from benchmarks.peers.pair import Pair, PeerFailed

from .sources import ROOT

QUICK = Settings(quick=True)
RAW = next(line for line in LINES if line.name == FLOOR)
CELL = Cell("small", "exchange", {"payload": "dict", "count": 1})
STREAM = Cell("1 MiB", "stream", {"size": 1 << 20, "count": 2})


def shown(outcome: Outcome) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        outcome.show(console)
    return capture.get()


class Peers:
    """Stands in for processes; each line takes the seconds it is given, or fails as told."""

    def __init__(self, **behaviour: float | str) -> None:
        self.behaviour = behaviour
        self.asked: list[str] = []
        self.alive: set[str] = set()
        self.started: list[str] = []

    @contextmanager
    def __call__(self, line: Line) -> Iterator[Any]:
        self.started.append(line.name)
        if self.behaviour[line.name] == "dead on arrival":
            raise PeerFailed("no such luck")
        self.alive.add(line.name)
        yield _Asked(self, line.name)
        self.alive.remove(line.name)


class _Asked:
    def __init__(self, peers: Peers, name: str) -> None:
        self._peers, self._name = peers, name

    def ask(self, do: str, **arguments: Any) -> float:
        assert self._name in self._peers.alive
        self._peers.asked.append(self._name)
        behaviour = self._peers.behaviour[self._name]
        if isinstance(behaviour, str):
            raise PeerFailed(behaviour)
        return behaviour


def line(name: str, **other: Any) -> Line:
    return Line(name=name, module="raw", **other)


# --- bars, tables, files ---


@pytest.mark.parametrize(
    ("side", "value", "verdict", "text"),
    [
        ("at_most", 1.5, "met", "this: at most 2 x: 1.5 x, 25% under it"),
        ("at_most", 2.5, "MISSED", "this: at most 2 x: 2.5 x, 25% over it"),
        ("at_least", 2.0, "met", "this: at least 2 x: 2 x, 0% under it"),
        ("at_least", 1.0, "MISSED", "this: at least 2 x: 1 x, 50% under it"),
        ("at_least", None, "not judged", "this: at least 2 x: no figure"),
    ],
)
def test_a_bar_says_by_how_much(side: str, value: float, verdict: str, text: str) -> None:
    outcome = Outcome("name", ("",))
    getattr(outcome, side)("this", value, 2.0)
    assert [(bar.verdict, bar.text) for bar in outcome.bars] == [(verdict, text)]
    assert outcome.met is (verdict != "MISSED")
    assert f"{verdict}: {text}" in shown(outcome)


def test_tables_go_to_json_and_to_markdown(tmp_path: Path) -> None:
    outcome = Outcome("some name", ("", "us"), [("one\nnot | there", "1.5")], {"raw": [1.5]})
    outcome.bar("fine", True)
    write_json(str(tmp_path / "j"), {"cores": 2}, [outcome])
    assert json.loads((tmp_path / "j").read_text()) == {
        "machine": {"cores": 2},
        "benchmarks": [
            {
                "name": "some name",
                "figures": {"raw": [1.5]},
                "bars": [{"bar": "fine", "met": True}],
            }
        ],
    }
    write_markdown(str(tmp_path / "m"), {"cores": 2}, [outcome])
    page = (tmp_path / "m").read_text()
    assert "## Some name\n\n|  | us |\n| --- | ---: |\n| one: not \\| there | 1.5 |\n" in page
    assert "- met: fine\n" in page
    assert "cores 2" in page


# --- turns, and peers that fail ---


def test_lines_of_a_stage_take_turns_and_other_stages_come_later() -> None:
    lines = [line("a"), line("b"), line("c", stage=1)]
    peers = Peers(a=1.0, b=2.0, c=3.0)
    scores = measure({"plan": Plan([CELL], 2)}, lines, start=peers)["plan"]
    assert peers.asked == ["a", "b", "b", "a", "a", "b", "c", "c", "c"]
    assert scores.seconds == {"small": {"a": [1.0, 1.0], "b": [2.0, 2.0], "c": [3.0, 3.0]}}
    assert scores.ratio("small", "b", "a") == 2.0
    assert scores.ratio("small", "c", "a") == 3.0
    assert peers.started == ["a", "b", "c"]
    assert peers.alive == set()


def test_a_missing_peer_is_named_with_its_remedy() -> None:
    lines = [line(OURS), line("gone", needs=("no_such_module",), install="pip install gone")]
    scores = measure({"plan": Plan([CELL], 1)}, lines, start=Peers(aiocomm=1.0))["plan"]
    table = scores.table("title", [CELL], lambda _, seconds: f"{seconds}")
    assert [*table.rows] == [
        (OURS, "1.0 (1.00)"),
        ("gone\nnot installed: pip install gone", ""),
    ]
    assert "not installed: pip install gone" in shown(table)


def test_a_failing_peer_is_reported_and_the_run_goes_on() -> None:
    peers = Peers(aiocomm=1.0, weak="it hurts", late="dead on arrival")
    lines = [line(OURS), line("weak"), line("late")]
    plan = Plan([CELL, STREAM], 1)
    scores = measure({"plan": plan}, lines, start=peers)["plan"]
    assert scores.seconds["small"] == {OURS: [1.0], "weak": [], "late": []}
    assert scores.reasons == {
        "weak": "failed at 1 MiB: it hurts",
        "late": "failed: no such luck",
    }
    # New processes for the next cell for the one, none for the other; nobody is left.
    assert peers.started == [OURS, "weak", "late", "weak"]
    assert peers.alive == set()


def test_only_those_who_can_are_asked() -> None:
    peers = Peers(a=1.0, b=1.0)
    lines = [line("a"), line("b", does=frozenset({"stream"}))]
    scores = measure({"plan": Plan([CELL], 1)}, lines, start=peers)["plan"]
    assert set(peers.asked) == {"a"}
    assert [row[0] for row in scores.table("", [CELL], lambda *_: "").rows] == ["a"]


# --- the lines and the reports ---


def test_words_choose_peers_and_aiocomm_is_always_there() -> None:
    assert chosen([]) == list(LINES)
    names = [each.name for each in chosen(["RAW", "mpi"])]
    assert names[0] == OURS
    assert names[-2:] == [FLOOR, "mpi4py"]
    with pytest.raises(ValueError, match="no peer 'nobody': there are aiocomm"):
        chosen(["nobody"])


def test_shared_tensors_are_a_line_once_aiocomm_has_them() -> None:
    assert (SHARED in [each.name for each in LINES]) == hasattr(aiocomm, "empty_shared")


def test_every_line_has_a_module_and_a_remedy() -> None:
    for each in LINES:
        assert (ROOT / "benchmarks" / "peers" / f"{each.module}.py").is_file()
        assert bool(each.needs) == bool(each.install)


def fabricated(module: Any, seconds: dict[str, float]) -> Scores:
    scores = Scores(LINES)
    for cell in module.plan(QUICK).cells:
        scores.seconds[cell.name] = {name: [each] for name, each in seconds.items()}
    return scores


@pytest.mark.parametrize(
    ("module", "bars"),
    [
        (latency, {"pyzmq asyncio": True, "Dask comm": None, "ucxx": None, "RLinf": True}),
        (throughput, {"mpi4py": False, "bare Gloo": True}),
        (tensors, {"mpi4py": True, "RLinf": True}),
        (weights, {}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_reports_judge_by_the_peers(module: Any, bars: dict[str, bool | None]) -> None:
    seconds = {OURS: 1.0, "mpi4py": 0.5, "pyzmq asyncio": 1.2, "RLinf": 30.0}
    scores = fabricated(module, {**seconds, "bare Gloo broadcast": 2.5})
    outcome = module.report(scores, QUICK)
    for word, met in bars.items():
        assert {bar.met for bar in outcome.bars if word in bar.text} == {met}
    assert OURS in shown(outcome)
    json.dumps(outcome.as_json())


def test_slopes_are_between_neighbours() -> None:
    scores = Scores(LINES, {"10": {OURS: [1.0]}, "100": {OURS: [10.0]}, "1,000": {OURS: []}})
    assert tensors.slopes(scores, OURS, [10, 100, 1_000]) == {"10 to 100": 0.1}


def test_payloads_are_checked_on_arrival() -> None:
    assert list(make("tensors:2:1024")) == ["layers.0.weight", "layers.1.weight"]
    check("tensors:2:1024", {key: each.clone() for key, each in make("tensors:2:1024").items()})
    with pytest.raises(ValueError, match="not the payload"):
        check("tensors:2:1024", make("tensors:3:1024"))
    with pytest.raises(ValueError, match="no payload 'cheese'"):
        make("cheese")
    assert [stream_of(size, 16) for size in (1 << 20, 256 << 20, 1 << 30)] == [4, 2, 2]


def test_round_trips_of_ray_are_held_to_those_of_aiocomm() -> None:
    outcome = Outcome("name", ("",))
    seconds = {(ray.CALL, ray.SMALL): [6.0, 7.0], (ray.OBJECT, ray.SMALL): [1.0, 1.0]}
    seconds |= {(ray.CALL, ray.TENSOR): [4.0, 5.0], (ray.OBJECT, ray.TENSOR): [1.0, 2.0]}
    ray.judge(outcome, seconds)
    assert [bar.met for bar in outcome.bars] == [True, False]


def test_without_ray_its_benchmark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.importlib.util, "find_spec", lambda name: None)
    outcome = ray.run(QUICK)
    assert "not installed: pip install ray" in shown(outcome)
    assert [bar.met for bar in outcome.bars] == [None, None]


def test_channels_are_held_to_the_queue_of_ray_and_to_every_item() -> None:
    outcome = Outcome("name", ("",))
    seconds = {
        (channel.QUEUE, channel.SMALL): [6.0, 7.0],
        (channel.OPEN, channel.SMALL): [1.0, 1.0],
    }
    channel.judge(outcome, seconds, (1.0, list(range(channel.ITEMS))))
    channel.judge(outcome, seconds, (1.0, [0, *range(channel.ITEMS)]))
    assert [bar.met for bar in outcome.bars] == [True, True, True, False]


def test_without_ray_the_benchmark_of_channels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.importlib.util, "find_spec", lambda name: None)
    outcome = channel.run(QUICK)
    assert "not installed: pip install ray" in shown(outcome)
    assert [bar.met for bar in outcome.bars] == [None]


def test_memory_of_this_process_is_seen() -> None:
    assert groups.resident() > 50 << 20


# --- for real ---


def test_events_are_seen_on_both_loops_and_held_to_their_bars() -> None:
    outcome = events.run(QUICK)
    for loop in ("asyncio", "uvloop"):
        figures = [each for name, each in outcome.figures.items() if name.startswith(loop)]
        assert len(figures) == len(events.KINDS)
        assert all(0 < each["median"] <= each["p99"] <= each["largest"] for each in figures)
        assert len([bar for bar in outcome.bars if f", {loop}, " in bar.text]) == 7
    assert len(outcome.rows) == 2 * len(events.KINDS)


def test_raw_peer_for_real() -> None:
    scores = measure({"plan": Plan([CELL, STREAM], 1)}, [RAW])["plan"]
    assert scores.reasons == {}
    assert all(0 < scores.median(cell, FLOOR) < 10 for cell in ("small", "1 MiB"))


def test_processes_that_fail_say_why_and_leave_nothing() -> None:
    broken = Pair(Line(name="broken", module="no_such", processes=1))
    with pytest.raises(PeerFailed, match=r"did not start: ModuleNotFoundError: .*no_such"), broken:
        pass
    with Pair(RAW) as real:
        mark = real._mark
        assert len(list(pair.marked(mark))) == 2
        with pytest.raises(PeerFailed, match="ValueError: no payload 'cheese'"):
            real.ask("exchange", payload="cheese", count=1)
    assert list(pair.marked(mark)) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cheese"], "no benchmark cheese"),
        (["--peers", "cheese"], "no peer 'cheese'"),
        (["latency", "--picture", "x"], "error: --picture"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
