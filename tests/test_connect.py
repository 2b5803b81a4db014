"""Being found by the others, and reaching them: late, stale, crossed, refused, or never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiocomm
from aiocomm import connect as module
from aiocomm.connect import Connector
from aiocomm.errors import (
    AuthenticationError,
    PeerLostError,
    Refusal,
    RefusedError,
    RendezvousTimeout,
)
from aiocomm.options import Options
from aiocomm.testing import MemoryStore
from aiocomm.transport.base import Hello, Link
from aiocomm.transport.endpoint import Endpoint
from aiocomm.transport.link import Heart, Listener

from .pairs import MEMBERS
from .transport.links import apart

pytestmark = pytest.mark.asyncio

A, B = (aiocomm.WorkerAddress.parse(member) for member in MEMBERS)


def connector(store: MemoryStore, address: aiocomm.WorkerAddress = A, **settings: Any) -> Connector:
    options = Options(**settings)
    return Connector(store, address, f"life of {address}", Heart(options), options)


def endpoint(incarnation: str = "life of b:0", port: int = 1) -> Endpoint:
    """Where nobody listens."""
    return Endpoint(
        incarnation=incarnation,
        host_id="",
        unix="",
        host="127.0.0.1",
        port=port,
        secret=b"s" * 32,
    )


@asynccontextmanager
async def listening(
    answers: list[Refusal | None], incarnation: str = "life of b:0"
) -> AsyncIterator[Endpoint]:
    """A listener that gives these answers, one to each dial, and drops links that come about."""

    def accept(hello: Hello) -> Refusal | None:
        return answers.pop(0)

    links: list[Link] = []
    listener = await Listener.open(
        "127.0.0.1",
        incarnation=incarnation,
        accept=accept,
        connected=links.append,
        heart=Heart(Options()),
        options=Options(),
    )
    try:
        yield listener.endpoint
    finally:
        for link in links:
            link.abort()
        await listener.aclose()


async def test_what_is_published_is_found_until_a_successor_comes() -> None:
    async with MemoryStore() as store:
        for incarnation in ("one life", "the next"):
            await connector(store, B).publish(endpoint(incarnation))
            record = await store.get("worker/b:0", 0)
            assert Endpoint.from_bytes(record) == endpoint(incarnation)


async def test_a_peer_that_comes_three_seconds_late() -> None:
    store, loop = MemoryStore(), asyncio.get_running_loop()
    begun = loop.time()
    late = asyncio.Event()
    loop.call_later(3.0, late.set)
    with apart("unix"):
        async with aiocomm.open("a:0", store=store) as first:
            group = first.create_collective_group(MEMBERS)
            send, recv = group.send("early bird"), group.recv()
            await late.wait()
            assert not send.done()
            async with aiocomm.open("b:0", store=store) as second:
                other = second.create_collective_group(MEMBERS)
                assert await other.recv() == "early bird"
                await other.send("here I am")
                assert await recv == "here I am"
    assert loop.time() - begun >= 3.0


async def test_a_peer_that_never_comes_is_named() -> None:
    options = Options(connect_timeout=0.1)
    async with aiocomm.open("a:0", store=MemoryStore(), options=options) as collective:
        group = collective.create_collective_group(MEMBERS)
        for work in (group.send(1), group.recv(), asyncio.ensure_future(group.ready())):
            with pytest.raises(RendezvousTimeout, match=r"b:0 did not appear.*within 0\.1 s"):
                await work
        # The next group gets a new chance.
        assert collective.create_collective_group(MEMBERS) is not group


@pytest.mark.parametrize("end", ["comes", "cancelled"])
async def test_waiting_for_a_peer_is_told_of_once(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    told = asyncio.Event()

    def warn(text: str, *args: object) -> None:
        said.append(text % args)
        told.set()

    monkeypatch.setattr(module, "PATIENCE", 0.01)
    monkeypatch.setattr(module.log, "warning", warn)
    async with MemoryStore() as store, listening([Refusal.CROSSED] * 3 + [None]) as there:
        dial = asyncio.create_task(connector(store).connect(B, "g"))
        await told.wait()
        if end == "comes":
            await store.set("worker/b:0", there.to_bytes())
            (await dial).abort()
        else:
            dial.cancel()
            await asyncio.wait([dial])
    assert len(said) == 1
    assert said[0].startswith("a:0 is still waiting for b:0 to appear on the board")


async def test_a_dial_that_ends_in_time_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def call_later(delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        timer = later(delay, *args, **kwargs)
        if delay == module.PATIENCE:
            timers.append(timer)
        return timer

    later = loop.call_later
    async with MemoryStore() as store:
        connecting = connector(store, connect_timeout=0.01).connect(B, "g")
        with monkeypatch.context() as patch, pytest.raises(RendezvousTimeout):
            patch.setattr(loop, "call_later", call_later)
            await connecting
    (timer,) = timers
    assert timer.cancelled()


async def test_a_record_where_nobody_answers_is_a_dead_peer() -> None:
    async with MemoryStore() as store:
        await store.set("worker/b:0", endpoint().to_bytes())
        with pytest.raises(PeerLostError, match=r"nobody has answered.*did its process die"):
            await connector(store, peer_timeout=0.05).connect(B, "g")
        with pytest.raises(RendezvousTimeout, match="the last attempt"):
            await connector(store, connect_timeout=0.05).connect(B, "g")


async def test_a_stale_record_is_given_up_for_the_successors() -> None:
    async with MemoryStore() as store, listening([None], "its next life") as alive:
        await store.set("worker/b:0", endpoint().to_bytes())
        connecting = asyncio.create_task(connector(store).connect(B, "g"))
        asyncio.get_running_loop().call_later(
            0.05, lambda: asyncio.ensure_future(store.set("worker/b:0", alive.to_bytes()))
        )
        link = await connecting
        assert link.peer.incarnation == "its next life"
        link.abort()


@pytest.mark.parametrize("code", [Refusal.CROSSED, Refusal.LINKED, Refusal.STALE, Refusal.CLOSED])
async def test_some_refusals_are_worth_another_try(code: Refusal) -> None:
    async with MemoryStore() as store, listening([code, code, None]) as there:
        await store.set("worker/b:0", there.to_bytes())
        (await connector(store).connect(B, "g")).abort()


@pytest.mark.parametrize("code", [Refusal.NOT_A_MEMBER, Refusal.BAD_REQUEST])
async def test_other_refusals_are_final(code: Refusal) -> None:
    async with MemoryStore() as store, listening([code]) as there:
        await store.set("worker/b:0", there.to_bytes())
        with pytest.raises(RefusedError) as raised:
            await connector(store).connect(B, "g")
        assert raised.value.code is code


async def test_refusals_end_with_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 600.0)  # so the first one was the last before it
    async with MemoryStore() as store, listening([Refusal.CROSSED] * 100) as there:
        await store.set("worker/b:0", there.to_bytes())
        with pytest.raises(RendezvousTimeout, match="not reached within") as raised:
            await connector(store, connect_timeout=60.0).connect(B, "g")
        assert isinstance(raised.value.__cause__, RefusedError)


async def test_another_secret_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    with apart("unix"):
        async with MemoryStore() as store, listening([None]) as there:
            await store.set("worker/b:0", there.to_bytes())
            monkeypatch.setenv("AIOCOMM_SECRET", "not theirs")
            with pytest.raises(AuthenticationError):
                await connector(store).connect(B, "g")


async def test_a_wrong_secret_fails_the_works(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setenv("AIOCOMM_SECRET", "one")
    with apart("unix"):
        async with aiocomm.open("b:0", store=store):
            monkeypatch.setenv("AIOCOMM_SECRET", "two")
            async with aiocomm.open("a:0", store=store) as first:
                group = first.create_collective_group(MEMBERS)
                with pytest.raises(AuthenticationError, match="AIOCOMM_SECRET"):
                    await group.send(1)


async def test_a_dial_that_is_cancelled_leaves_nothing() -> None:
    async with MemoryStore() as store:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await connector(store).connect(B, "g")  # waits for the record
        await store.set("worker/b:0", endpoint().to_bytes())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connector(store).connect(B, "g")  # tries again and again
