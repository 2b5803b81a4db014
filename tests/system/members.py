"""A test's worker process as a member of a job: a board that one of them serves, and a runtime.

Members are named by the rank that the stage gave them: ``w:0``, ``w:1`` and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiocomm
from aiocomm import Collective, CollectiveGroup, Options, TCPBoard

from ..worker import Stage


@asynccontextmanager
async def board(stage: Stage, *, serve: int = 0) -> AsyncIterator[TCPBoard]:
    """The board of this test; the member of rank ``serve`` must outlive the others."""
    if stage.rank == serve:
        async with TCPBoard(port=0, serve=True) as served:
            stage.set("board", served.port)
            yield served
    else:
        async with TCPBoard(port=await stage.wait("board"), serve=False) as joined:
            yield joined


@asynccontextmanager
async def member(stage: Stage, *, serve: int = 0, **settings: Any) -> AsyncIterator[Collective]:
    """The open runtime of this member."""
    async with (
        board(stage, serve=serve) as store,
        aiocomm.open(f"w:{stage.rank}", store=store, options=Options(**settings)) as collective,
    ):
        yield collective


def group_with(collective: Collective, other: int, name: str | None = None) -> CollectiveGroup:
    return collective.create_collective_group([str(collective.address), f"w:{other}"], name)


async def outcomes(works: list[Any]) -> list[BaseException | None]:
    """What the works failed with, once all are done."""
    await asyncio.wait(works)
    return [work.exception() for work in works]
