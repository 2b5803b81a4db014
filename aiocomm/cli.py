"""Where the command line starts: finds the commands, or says what to install.

It may not import typer or rich itself: the core installs without them, and whoever types the
command then is owed a sentence and not a traceback. The commands live beside what they run
(``demo/command.py``).
"""

from __future__ import annotations

import sys

EXTRAS = ("typer", "rich", "safetensors")
"""Packages of the extra ``demo``."""


def main() -> None:
    """Run the command line on ``sys.argv``; leaves by ``SystemExit`` with the command's status."""
    try:
        from .demo.command import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(
            f"aiocomm: the command line needs the package {package}: pip install 'aiocomm[demo]'",
            file=sys.stderr,
        )
        sys.exit(2)
