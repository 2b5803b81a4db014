"""The life of a blocking handle: one loop for all, and ends of threads, loops and processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from aiocomm.channel import threaded
from aiocomm.channel.blocking import Channel
from aiocomm.channel.threaded import _portals
from aiocomm.errors import (
    ChannelExistsError,
    ClosedError,
    RendezvousTimeout,
    UsageError,
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
        channel._behind._lock.acquire()  # as another thread may have it, which no child has
        pid = os.fork()
        if pid:
            channel._behind._lock.release()
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
        with channel._behind._lock:  # as a thread has it that lets go of the handle
            channel._behind._channel.put("once", key="there")  # type: ignore[union-attr]
            again.wait(WAIT)
        assert channel.get("back") == "once"


def test_calls_are_refused_while_it_is_let_go_of(name: str) -> None:
    with ThreadPoolExecutor(2) as pool, Channel.create(name, maxsize=1) as owner:
        channel = Channel.connect(name)
        channel.put("first")
        channel.put("second", async_op=True)
        leaving = pool.submit(channel.leave)
        until(lambda: channel._behind._left)
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
        until(lambda: sent._behind._making is not None)
        with pytest.raises(TimeoutError, match="not connected within 0 s"):
            sent.put(1, timeout=0)  # the other thread is at it
        pool.submit(sent.leave).result(WAIT)
        with pytest.raises(ClosedError, match="closed on this side"):
            waits.result()


def test_the_end_of_the_process_does_not_wait_for_room_for_ever(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threaded, "CLOSE_GRACE", 0.01)
    monkeypatch.setattr(threaded, "_last_moment", lambda: 0.0)
    with Channel.create(name, maxsize=1) as owner:
        channel = Channel.connect(name)
        channel.put("first")
        late = channel.put("second", async_op=True)
        channel._behind._end()
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
