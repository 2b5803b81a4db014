"""One worker's being found: opened by whoever comes first, begun again after a failure, closed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aiocomm import Options, WorkerAddress
from aiocomm.errors import ClosedError, NetworkError, RendezvousError
from aiocomm.presence import Presence
from aiocomm.testing import MemoryStore

pytestmark = pytest.mark.asyncio

A, B = WorkerAddress("a", 0), WorkerAddress("b", 0)


class Board(MemoryStore):
    """Counts its users; refuses, or takes its time, as told."""

    def __init__(self, host: str = "127.0.0.1", *, refusals: int = 0) -> None:
        super().__init__(host)
        self.users = 0
        self.refusals = refusals
        self.gate = asyncio.Event()
        self.gate.set()
        self.reached = asyncio.Event()

    async def aopen(self) -> None:
        self.reached.set()
        await self.gate.wait()
        if self.refusals:
            self.refusals -= 1
            raise RendezvousError("the board is not there")
        await super().aopen()
        self.users += 1

    async def aclose(self) -> None:
        await super().aclose()
        self.users -= 1


def presence(board: MemoryStore) -> Presence:
    return Presence(
        board, A, accept=lambda hello: None, connected=lambda link: link.abort(), options=Options()
    )


async def test_many_who_need_it_open_it_once() -> None:
    board = Board()
    ours = presence(board)
    await asyncio.gather(*(ours.open() for _ in range(10)))
    assert board.users == 1
    assert await board.get("worker/a:0", 0)
    await ours.aclose()
    await ours.aclose()
    assert board.users == 0


async def test_what_failed_is_begun_again_by_the_next_who_needs_it() -> None:
    board = Board(refusals=1)
    ours = presence(board)
    for outcome in await asyncio.gather(ours.open(), ours.open(), return_exceptions=True):
        assert isinstance(outcome, RendezvousError)
    assert board.users == 0
    await ours.open()
    assert board.users == 1
    await ours.aclose()


async def test_each_dial_has_an_error_of_its_own() -> None:
    # A session writes its group and peer into the error that ends it.
    board = Board(refusals=1)
    ours = presence(board)
    outcomes = await asyncio.gather(
        *(ours.connect(B, "") for _ in range(2)), return_exceptions=True
    )
    first, second = outcomes
    assert isinstance(first, RendezvousError)
    assert isinstance(second, RendezvousError)
    assert first is not second
    assert first.__cause__ is second.__cause__
    await ours.aclose()


async def test_a_listener_that_cannot_be_had_gives_the_board_back() -> None:
    board = Board("192.0.2.1")  # of no machine
    ours = presence(board)
    with pytest.raises(NetworkError):
        await ours.open()
    assert board.users == 0
    await ours.aclose()


async def test_begun_without_waiting_it_is_open_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board(refusals=1)
    ours = presence(board)
    with caplog.at_level(logging.WARNING, "aiocomm"):
        ours.begin()
        with pytest.raises(RendezvousError):
            await ours.open()
        await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "a:0 is not found by others yet, its calls try again: the board is not there"
    ]
    ours.begin()
    await ours.open()
    assert board.users == 1
    await ours.aclose()


async def test_who_stops_waiting_stops_nobody_else() -> None:
    board = Board()
    board.gate.clear()
    ours = presence(board)
    impatient, patient = asyncio.create_task(ours.open()), asyncio.create_task(ours.open())
    await board.reached.wait()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    board.gate.set()
    await patient
    assert board.users == 1
    await ours.aclose()


async def test_closing_ends_an_opening_that_is_under_way() -> None:
    board = Board()
    board.gate.clear()
    ours = presence(board)
    waiting = [asyncio.create_task(each) for each in (ours.open(), ours.connect(B, ""))]
    await board.reached.wait()
    await ours.aclose()
    assert board.users == 0
    for each in (*waiting, ours.open()):
        with pytest.raises(ClosedError, match="the runtime of a:0 is closed: open a new one"):
            await each
    with pytest.raises(ClosedError):
        await ours.connect(B, "")


async def test_closed_before_it_was_opened() -> None:
    board = Board()
    ours = presence(board)
    await ours.aclose()
    assert not board.reached.is_set()


async def test_closing_at_any_moment_of_an_opening_leaves_nothing() -> None:
    for turns in range(12):  # an opening takes fewer
        ours = presence(Board())
        ours.begin()
        for _ in range(turns):
            await asyncio.sleep(0)
        await ours.aclose()
