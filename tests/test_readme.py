"""What the README and the docs name exists: names, options, variables, commands, files.

Whether their statements hold is the business of the other tests; a statement about something that
is no longer there is caught here.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiocomm
import aiocomm.channel
import aiocomm.worker  # these two are not imported with the package: they need ray
from aiocomm import errors

from .sources import ROOT, modules

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CURRENT = [page for page in PAGES if page.name != "decisions.md"]  # those may speak of the past

each_page = pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)


def spans(page: Path) -> Iterator[str]:
    """What stands between single backticks, outside of blocks of code."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return iter(re.findall(r"`([^`]+)`", prose))


def resolve(dotted: str) -> Any:
    return pkgutil.resolve_name(f"aiocomm.{dotted}")  # it imports modules on the way


def sources() -> str:
    return "\n".join(path.read_text() for path in modules().values())


@each_page
def test_public_names_exist(page: Path) -> None:
    for span in spans(page):
        if match := re.match(r"aiocomm\.([A-Za-z_][\w.]*)", span):
            resolve(match[1])


@each_page
def test_classes_exist(page: Path) -> None:
    named = {span for span in spans(page) if re.fullmatch(r"[A-Z]\w*(Error|Timeout)", span)}
    builtin = {"ValueError", "TimeoutError", "RuntimeError", "ConnectionError"}
    assert [name for name in named - builtin if not hasattr(errors, name)] == []


@each_page
def test_options_exist(page: Path) -> None:
    fields = {field.name for field in dataclasses.fields(aiocomm.Options)}
    named = {span.removeprefix("Options.") for span in spans(page) if span.startswith("Options.")}
    assert named <= fields


def test_every_option_is_explained() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    fields = [field.name for field in dataclasses.fields(aiocomm.Options)]
    assert [name for name in fields if f"| `{name}` |" not in guide] == []


def test_environment_variables_are_read_and_all_are_named() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("## Environment variables")[2].partition("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([A-Z_]+)`", row)
    }
    quoted = {name for name in named if f'"{name}"' in sources()}
    assert named == quoted
    read = set(re.findall(r"(?:environ|variables)\.get\(\s*\"([A-Z_]+)\"", sources()))
    read |= set(re.findall(r"_number\(variables, \"([A-Z_]+)\"", sources()))
    assert read - {"TORCHELASTIC_USE_AGENT_STORE"} == named  # that one is torchrun's own affair


@each_page
def test_commands_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = page.read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE) + re.findall(r"`make (\w+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@each_page
def test_files_exist(page: Path) -> None:
    text = page.read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text)
    assert [name for name in linked if not (page.parent / name).exists()] == []
    named = re.findall(r"`((?:aiocomm|tests|examples|benchmarks|docs|tools)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_is_exported_is_there() -> None:
    assert sorted(aiocomm.__all__) == sorted(set(aiocomm.__all__))
    assert [name for name in aiocomm.__all__ if not hasattr(aiocomm, name)] == []


def test_errors_stay_in_their_module() -> None:
    # One way to write each: aiocomm.errors.PeerLostError.
    assert [name for name in dir(aiocomm) if name.endswith("Error")] == []
