"""What both ends have in common: what they are told while they open, and what they say of it."""

from __future__ import annotations

from typing import Any

import pytest

from aiocomm.errors import ProtocolError, RouteError

from .ends import LABEL, Ends, blank, ends, ramp

pytestmark = pytest.mark.asyncio


async def test_an_end_listens_to_one_key_and_to_its_first_value() -> None:
    both = Ends()
    for end, key in ((both.sender, "mailbox"), (both.receiver, "ring")):
        with pytest.raises(ProtocolError, match="nobody can say"):
            end.deliver(f"{LABEL}/other", b"")
        with pytest.raises(ProtocolError, match="nobody can say"):
            end.deliver(f"other/{key}", b"")
        end.deliver(f"{LABEL}/{key}", b"first")
        end.deliver(f"{LABEL}/{key}", b"second")
        assert end._said.result() == b"first"
    await both.aclose()


async def test_it_shows_what_is_pending() -> None:
    async with ends() as both:
        both.receiver.receive([blank(10)])
        assert repr(both.receiver) == "<ShmReceiver 'g/shm/0' pending=1>"
        both.send([ramp(10)], lend=False)
        both.carry()
        assert repr(both.sender) == "<ShmSender 'g/shm/0' pending=0>"
        assert repr(both.receiver) == "<ShmReceiver 'g/shm/0' pending=0>"


async def test_a_severed_end_refuses_with_an_error_of_its_own_each_time() -> None:
    async with ends() as both:
        both.receiver.sever()
        caught: list[Any] = []
        for _ in range(2):
            with pytest.raises(RouteError, match="severed") as raised:
                await both.receiver.receive([blank(1)])
            caught.append(raised.value)
        assert caught[0] is not caught[1]
