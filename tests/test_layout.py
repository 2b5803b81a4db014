"""The shape of the repository: tests mirror the package, files are small and say what for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .sources import PACKAGE, ROOT

LIMIT = 400  # lines at which one stops to ask whether two things live in a file
# Files that were asked and have an answer.
LONG: dict[str, str] = {}
# Modules without a test module of their own, and what tests them instead.
UNMIRRORED: dict[str, str] = {
    "aiocomm/__init__.py": "tests/test_imports.py",
    "aiocomm/__main__.py": "tests/test_cli.py",
    "aiocomm/channel/__init__.py": "tests/test_imports.py",
    "aiocomm/demo/__init__.py": "tests/test_imports.py",
    "aiocomm/device/__init__.py": "tests/test_imports.py",
    "aiocomm/handles/__init__.py": "tests/test_imports.py",
    "aiocomm/transport/__init__.py": "tests/test_imports.py",
    "aiocomm/transport/cuda_ipc/__init__.py": "tests/test_imports.py",
    "aiocomm/transport/shm/__init__.py": "tests/test_imports.py",
    "aiocomm/rendezvous/__init__.py": "tests/test_imports.py",
    "aiocomm/rendezvous/threaded.py": "tests/rendezvous/test_base.py",
    "aiocomm/scheduler/__init__.py": "tests/test_imports.py",
}

SOURCES = sorted(
    path
    for folder in ("aiocomm", "tests", "examples", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_source = pytest.mark.parametrize("path", SOURCES, ids=_name)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=_name)
def test_every_module_has_its_tests(path: Path) -> None:
    mirror = ROOT / "tests" / path.relative_to(PACKAGE).parent / f"test_{path.stem}.py"
    if _name(path) in UNMIRRORED:
        assert not mirror.exists(), "it has its own tests: take it off the list"
        mirror = ROOT / UNMIRRORED[_name(path)]
    assert mirror.is_file()


@each_source
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    if _name(path) in LONG:
        assert lines > LIMIT, "it is short again: take it off the list"
    else:
        assert lines <= LIMIT


@each_source
def test_files_say_what_they_are_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_lists_name_files_that_exist() -> None:
    assert [name for name in (*LONG, *UNMIRRORED) if not (ROOT / name).is_file()] == []


def test_no_file_is_called_utils() -> None:
    assert [
        path for path in SOURCES if "util" in path.stem or path.stem in ("misc", "common")
    ] == []
