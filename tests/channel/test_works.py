"""The works of a channel, apart from any server."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aiocomm.channel.works import CallWork, GetWork, PutWork


class Notes:
    """Stands where a client is, and writes down what works say."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda what: self.said.append((name, what if isinstance(what, int) else None))


def delivered(notes: Any, value: Any = "item") -> GetWork:
    work = GetWork(loop=asyncio.get_running_loop())
    work._client, work._number, work._owes, work._delivered = notes, 5, True, 5
    work.set_result(value)
    return work


@pytest.mark.parametrize("way", ["await", "result", "then", "gather"])
@pytest.mark.asyncio
async def test_what_was_taken_is_said_once(way: str) -> None:
    notes = Notes()
    work: Any = delivered(notes)
    if way == "await":
        assert await work == "item"
    elif way == "then":
        assert await work.then(str.upper) == "ITEM"
    elif way == "gather":
        assert list(await asyncio.gather(work)) == ["item"]
    assert work.result() == "item"
    del work
    gc.collect()
    assert notes.said == [("taken", 5)]


@pytest.mark.asyncio
async def test_what_nobody_takes_goes_back() -> None:
    notes = Notes()
    work: Any = delivered(notes)
    del work
    gc.collect()
    assert notes.said == [("forgotten", 5)]


@pytest.mark.asyncio
async def test_a_branch_that_falls_gives_back() -> None:
    notes = Notes()
    work = delivered(notes)
    branch = work.then(str.upper)
    branch.cancel()
    assert notes.said == [("give_back", 5)]
    with pytest.raises(asyncio.CancelledError):
        await work


@pytest.mark.parametrize(
    ("kind", "said"),
    [(PutWork, [("put_cancelled", None)]), (GetWork, [("get_cancelled", None)]), (CallWork, [])],
)
@pytest.mark.asyncio
async def test_cancelling_reaches_the_client(kind: Any, said: Any) -> None:
    notes = Notes()
    work = kind(loop=asyncio.get_running_loop())
    work._client = notes
    branch = work.then(repr)
    branch.cancel()
    assert work.cancelled() is (kind is not CallWork)
    assert notes.said == said
    work.cancel()
