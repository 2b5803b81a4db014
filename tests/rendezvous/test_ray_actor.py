"""What the actor of a Ray board keeps and tells; the class itself, without Ray."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from aiocomm.rendezvous import ray_actor
from aiocomm.rendezvous.ray_actor import BoardActor

from ..sources import PACKAGE

NOTHING: ray_actor.News = {"found": {}, "lost": {}}


def lost(**versions: int) -> ray_actor.News:
    return {"found": {}, "lost": versions}


def found(**values: bytes) -> ray_actor.News:
    return {"found": values, "lost": {}}


async def joined(*clients: str) -> BoardActor:
    board = BoardActor()
    for client in clients:
        assert await board.join(client, {}, {})
    return board


async def left(board: BoardActor, *clients: str) -> None:
    for client in clients:
        await board.leave(client)
    assert board._waiting == {}
    assert board._clients == {}
    assert board._reaper is not None
    board._reaper.cancel()


@pytest.mark.asyncio
async def test_a_key_that_is_there_and_one_that_comes() -> None:
    board = await joined("a", "b")
    await board.set("a", "k", b"1", 1)
    await board.want("b", {"k": True, "l": True}, 1)
    assert await board.listen("b") == found(k=b"1")
    listening = asyncio.create_task(board.listen("b"))
    await board.set("a", "l", b"2", 2)
    assert await listening == found(l=b"2")
    await left(board, "a", "b")


@pytest.mark.asyncio
async def test_who_overwrites_or_deletes_tells_the_writer() -> None:
    board = await joined("a", "b")
    await board.set("a", "k", b"1", 1)
    await board.set("a", "l", b"1", 2)
    await board.set("b", "k", b"2", 1)
    assert await board.delete("b", "l")
    assert await board.listen("a") == lost(k=1, l=2)
    assert not await board.delete("b", "l")
    await left(board, "a", "b")


@pytest.mark.asyncio
async def test_of_two_writes_that_overtake_one_another_the_later_stands() -> None:
    board = await joined("a")
    await board.set("a", "k", b"2", 2)
    await board.set("a", "k", b"1", 1)
    assert await board.look("k") == b"2"
    await left(board, "a")


@pytest.mark.asyncio
async def test_a_word_that_was_overtaken_does_not_count() -> None:
    board = await joined("a", "b")
    await board.want("a", {"k": True}, 3)
    await board.want("a", {"k": False}, 2)
    await board.set("b", "k", b"1", 1)
    assert (await board.listen("a") or NOTHING)["found"] == {"k": b"1"}
    await left(board, "a", "b")


@pytest.mark.asyncio
async def test_what_is_not_wanted_any_more_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "LISTEN", 0.01)
    board = await joined("a", "b")
    await board.want("a", {"k": True}, 1)
    await board.want("a", {"k": False}, 2)
    await board.set("b", "k", b"1", 1)
    assert await board.listen("a") == NOTHING
    await left(board, "a", "b")


@pytest.mark.asyncio
async def test_of_what_clients_bring_to_a_new_actor_the_last_version_stands() -> None:
    board = await joined("a", "b")
    assert await board.join("a", {"k": {"value": b"old", "version": 5}}, {})
    assert await board.join("b", {"k": {"value": b"new", "version": 6}}, {"k": 1, "l": 2})
    assert await board.listen("a") == lost(k=5)
    assert await board.listen("b") == found(k=b"new")
    assert await board.join("a", {"k": {"value": b"old", "version": 5}}, {})
    assert await board.listen("a") == lost(k=5)
    assert await board.look("k") == b"new"
    assert await board.set("a", "l", b"", 1) == 7
    await left(board, "a", "b")


@pytest.mark.asyncio
async def test_the_last_to_leave_ends_it() -> None:
    board = await joined("a", "b")
    assert not await board.leave("a")
    assert await board.listen("a") is None
    assert await board.leave("b")
    assert not await board.join("c", {}, {})
    await left(board)


@pytest.mark.asyncio
async def test_a_client_that_listens_no_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "SLICE", 0.02)
    monkeypatch.setattr(ray_actor, "LISTEN", 0.01)
    board = await joined("dead", "alive")
    await board.want("dead", {"k": True}, 1)
    while "dead" in board._clients:
        assert await board.listen("alive") == NOTHING
    assert await board.listen("dead") is None
    await left(board, "alive")


def test_its_process_needs_neither_torch_nor_aiocomm() -> None:
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('x', {str(PACKAGE)!r} + "
        "'/rendezvous/ray_actor.py')\n"
        "module = sys.modules['x'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert not {'aiocomm', 'torch', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
