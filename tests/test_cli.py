"""The command line as a process: exit statuses, Ctrl-C, and what it says without its extra."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .absent import call_main_without
from .processes import Workers, run_workers
from .sources import ROOT

TIMEOUT = 120.0  # seconds; guards against hanging, nothing else
SMALL = ("demo", "--params", "1", "--steps", "2", "--trajectories", "3")


def aiocomm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiocomm", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_the_main_job(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    found = aiocomm(*SMALL, "--json", str(figures))
    assert (found.returncode, found.stderr) == (0, "")
    assert "8 messages compared on both sides, all the same to the byte" in found.stdout
    assert "\x1b[" not in found.stdout  # no terminal, no escapes
    report = json.loads(figures.read_text())
    assert report["differences"] == []
    assert {worker["role"] for worker in report["workers"]} == {"trainer", "rollout"}


def test_one_flipped_bit_in_weights_of_ones_own_gives_status_1(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    save_file({"a": torch.arange(100_000), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    found = aiocomm(*SMALL, "--weights", str(path), "--corrupt", "1")
    assert found.returncode == 1
    assert "weights message 1 differs" in found.stderr
    assert "1 of 8 messages differ" in found.stdout


def test_ctrl_c_ends_it_cleanly() -> None:
    command = [sys.executable, "-m", "aiocomm", "demo", "--params", "1", "--steps", "100000"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite that runs in the background of a shell has inherited that interrupts are ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("weights 0/100000")  # the workers run
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them
        _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert errors == "aiocomm demo: interrupted; both processes were ended\n"


@pytest.mark.parametrize("package", ["typer", "rich", "safetensors"])
def test_without_the_extra(package: str) -> None:
    with Workers(1) as workers:
        worker = workers.start(call_main_without, package, "demo", "--weights", __file__)
        assert workers.join() == [2]
    assert worker.stderr == (
        f"aiocomm: the command line needs the package {package}: pip install 'aiocomm[demo]'\n"
    )


def test_an_import_that_fails_for_another_reason_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"aiocomm\.demo\.run"):
        run_workers(call_main_without, 1, "aiocomm.demo.run")
