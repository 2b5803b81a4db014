"""What a worker process does where a package is not installed.

Apart from the tests, which have imported the package: a worker that is to do without it imports
this file only. Rejected: a fresh interpreter for each, which spends a second on torch first.
"""

from __future__ import annotations

import importlib
import sys

from .worker import Stage


def _remove(package: str) -> None:
    """As if it had never been installed; nothing may have imported it by now."""
    assert package not in sys.modules
    sys.modules[package] = None  # type: ignore[assignment]


def import_without(stage: Stage, package: str, *modules: str) -> list[tuple[str, str]]:
    """Class and text of the ImportError that importing each module raises."""
    _remove(package)
    found = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            found.append((type(error).__name__, str(error)))
    return found


def call_main_without(stage: Stage, package: str, *arguments: str) -> object:
    """The exit status of the command line."""
    from aiocomm.cli import main

    _remove(package)
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as error:
        return error.code
    return None
