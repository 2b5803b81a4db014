"""Works for tests, and functions to chain to them."""

from __future__ import annotations

import asyncio
from typing import Any

from aiocomm.handles import AsyncWork


def new_work() -> AsyncWork[Any]:
    """A work of the running loop that the test completes."""
    return AsyncWork(loop=asyncio.get_running_loop())


def done_soon(value: Any = None) -> AsyncWork[Any]:
    """A work that completes in the next turn of the loop."""
    work = new_work()
    asyncio.get_running_loop().call_soon(work._finish, value)
    return work


def fails_soon(error: BaseException) -> AsyncWork[Any]:
    """A work that fails in the next turn of the loop."""
    work = new_work()
    asyncio.get_running_loop().call_soon(work._fail, error)
    return work


def boom(_: object = None) -> Any:
    """Always fails."""
    raise ValueError("boom")
