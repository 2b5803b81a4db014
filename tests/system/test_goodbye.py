"""A peer that has taken everything closes at once: the sends that it took still end well.

The route of a bulk message may tell that it is done only after the peer's goodbye has come over the
link. Here it always does: the sender's process holds that news back until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import aiocomm
from aiocomm.errors import AiocommError, PeerClosedError
from aiocomm.options import LEAST_SHM
from aiocomm.scheduler.moves import Moves
from aiocomm.session import Session

from ..processes import Stage, Workers

LOOPS = ["uvloop"]  # it starts processes; what differs by loop shows in the tests of the parts

MEMBERS = ["trainer:0", "rollout:0"]
BULK = 128 * 1024  # float32s: large enough for a bulk route, and the kernel's buffers can hold them


@contextlib.contextmanager
def news_after_the_goodbye() -> Iterator[None]:
    held: list[Callable[[], None]] = []
    lost: list[Any] = []
    add, link_lost = Moves.add, Session.link_lost

    def hold(self: Moves, entry: Any, route: str, moved: asyncio.Future[None]) -> None:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        add(self, entry, route, news)

        def tell(moved: asyncio.Future[None]) -> None:
            if (error := moved.exception()) is None:
                news.set_result(None)
            else:
                news.set_exception(error)

        held.append(partial(moved.add_done_callback, tell))
        if lost:  # it came after the goodbye by itself
            held.pop()()

    def lose(self: Session, error: Any) -> None:
        link_lost(self, error)
        lost.append(error)
        for release in held:
            release()

    with patch.object(Moves, "add", hold), patch.object(Session, "link_lost", lose):
        yield


async def give(stage: Stage, board: aiocomm.TCPBoard, options: aiocomm.Options, how: str) -> str:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(news_after_the_goodbye())
        opened = aiocomm.open(MEMBERS[0], store=board, options=options)
        group = (await stack.enter_async_context(opened)).create_collective_group(MEMBERS)
        work = group.send(torch.ones(BULK))
        if how == "waiting":
            await work
        else:
            await group.aclose()
        error = work.exception()
        return f"failed: {error}" if error else "taken"


async def take_and_go(stage: Stage, board: aiocomm.TCPBoard, options: aiocomm.Options) -> float:
    async with aiocomm.open(MEMBERS[1], store=board, options=options) as collective:
        return float((await collective.create_collective_group(MEMBERS).recv()).sum())


# By shared memory no such news comes late: the send is done, or its receipt is on the link.
@pytest.mark.parametrize("how", ["waiting", "closing"])
@pytest.mark.parametrize("route", ["gloo", "link"])
def test_a_send_that_was_taken_whole_does_not_fail_with_the_goodbye(
    loop_name: str, route: str, how: str
) -> None:
    options = aiocomm.Options(route=route)
    with aiocomm.TCPBoard(port=0, serve=True) as board, Workers(2, loop=loop_name) as workers:
        workers.start(give, board, options, how)
        workers.start(take_and_go, board, options)
        assert workers.join() == ["taken", float(BULK)]


async def send_too_much(stage: Stage, board: aiocomm.TCPBoard, route: str) -> str | None:
    options = aiocomm.Options(prefetch_bytes=0, shm_bytes=LEAST_SHM, route=route)
    async with aiocomm.open(MEMBERS[0], store=board, options=options) as collective:
        group = collective.create_collective_group(MEMBERS)
        await group.send(torch.zeros(BULK))
        try:
            await group.send(torch.ones(BULK))
        except PeerClosedError as error:
            return error.group
        raise AiocommError("a message that nobody took counts as sent")


async def take_one(stage: Stage, board: aiocomm.TCPBoard) -> None:
    options = aiocomm.Options(prefetch_bytes=0, close_timeout=600.0)  # which it does not take
    async with aiocomm.open(MEMBERS[1], store=board, options=options) as collective:
        await collective.create_collective_group(MEMBERS).recv()


@pytest.mark.parametrize("route", ["shm", "gloo", "link"])
def test_a_send_that_nobody_took_fails_with_the_goodbye(loop_name: str, route: str) -> None:
    with aiocomm.TCPBoard(port=0, serve=True) as board, Workers(2, loop=loop_name) as workers:
        workers.start(send_too_much, board, route)
        workers.start(take_one, board)
        assert workers.join() == ["rollout:0|trainer:0", None]
