"""The package's source as data: its modules and what each imports, read with ast and not run.

Knows nothing of the rules; tests/test_imports.py and tests/test_layout.py hold those.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aiocomm"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its full name."""

    name: str
    line: int
    for_types: bool  # under ``if TYPE_CHECKING:``
    in_function: bool


def modules() -> dict[str, Path]:
    """Every module of the package, by its full name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> list[Import]:
    """What the module of that name imports; ``from . import a`` counts as the module a."""
    known = set(modules())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(_walk(ast.parse(path.read_text()), package, known, False, False))


def _walk(
    node: ast.AST, package: str, known: set[str], for_types: bool, in_function: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, for_types, in_function)
        elif isinstance(child, ast.ImportFrom):
            for full in _targets(child, package, known):
                yield Import(full, child.lineno, for_types, in_function)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                holder = ast.Module(body=[statement], type_ignores=[])
                yield from _walk(holder, package, known, True, in_function)
            for statement in child.orelse:
                holder = ast.Module(body=[statement], type_ignores=[])
                yield from _walk(holder, package, known, for_types, in_function)
        else:
            inside = in_function or isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            yield from _walk(child, package, known, for_types, inside)


def _targets(node: ast.ImportFrom, package: str, known: set[str]) -> set[str]:
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        parts = parts[: len(parts) - (node.level - 1)]
        base = ".".join([*parts, base] if base else parts)
    full = {f"{base}.{alias.name}" for alias in node.names}
    submodules = full & known
    return submodules if submodules == full else submodules | {base}


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
