"""What a close, or a receive, does not wait for: what broke, and what never comes whole."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.bulk import End
from aiocomm.errors import ClosedError, PeerClosedError, PeerLostError, RouteError
from aiocomm.options import MIB

from ..pairs import each_wire, pair, ramp, ready, until

pytestmark = pytest.mark.asyncio

FOREVER = {"close_timeout": 600.0, "prefetch_bytes": 0}  # nothing moves in before somebody asks


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "aiocomm"]


@pytest.mark.parametrize("when", ["it sets up", "it sends"])
@each_wire
async def test_what_breaks_is_the_error_of_the_sends_and_ends_the_wait(
    route: str, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if when == "it sets up":
        monkeypatch.setattr("aiocomm.bulk.candidates", lambda *_, **__: ("carrier pigeon",))
    async with pair(route, **FOREVER) as (a, b):
        await asyncio.gather(a.send("linked"), b.recv())
        send = a.send(ramp(8 * MIB))
        closing = asyncio.create_task(a.aclose())
        if when == "it sends":
            await until(lambda: b.statistics().unreceived)
            a._session._bulk.sever(End.SENDING)
        async with asyncio.timeout(20):
            with pytest.raises(RouteError, match="carrier" if when == "it sets up" else "sever"):
                await send
            await closing
    assert said(caplog) == []


@pytest.mark.parametrize("end", ["aborts", "dies"])
@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("route", ["link", "shm"])  # Gloo has a connection that says so
async def test_what_the_peer_leaves_half_sent_is_not_waited_for(
    route: str, closing: bool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(route, **FOREVER) as (a, b):
        await ready(a, b)
        sends = [group.send(ramp(16 * MIB)) for group in (a, b)]
        task = asyncio.ensure_future(b.aclose() if closing else b.recv())
        await until(lambda: b._session.receiving.moving, pause=0)
        if end == "aborts":
            await a.abort()
        else:
            a._session._link.abort()
        async with asyncio.timeout(20):
            if closing:
                await task
            else:
                with pytest.raises(PeerClosedError if end == "aborts" else PeerLostError):
                    await task
        await a.abort()
        for error in await asyncio.gather(*sends, return_exceptions=True):
            assert isinstance(error, (ClosedError, PeerLostError))
    assert said(caplog) == []
