"""Make .venv with aiocomm and one of its extras in it; what ``make`` calls when a stamp is missing.

Knows the standard library only, and is run by the interpreter that .venv shall have. Holds a lock
while it works, so that parallel calls of make wait for one another; the stamp is written last, so
that an interrupted installation is begun again. Rejected: ``mkdir`` or ``flock`` in the Makefile,
of which one stays behind after a crash and the other is not on every machine.

Usage: python tools/environment.py EXTRA
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
INCLUDED = {"test": ["demo"], "bench": ["demo"]}  # as in pyproject.toml: those need no call of pip
SOURCES = [ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__).resolve()]


def is_fresh(stamp: Path) -> bool:
    """Whether the stamp is there and no source is newer."""
    try:
        made = stamp.stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return all(source.stat().st_mtime_ns <= made for source in SOURCES)


def make_environment() -> None:
    """Create .venv, or create it anew when it was left half made or its Python is gone."""
    python = VENV / "bin" / "python"
    check = [str(python), "-c", "import sys, pip; sys.exit(sys.version_info < (3, 11))"]
    if python.exists() and subprocess.run(check, stderr=subprocess.DEVNULL).returncode == 0:
        return
    print(f"making .venv with Python {sys.version.split()[0]}", flush=True)
    try:
        # Not clear=True: the lock file lies in there.
        venv.EnvBuilder(with_pip=True, symlinks=True).create(VENV)
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"Python at {sys.executable} cannot make a virtual environment ({error}); on Debian "
            "and Ubuntu install its -venv package"
        )


def install(extra: str) -> None:
    """Install aiocomm from this folder, editable, with one extra."""
    command = [
        str(VENV / "bin" / "python"),
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--constraint", "constraints.txt", "--editable", f".[{extra}]"),
    ]
    print(f"installing aiocomm[{extra}]", flush=True)
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        sys.exit(f"pip failed with status {status}; its words are above")


def main() -> None:
    extra = sys.argv[1]
    VENV.mkdir(exist_ok=True)
    with open(VENV / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = VENV / f"stamp-{extra}"
        if not is_fresh(stamp):
            stamp.unlink(missing_ok=True)
            make_environment()
            install(extra)
            for each in [*INCLUDED.get(extra, []), extra]:
                (VENV / f"stamp-{each}").touch()


if __name__ == "__main__":
    main()
