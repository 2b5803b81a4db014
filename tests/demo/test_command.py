"""Exit statuses and output of ``demo``, with the run itself replaced by what it might come to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import aiocomm
from aiocomm.demo import command
from aiocomm.demo.records import Books, Settings
from aiocomm.errors import PeerLostError

from .books import run_of

GOOD = [("a", 10), ("b", 60)]
Invoke = Callable[..., Any]  # the result of typer's own test client


@pytest.fixture
def asked() -> list[tuple[Settings, float | None]]:
    """What the replaced run was called with."""
    return []


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Settings, float | None]]) -> Invoke:
    """Call the command line with a run that ends as it is told."""

    def call(*arguments: str, ends: BaseException | list[Books]) -> Any:
        def run(settings: Settings, display: Any, *, timeout: float | None) -> list[Books]:
            asked.append((settings, timeout))
            if isinstance(ends, BaseException):
                raise ends
            return ends

        monkeypatch.setattr(command, "run", run)
        return CliRunner().invoke(command.app, ["demo", *arguments])

    return call


TWO = ("--steps", "2", "--trajectories", "2")


def test_all_the_same(invoke: Invoke, asked: list[Any]) -> None:
    found = invoke(*TWO, "--seed", "3", "--params", "7", "--timeout", "9", ends=run_of(GOOD))
    assert found.exit_code == 0, found.output
    assert "all the same to the byte" in found.output
    assert asked == [(Settings(steps=2, trajectories=2, seed=3, parameters=7e6), 9.0)]


def test_a_difference(invoke: Invoke) -> None:
    found = invoke(*TWO, ends=run_of([("a", 10), ("x", 60)]))
    assert found.exit_code == 1
    assert "weights message 1 differs: checksum b sent, x received" in found.stderr


def test_quiet_says_only_what_is_wrong(invoke: Invoke) -> None:
    assert invoke(*TWO, "--quiet", ends=run_of(GOOD)).output == ""
    found = invoke(*TWO, "--quiet", ends=run_of([("a", 10), ("x", 60)]))
    assert found.stdout == ""
    assert "weights message 1 differs" in found.stderr


def test_a_dead_worker(invoke: Invoke) -> None:
    found = invoke(ends=PeerLostError("worker:1 died without a word (exit code -9)"))
    assert found.exit_code == 2
    assert "worker:1 died without a word" in found.stderr
    assert "worker:1 is the rollout" in found.stderr


def test_an_error_of_a_worker_comes_with_its_traceback(invoke: Invoke) -> None:
    error = RuntimeError("broken")
    error.__cause__ = ValueError("traceback of the worker")
    found = invoke(ends=error)
    assert found.exit_code == 2
    assert found.stderr.index("traceback of the worker") < found.stderr.index("broken")


def test_too_slow(invoke: Invoke) -> None:
    found = invoke(ends=TimeoutError("not done within 1 s: worker:0"))
    assert found.exit_code == 2
    assert "not done within 1 s" in found.stderr


def test_interrupted(invoke: Invoke) -> None:
    found = invoke(ends=KeyboardInterrupt())
    assert found.exit_code == 130
    assert "interrupted" in found.stderr
    assert "Traceback" not in found.output


def test_figures_go_to_a_file(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert invoke(*TWO, "--json", str(path), ends=run_of(GOOD)).exit_code == 0
    assert json.loads(path.read_text())["compared"] == 6
    bad = invoke(*TWO, "--json", str(tmp_path / "no" / "f"), ends=run_of(GOOD))
    assert bad.exit_code == 2
    assert "could not be written" in bad.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "0"),
        ("--trajectories", "-1"),
        ("--params", "0"),
        ("--steps", "2", "--corrupt", "2"),
        ("--weights", "/missing.safetensors"),
        ("--weights", __file__),
        ("--nonsense",),
    ],
)
def test_bad_options_start_nothing(
    invoke: Invoke, asked: list[Any], arguments: tuple[str, ...]
) -> None:
    found = invoke(*arguments, ends=run_of(GOOD))
    assert found.exit_code == 2
    assert "Traceback" not in found.output
    assert asked == []


def test_weights_of_ones_own(invoke: Invoke, asked: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    save_file({"a": torch.ones(2)}, path)
    assert invoke(*TWO, "--weights", str(path), ends=run_of(GOOD)).exit_code == 0
    assert asked[0][0].weights == str(path)
    save_file({}, path)
    empty = invoke(*TWO, "--weights", str(path), ends=run_of(GOOD))
    assert empty.exit_code == 2
    assert len(asked) == 1


def test_version() -> None:
    found = CliRunner().invoke(command.app, ["--version"])
    assert found.exit_code == 0
    assert found.output == f"aiocomm {aiocomm.__version__}\n"
