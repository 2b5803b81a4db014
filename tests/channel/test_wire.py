"""Both ends of a channel's group: what comes is taken in order, and its end is told once."""

from __future__ import annotations

from typing import Any

import pytest

from aiocomm.channel.messages import Granted, Message, Seen
from aiocomm.channel.wire import Wire
from aiocomm.entries import IllegalTransition
from aiocomm.errors import PeerClosedError, ProtocolError

from ..pairs import pair, until


class End(Wire):
    """Keeps what it is told, and may fail at it."""

    def __init__(self, group: Any, fails: Exception | None = None) -> None:
        super().__init__(group, self.note, lambda error: self.overs.append(error))
        self.came: list[Message] = []
        self.overs: list[Exception] = []
        self.fails = fails

    def note(self, message: Message) -> None:
        self.came.append(message)
        if self.fails is not None:
            raise self.fails


@pytest.mark.parametrize("route", ["memory", "link"])
@pytest.mark.asyncio
async def test_messages_come_in_order_whenever_one_listens(route: str) -> None:
    async with pair(route) as (a, b):
        one, other = End(a), End(b)
        for number in range(100):
            one.send(Granted(number))
        await b.ready()
        other.listen()
        for number in range(100, 200):
            one.send(Granted(number))
        await until(lambda: len(other.came) == 200)
        assert other.came == [Granted(number) for number in range(200)]
        await a.aclose()
        await until(lambda: other.overs)
        assert [type(each) for each in other.overs] == [PeerClosedError]
        other.send(Granted(1))
        assert len(other.overs) == 1


@pytest.mark.asyncio
async def test_sending_into_a_closed_group_ends_it() -> None:
    async with pair("link") as (a, _):
        one = End(a)
        await a.aclose()
        one.send(Granted(1))
        one.listen()
        assert len(one.overs) == 1


@pytest.mark.parametrize("error", [IllegalTransition("no"), ProtocolError("no")])
@pytest.mark.asyncio
async def test_what_taking_raises_ends_it(error: Exception) -> None:
    async with pair("link") as (a, b):
        one, other = End(a), End(b, error)
        other.listen()
        for number in range(3):
            one.send(Seen(number, 0, False))
        await until(lambda: other.overs)
        assert (other.overs, len(other.came)) == ([error], 1)


@pytest.mark.asyncio
async def test_no_message_ends_it() -> None:
    async with pair("link") as (a, b):
        other = End(b)
        other.listen()
        await a.send("something else")
        await until(lambda: other.overs)
        assert [type(each) for each in other.overs] == [ProtocolError]


@pytest.mark.asyncio
async def test_stopped_it_takes_nothing_and_says_nothing() -> None:
    async with pair("link") as (a, b):
        one, other = End(a), End(b)
        other.listen()
        await a.ready()
        other.stop()
        one.send(Granted(1))
        await a.aclose()
        await until(lambda: b._session.state.value == "lost")
        assert (other.came, other.overs) == ([], [])
