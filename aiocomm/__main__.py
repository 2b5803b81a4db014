"""``python -m aiocomm``: the command line. Nothing but the call; ``cli`` has the rest."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
