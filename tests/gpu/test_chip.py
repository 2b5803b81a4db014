"""On a real chip: every check of ``benchmarks/gpu.py``, each in processes of its own."""

from __future__ import annotations

import pytest

from benchmarks.gpu import CHECKS, Check, run
from benchmarks.on_chip.chip import CUDA

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_it_holds(check: Check) -> None:
    result = run(check, CUDA, 2 * check.seconds)
    assert not result.error, result.error
    assert result.outcome == "held"
