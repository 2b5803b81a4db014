"""``benchmarks/gpu.py`` where there is no GPU: what it says, how it goes on, that its checks run.

A rehearsal shows that the script works; nothing here is about a chip.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import CHECKS, NO_GPU, WARNING, Check, main, read, run
from benchmarks.on_chip import alone, checks
from benchmarks.on_chip.chip import CUDA, DTYPES, REHEARSAL, CheckFailed, Chip, hold, same

from .simulated import Simulated, simulated
from .sources import ROOT

CHIP = Chip(REHEARSAL)


async def fails(collective: Any, rank: int, kind: str) -> dict[str, Any]:
    """This one fails."""
    hold(rank, "something is not as promised")
    return {}


async def hangs(collective: Any, rank: int, kind: str) -> dict[str, Any]:
    """This one hangs."""
    await asyncio.sleep(60)
    return {}


async def tells(collective: Any, rank: int, kind: str) -> dict[str, Any]:
    """This one has something to tell."""
    found = {"seen": os.environ.get("SEEN"), "by size": {"1 MiB": {"GB/s": 1.2345}}}
    return found if rank else {"seconds": 0.12345}


def rehearse(tmp_path: Path, *names: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "found.json"
    status = main([*names, "--rehearse", "--json", str(target)])
    return status, json.loads(target.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "found.json"
    assert main(["--json", str(target)]) == NO_GPU
    assert "nothing was checked, nothing was measured" in capsys.readouterr().out
    assert not target.exists()


def test_one_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        Check("fails", fails),
        Check("hangs", hangs, processes=1, seconds=2.0),
        Check("tells", tells, environment={"SEEN": "yes"}),
        Check("chip", tells, chip_only=True),
    )
    monkeypatch.setattr(gpu, "CHECKS", lines)
    monkeypatch.delenv("SEEN", raising=False)
    status, found = rehearse(tmp_path)
    assert status == 1
    outcomes = {each["name"]: each["outcome"] for each in found["results"]}
    assert outcomes == {"fails": "FAILED", "hangs": "FAILED", "tells": "held", "chip": "left out"}
    assert found["rehearsal"] is True
    assert "SEEN" not in os.environ
    out = capsys.readouterr().out
    assert out.startswith(WARNING)
    assert out.rstrip().endswith(WARNING)
    assert "CheckFailed: something is not as promised" in out
    assert "--- fails ---" in out
    assert "in fails" in out, "the traceback of the process that failed"
    assert "not all were done in time" in out or "TimeoutError" in out
    assert "seconds 0.123, seen yes" in out
    assert "1 MiB: GB/s 1.23" in out


def test_no_time_left_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["kinds", "--rehearse", "--limit", "0.5", "--json", str(tmp_path / "found.json")])
    assert status == 1
    assert "no time is left of 0.5 s" in capsys.readouterr().out


def test_a_check_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["kinds", "nonsense"])
    assert "there is no check 'nonsense': give some of kinds, order" in capsys.readouterr().err


PAIRED = [
    check
    for check in CHECKS
    if not check.chip_only and check.processes == 2 and check.name not in ("order", "then")
]


async def all_of_them(collective: Any, rank: int, kind: str) -> dict[str, Any]:
    """All that two processes do, one after another: starting those is what costs time."""
    found = {}
    for check in PAIRED:
        try:
            found[check.name] = await check.run(collective, rank, kind)
        except Exception as error:
            error.add_note(f"in the check {check.name}")
            raise
    return found


@pytest.mark.parametrize(
    "check",
    [Check("paired", all_of_them), *(check for check in CHECKS if check.name == "death")],
    ids=lambda check: check.name,
)
def test_each_check_that_can_be_rehearsed_holds(check: Check) -> None:
    result = run(check, REHEARSAL, sum(each.seconds for each in PAIRED))
    assert not result.error, result.error


def test_it_runs_by_its_path_from_anywhere(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "then", "--rehearse"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gpu.json").is_file()


PROBE = """
import sys
import torch, torch.distributed
before = set(sys.modules)
from benchmarks import gpu
heads = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(heads - set(sys.stdlib_module_names) - {"aiocomm", "benchmarks", "torch"}))
"""


def test_it_needs_torch_anyio_and_uvloop_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert set(ast.literal_eval(done.stdout)) <= {"anyio", "uvloop"}


def test_every_check_says_what_it_is_about() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.title.endswith((".", "?")) for check in CHECKS)


def test_what_is_compared() -> None:
    sample = checks.Sample(CHIP.values(4, 1), 3, CHIP.values(2, 2))
    other = checks.Sample(CHIP.values(4, 1), 3, CHIP.values(2, 3))
    assert same({"a": [sample, (1, "x")]}, {"a": [sample, (1, "x")]})
    for left, right in (
        (sample, other),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (CHIP.values(4, 1), CHIP.values(4, 1).view(2, 2)),
        (1, 2),
    ):
        assert not same(left, right)
    nan = torch.tensor([float("nan")])
    assert same(nan, nan.clone()), "bytes are compared"
    with pytest.raises(CheckFailed, match="no"):
        hold(0, "no")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_the_same_for_the_same_seed(dtype: torch.dtype) -> None:
    one, two, other = (CHIP.values(50, seed, dtype) for seed in (3, 3, 4))
    assert one.dtype is dtype
    assert same(one, two)
    assert not same(one, other)


# --- the checks that cannot be rehearsed, on a simulated device: that their own code runs ---


class Timed:
    """A ``torch.cuda.Event`` that measures time."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, _: Timed) -> float:
        return 0.1


class Alone:
    """A process group of one member."""

    class Options:
        def __init__(self, high_priority: bool) -> None:
            self.config = SimpleNamespace()

    aborted = False

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert (rank, size, options.config.blocking) == (0, 1, 1)

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.index == 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        assert len(tensors) == 1
        return SimpleNamespace(synchronize=lambda: None)

    def abort(self) -> None:
        Alone.aborted = True


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    monkeypatch.setattr(Chip, "begin", lambda _: None)
    monkeypatch.setattr(Chip, "device", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Timed)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5)))
    monkeypatch.setattr(alone, "EVENTS", 50)
    with simulated(auto=True) as sim:
        sim.process_group = Alone
        yield sim


@pytest.mark.asyncio
async def test_the_check_of_the_poller_runs(chip: Simulated) -> None:
    nobody: Any = None
    found = await alone.poller(nobody, 0, CUDA)
    assert set(found) == {"latest_us", "event_to_future_us"}


@pytest.mark.asyncio
async def test_the_check_of_nccl_runs(chip: Simulated) -> None:
    nobody: Any = None
    found = await alone.nccl_alone(nobody, 0, CUDA)
    assert found["nccl"] == "2.27.5"
    assert Alone.aborted
    chip.process_group = None
    with pytest.raises(CheckFailed, match="no NCCL"):
        await alone.nccl_alone(nobody, 0, CUDA)
