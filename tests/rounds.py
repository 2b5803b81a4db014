"""How often to repeat what is dear: the suite is to take no more than minutes."""

from __future__ import annotations

import os


def rounds(full: int) -> int:
    """All of it with AIOCOMM_ROUNDS=all, else a tenth."""
    return full if os.environ.get("AIOCOMM_ROUNDS") == "all" else full // 10
