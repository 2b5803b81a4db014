"""Handles of operations under way: awaited in a loop, waited for in threads, chained together."""

from __future__ import annotations

from .base import AsyncWork
from .coll import AsyncCollWork
from .func import AsyncFuncWork

__all__ = ["AsyncCollWork", "AsyncFuncWork", "AsyncWork"]
