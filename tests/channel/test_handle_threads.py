"""Channels in threads without an event loop: what is refused, and what its text says to do."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from aiocomm.channel import Channel, blocking
from aiocomm.channel.client import NEEDS_LOOP
from aiocomm.errors import ClosedError, UsageError, WrongLoopError

from ..actors import WAIT

pytestmark = pytest.mark.ray("peers", "shared")


async def connect(name: str) -> Channel:
    return await Channel.connect(name)


def test_a_loop_that_has_ended_is_none_to_use_a_channel_in(shared: str) -> None:
    channel = asyncio.run(connect(shared))
    for _ in range(2):
        with pytest.raises(ClosedError) as closed:
            channel.put(1)
        assert str(closed.value) == f"the event loop of channel {shared!r} is closed: {NEEDS_LOOP}"
    with pytest.raises(UsageError, match="is not connected, no event loop runs here") as unusable:
        pickle.loads(pickle.dumps(channel)).put(1)
    assert str(unusable.value).endswith(NEEDS_LOOP)


def test_what_the_errors_say_to_do_works(shared: str) -> None:
    assert "aiocomm.channel.blocking.Channel.connect(name)" in NEEDS_LOOP
    with blocking.Channel.connect(shared) as channel:
        channel.put("from here")
        assert channel.get(timeout=WAIT) == "from here"


def test_it_is_let_go_of_in_its_own_loop(shared: str) -> None:
    async def main() -> None:
        channel = await Channel.connect(shared)
        with pytest.raises(WrongLoopError, match=r"in which channel '.*' was opened"):
            await asyncio.to_thread(asyncio.run, channel.aclose())
        await channel.put("still here")
        assert await channel.get() == "still here"
        await channel.aclose()
        await channel.aclose()

    asyncio.run(main())


def test_calls_may_be_made_and_waited_for_in_any_thread(shared: str) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        channel = asyncio.run_coroutine_threadsafe(Channel.connect(shared), loop).result(WAIT)
        channel.put("from here").wait(WAIT)
        assert channel.get().wait(WAIT) == "from here"
        asyncio.run_coroutine_threadsafe(channel.aclose(), loop).result(WAIT)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
