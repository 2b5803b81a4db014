"""Event loops for tests: asyncio's and uvloop's, in debug mode, with nothing swallowed.

A loop made here keeps a list of what it would only have logged (a task's exception that nobody
retrieved, a callback that raised) and is asked afterwards for the tasks that were left. Used by the
tests' own loops and by the worker processes alike. Knows nothing of pytest.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvloop

Context = dict[str, Any]


def _unhurried(new: Callable[[], Any]) -> asyncio.AbstractEventLoop:
    """In debug mode a loop warns of callbacks that took 0.1 s: on a busy machine, of any."""
    loop: asyncio.AbstractEventLoop = new()
    loop.slow_callback_duration = math.inf
    return loop


FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": partial(_unhurried, asyncio.SelectorEventLoop),
    "uvloop": partial(_unhurried, uvloop.new_event_loop),
}


def name_of(loop: asyncio.AbstractEventLoop) -> str:
    """The key in FACTORIES that made this loop."""
    return "uvloop" if isinstance(loop, uvloop.Loop) else "asyncio"


def make(name: str, complaints: list[Context]) -> asyncio.AbstractEventLoop:
    """A new loop whose exception handler appends to ``complaints``."""
    loop = FACTORIES[name]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    return loop


async def stragglers() -> list[str]:
    """Tasks other than the current one, after those that are about to end have ended."""
    current = asyncio.current_task()
    others: set[asyncio.Task[Any]] = set()
    for _ in range(8):  # a cancelled task needs a few turns of the loop, and no event tells
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {current}
        if not others:
            break
    return [f"task {task!r}" for task in others]


def describe(context: Context) -> str:
    """One complaint of a loop as text, with its traceback."""
    lines = [str(context.get("message"))]
    lines += [f"  {key}: {value!r}" for key, value in context.items() if key != "message"]
    error = context.get("exception")
    if isinstance(error, BaseException):
        lines += traceback.format_exception(error)
    return "\n".join(lines)


@contextmanager
def counted_turns() -> Iterator[list[int]]:
    """The number of turns that the running loop has begun."""
    loop, count = asyncio.get_running_loop(), [0]

    def turn() -> None:
        count[0] += 1
        handle[0] = loop.call_soon(turn)

    handle = [loop.call_soon(turn)]
    yield count
    handle[0].cancel()
