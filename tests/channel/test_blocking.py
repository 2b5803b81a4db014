"""Channels without an event loop: in threads, in a synchronous actor, at the end of a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

from aiocomm.channel import Channel as AsyncChannel
from aiocomm.channel import blocking
from aiocomm.channel.blocking import Channel, _portals
from aiocomm.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelExistsError,
    ChannelFull,
    ClosedError,
    RendezvousTimeout,
    UsageError,
    WouldBlockError,
    WrongLoopError,
)

from ..actors import WAIT
from ..cluster import NAMESPACE
from ..sources import ROOT

pytestmark = pytest.mark.ray("cluster", "shared")


def until(holds: Callable[[], bool]) -> None:
    """Another thread is about to see to it, and no event tells."""
    while not holds():
        os.sched_yield()


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


def test_letting_go_ends_what_waits_and_the_last_one_the_thread(shared: str) -> None:
    before = set(threading.enumerate())
    first, second = Channel.connect(shared), Channel.connect(shared)
    (loop_thread,) = (each for each in set(threading.enumerate()) - before if "portal" in each.name)
    with ThreadPoolExecutor(1) as pool:
        waiting = first.get(async_op=True)
        waits = pool.submit(waiting.wait)
        first.leave()
        with pytest.raises(ClosedError):
            waits.result()
    first.leave()
    with pytest.raises(ClosedError, match="closed on this side"):
        first.put(1)
    with pytest.raises(ClosedError, match="closed on this side"):
        first.__enter__()
    second.put("goes on")
    assert second.get() == "goes on"
    second.leave()
    loop_thread.join()
    with Channel.connect(shared) as third:  # and it begins again
        assert third.empty()


def test_what_cannot_be_opened_leaves_nothing(shared: str) -> None:
    with pytest.raises(ChannelExistsError):
        Channel.create(shared)
    with pytest.raises(UsageError, match="maxsize"):
        Channel.create("x", maxsize=-1)
    with pytest.raises(RendezvousTimeout):
        Channel.connect("nobody's", timeout=0.1)
    assert not any("portal" in each.name for each in threading.enumerate())


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


UNFINISHED = """
import sys, ray
from aiocomm.channel.blocking import Channel
ray.init(sys.argv[1], namespace=sys.argv[2], log_to_driver=False, configure_logging=False)
channel = Channel.connect(sys.argv[3])
works = [channel.put(n, async_op=True) for n in range(100)]
"""


def test_what_was_put_has_left_when_the_process_ends(shared: str) -> None:
    context = ray.get_runtime_context()
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c", UNFINISHED),
            *(context.gcs_address, context.namespace, shared),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Channel.connect(shared) as channel:
        assert [channel.get_nowait() for _ in range(100)] == list(range(100))


def test_a_forked_process_has_no_part_in_it(shared: str) -> None:
    with Channel.connect(shared) as channel:
        parents = _portals()
        channel._lock.acquire()  # as another thread may have it, which is not there in the child
        pid = os.fork()
        if pid:
            channel._lock.release()
        else:
            signal.alarm(int(WAIT))
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    channel.put("from a child")
                except WrongLoopError:
                    channel.leave()  # returns, though nobody is there to do it
                    status = 0 if _portals() is not parents else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert channel.empty()


def test_what_calls_in_the_loop_waits_for_nobody_who_waits_for_the_loop(shared: str) -> None:
    with Channel.connect(shared) as channel:
        got = channel.get("there", async_op=True)
        again = got.then(lambda item: channel.put(item, key="back", async_op=True))
        with channel._lock:  # as a thread has it that lets go of the handle
            channel._channel.put("once", key="there")  # type: ignore[union-attr]
            again.wait(WAIT)
        assert channel.get("back") == "once"


def test_calls_are_refused_while_it_is_let_go_of(name: str) -> None:
    with ThreadPoolExecutor(2) as pool, Channel.create(name, maxsize=1) as owner:
        channel = Channel.connect(name)
        channel.put("first")
        channel.put("second", async_op=True)
        leaving = pool.submit(channel.leave)
        until(lambda: channel._left)
        refused = pool.submit(channel.put, "third")
        with pytest.raises(ClosedError, match="closed on this side"):
            refused.result(WAIT)
        assert [owner.get(), owner.get()] == ["first", "second"]
        leaving.result(WAIT)


def test_the_time_out_of_a_call_includes_connecting(name: str) -> None:
    sent = pickle.loads(pickle.dumps(Channel(name, NAMESPACE)))
    with pytest.raises(TimeoutError, match=r"not connected within 0\.01 s"):
        sent.get(timeout=0.01)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(sent.get)
        until(lambda: sent._making is not None)
        with pytest.raises(TimeoutError, match="not connected within 0 s"):
            sent.put(1, timeout=0)  # the other thread is at it
        pool.submit(sent.leave).result(WAIT)
        with pytest.raises(ClosedError, match="closed on this side"):
            waits.result()


def test_the_end_of_the_process_does_not_wait_for_room_for_ever(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking, "CLOSE_GRACE", 0.01)
    monkeypatch.setattr(blocking, "_last_moment", lambda: 0.0)
    with Channel.create(name, maxsize=1) as owner:
        channel = Channel.connect(name)
        channel.put("first")
        late = channel.put("second", async_op=True)
        channel._end()
        assert "what was put is dropped" in caplog.text
        assert owner.get() == "first"
        late.wait(WAIT)  # the loop goes on for another handle, and so does this one's end
        assert owner.get(timeout=WAIT) == "second"


def test_a_loop_that_a_function_has_ended_is_begun_again(shared: str) -> None:
    with Channel.connect(shared) as ended, Channel.connect(shared) as other:
        got = ended.get("none", async_op=True).then(print)
        (loop_thread,) = (each for each in threading.enumerate() if "portal" in each.name)
        got._loop.call_soon_threadsafe(sys.exit)
        loop_thread.join()
        with pytest.raises(ClosedError):
            other.put(1)
        with Channel.connect(shared) as begun:
            assert begun.empty()


def test_both_kinds_of_handles_meet(shared: str) -> None:
    async def answer() -> None:
        async with await AsyncChannel.connect(shared) as channel:
            await channel.put(await channel.get("question"), key="answer")

    with Channel.connect(shared) as channel, ThreadPoolExecutor(1) as pool:
        other = pool.submit(asyncio.run, answer())
        channel.put(17, key="question")
        assert channel.get("answer", timeout=WAIT) == 17
        other.result()
