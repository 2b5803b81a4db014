"""Channels without an event loop: in threads, in a synchronous actor, at the end of a process."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

from aiocomm.channel import Channel as AsyncChannel
from aiocomm.channel.blocking import Channel
from aiocomm.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelFull,
    UsageError,
    WouldBlockError,
    WrongLoopError,
)

from ..actors import WAIT

pytestmark = pytest.mark.ray("plain", "shared")


class Plain:
    """A synchronous actor, which uses handles that were sent to it."""

    def echo(self, requests: Channel, replies: Channel) -> int:
        """Answer requests until they end; how many there were."""
        with requests, replies:
            items = list(requests)
            for item in items:
                replies.put(item)
        return len(items)


@pytest.fixture(scope="module")
def plain(cluster: None) -> Iterator[Any]:
    actor: Any = ray.remote(num_cpus=0)(Plain).remote()
    ray.get(actor.__ray_ready__.remote())  # or it may come into sight in the middle of a test
    yield actor
    ray.kill(actor)


def test_a_synchronous_actor_uses_what_it_is_sent(plain: Any, name: str) -> None:
    with Channel.create(f"{name} to") as to, Channel.create(f"{name} from") as back:
        echoed = plain.echo.remote(to, back)
        for item in ("text", {"w": [torch.ones(400_000)]}, None):
            to.put(item)
        to.close()
        assert back.get(timeout=WAIT) == "text"
        assert back.get(async_op=True).wait(WAIT)["w"][0].sum() == 400_000
        assert back.get(timeout=WAIT) is None
        assert ray.get(echoed) == 3
        assert back.empty()


def test_every_call_is_there(name: str) -> None:
    with Channel.create(name, maxsize=3) as channel:
        channel.put("a", weight=2)
        channel.put_nowait("b", 1, "other")
        channel.put("c", 2, async_op=True).wait(WAIT)
        assert (channel.qsize(), channel.qsize("other"), channel.full()) == (3, 1, True)
        with pytest.raises(ChannelFull):
            channel.put_nowait("d")
        assert channel.get_batch(3) == ["a", "c"]
        assert channel.get_nowait("other") == "b"
        with pytest.raises(ChannelEmpty):
            channel.get_nowait()
        batch = channel.get_batch(2, async_op=True)
        channel.put("e", 2)
        assert batch.wait(WAIT) == ["e"]
        channel.put("left")
        channel.close()
        with pytest.raises(ChannelClosed):
            channel.put("f")
        assert list(channel) == ["left"]
        channel.abort()  # idempotent, and of no more effect
        assert name in repr(channel)


def test_a_time_out_loses_nothing(name: str) -> None:
    with Channel.create(name, maxsize=1) as channel:
        late = r"a get from channel '.*', key 'default': not done within 0\.05 s, and taken back"
        with pytest.raises(TimeoutError, match=late):
            channel.get(timeout=0.05)
        channel.put("first")
        with pytest.raises(TimeoutError, match="and taken back"):
            channel.put("withdrawn", timeout=0.05)
        with pytest.raises(TimeoutError, match="and taken back"):
            channel.get_batch(5, timeout=0.05)
        assert channel.get() == "first"
        channel.put("second", timeout=float("inf"))
        assert channel.get(timeout=WAIT) == "second"
        for timeout in (-1, float("nan"), "soon"):
            with pytest.raises(UsageError, match="time-out"):
                channel.get(timeout=timeout)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match=r"wait\(\) of the work"):
            channel.get(timeout=1, async_op=True)  # type: ignore[call-overload]
        assert channel.empty()


def test_a_time_out_says_that_nothing_was_put(name: str) -> None:
    with Channel.create(name) as channel:
        channel.put("left at once", timeout=0)  # there is room, so there is nothing to take back
        assert channel.get() == "left at once"


def test_many_threads_share_a_handle(name: str) -> None:
    threads, each = 8, 50
    with Channel.create(name, maxsize=16) as channel, ThreadPoolExecutor(2 * threads) as pool:
        began = [
            pool.submit(lambda start: [channel.put(start + n) for n in range(each)], start * each)
            for start in range(threads)
        ]
        came = [pool.submit(lambda: [channel.get() for _ in range(each)]) for _ in range(threads)]
        for put in began:
            put.result()
        assert sorted(item for got in came for item in got.result()) == list(range(threads * each))


def test_in_an_event_loop_it_is_refused_at_the_call(shared: str) -> None:
    async def all_calls(channel: Channel) -> None:
        calls: list[Callable[[], object]] = [
            lambda: Channel.create("x"),
            lambda: Channel.connect(shared),
            lambda: channel.put(1),
            channel.get,
            channel.leave,
            pickle.loads(pickle.dumps(channel)).qsize,
        ]
        for call in calls:
            with pytest.raises(WouldBlockError, match=r"aiocomm\.channel"):
                call()
        with pytest.raises(WrongLoopError):
            channel.put(1, async_op=True)

    with Channel.connect(shared) as channel:
        asyncio.run(all_calls(channel))
        assert channel.empty()


def test_an_interrupt_gives_back_what_had_come(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Channel.connect(shared) as channel:
        work = type(cancelled := channel.get(async_op=True))
        cancelled.cancel()

        def interrupted(self: Any, timeout: float | None = None) -> None:
            with contextlib.suppress(TimeoutError):  # until it has come, but not been taken
                while not self.done():
                    channel.qsize()
            raise KeyboardInterrupt

        channel.put("once")
        with monkeypatch.context() as patch:
            patch.setattr(work, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                channel.get()
        assert channel.get(timeout=WAIT) == "once"


def test_both_kinds_of_handles_meet(shared: str) -> None:
    async def answer() -> None:
        async with await AsyncChannel.connect(shared) as channel:
            await channel.put(await channel.get("question"), key="answer")

    with Channel.connect(shared) as channel, ThreadPoolExecutor(1) as pool:
        other = pool.submit(asyncio.run, answer())
        channel.put(17, key="question")
        assert channel.get("answer", timeout=WAIT) == 17
        other.result()
