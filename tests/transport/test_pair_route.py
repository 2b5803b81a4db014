"""What the Gloo and the NCCL route have in common, on both: opening, breaking and closing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from aiocomm.errors import RouteError
from aiocomm.transport import pair_route
from aiocomm.transport.gloo_pair import GlooPair
from aiocomm.transport.nccl_pair import NcclPair
from aiocomm.transport.pair_route import PairRoute

from ..pairs import until
from . import gloo_ends, nccl_ends

pytestmark = [pytest.mark.asyncio, pytest.mark.parametrize("kind", ["gloo", "nccl"])]


@dataclass
class Both:
    """Two ends, and what moves a few bytes from the one to the other."""

    sender: PairRoute
    receiver: PairRoute
    send: Callable[[], asyncio.Future[None]]
    receive: Callable[[], asyncio.Future[None]]

    async def open(self) -> None:
        await asyncio.gather(self.sender.open(), self.receiver.open())


@asynccontextmanager
async def ends(kind: str, *, opened: bool = True, timeout: float = 10.0) -> AsyncIterator[Both]:
    if kind == "nccl":
        async with nccl_ends.ends(opened=opened, timeout=timeout) as made:
            values = made.sim.tensor(nccl_ends.noise(9))
            yield Both(
                made.sender, made.receiver, lambda: made.send(values), lambda: made.fetch(9)[1]
            )
        return
    sender, receiver = gloo_ends.make_both(timeout=timeout)
    both = Both(
        sender,
        receiver,
        lambda: sender.send_blocks(gloo_ends.noise(9)),
        lambda: receiver.receive(gloo_ends.noise(9)),
    )
    try:
        if opened:
            await both.open()
        yield both
    finally:
        await sender.aclose()
        await receiver.aclose()


# --- opening ---


async def test_it_says_what_it_is(kind: str) -> None:
    async with ends(kind, opened=False) as both:
        name, label = type(both.sender).__name__, both.sender.label
        assert repr(both.sender) == f"<{name} {label!r} sends new pending=0>"
        await both.open()
        await both.open()
        pending = both.receive()
        assert repr(both.receiver) == f"<{name} {label!r} receives open pending=1>"
        await asyncio.gather(both.send(), pending)


async def test_a_peer_that_never_comes(kind: str) -> None:
    async with ends(kind, opened=False, timeout=0.1) as both:
        for _ in range(2):
            with pytest.raises(RouteError, match=r"in 0\.1 s"):
                await both.sender.open()


@pytest.mark.parametrize("by", ["sever", "cancel"])
async def test_what_ends_an_opening_ends_its_thread(kind: str, by: str) -> None:
    async with ends(kind, opened=False) as both:
        if kind == "nccl":  # where the thread begins when both have said on which chip they are
            both.sender.deliver(f"{both.sender.label}/identity", b"GPU-1\0Simulated 100")  # type: ignore[attr-defined]
        both.sender._publish = lambda key, value: None
        waiting = [asyncio.create_task(both.sender.open()) for _ in range(2)]
        pair: Any = both.sender._pair
        await until(lambda: pair.store.own_values)
        if by == "sever":
            both.sender.sever()
        else:
            waiting.pop().cancel()
        for waiter in waiting:
            with pytest.raises(RouteError, match="was severed on this side"):
                await waiter
        with pytest.raises(RouteError, match="was severed on this side"):
            await both.send()


async def test_a_link_that_is_down_ends_the_opening(kind: str) -> None:
    def publish(key: str, value: bytes) -> None:
        raise ConnectionResetError("the link is down")

    async with ends(kind, opened=False) as both:
        both.sender._publish = publish
        with pytest.raises(RouteError, match="could not reach its peer: the link is down") as error:
            await both.sender.open()
        assert isinstance(error.value.__cause__, ConnectionResetError)


async def test_nothing_moves_before_it_is_open_nor_afterwards(kind: str) -> None:
    async with ends(kind, opened=False) as both:
        for start in (both.send, both.receive):
            with pytest.raises(RouteError, match="is not open"):
                await start()
        await both.open()
        await asyncio.gather(both.send(), both.receive())
        for end, start in ((both.sender, both.send), (both.receiver, both.receive)):
            await end.aclose()
            with pytest.raises(RouteError, match="was severed on this side"):
                await start()
            with pytest.raises(RouteError, match="was severed on this side"):
                await end.open()


async def test_nothing_is_left_where_nothing_was_opened(kind: str) -> None:
    async with ends(kind, opened=False) as both:
        threads = threading.active_count()
        both.receiver.sever()
        for end in (both.sender, both.receiver):
            await end.aclose()
            await end.aclose()
            with pytest.raises(RouteError, match="was severed on this side"):
                await end.open()
        assert threading.active_count() == threads


# --- ending ---


async def test_severing_fails_each_that_is_pending(kind: str) -> None:
    async with ends(kind) as both:
        pending = [both.receive() for _ in range(3)]
        both.receiver.sever()
        errors = await asyncio.gather(*pending, return_exceptions=True)
        assert all(isinstance(error, RouteError) for error in errors)
        assert len({id(error) for error in errors}) == 3  # each its own


async def test_what_is_over_says_nothing_more_to_its_peer(kind: str) -> None:
    said: list[str] = []
    async with ends(kind) as both:
        both.receiver._publish = lambda key, value: said.append(key)
        pending = both.receive()  # which is told at the end of this turn
        both.receiver.sever()
        await asyncio.wait([pending])
        with pytest.raises(RouteError, match="severed"):
            await pending
        await both.receiver.aclose()
    assert said == []


async def test_what_the_backend_does_not_let_go_of_fails_a_moment_later(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_route, "SEVER_GRACE", 0.01)
    async with ends(kind) as both:
        pending = both.receive()
        (transfer,) = both.receiver._active
        transfer.outstanding += 1  # a chunk of which nothing is heard again
        both.receiver.sever()
        with pytest.raises(RouteError, match="was severed on this side"):
            await pending
        assert list(both.receiver._active) == [transfer]  # its buffers are held


async def test_an_end_that_takes_long_goes_on_in_its_thread(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pair_route, "CLOSE_GRACE", 0.01)
    release = threading.Event()
    pair: Any = GlooPair if kind == "gloo" else NcclPair
    blocking = "close" if kind == "gloo" else "cut"
    end = getattr(pair, blocking)

    def slow(*args: Any) -> Any:
        release.wait(20)
        return end(*args)

    async with ends(kind) as both:
        with monkeypatch.context() as patch:
            patch.setattr(pair, blocking, slow)
            with caplog.at_level(logging.WARNING):
                await both.sender.aclose()
        assert f"{both.sender.backend} has not ended the group yet" in caplog.text
        monkeypatch.setattr(pair_route, "CLOSE_GRACE", 20.0)
        release.set()
        caplog.clear()
        await both.sender.aclose()
        assert caplog.text == ""
