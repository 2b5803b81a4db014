"""Memory links: by reference, and across the loops of two threads. The rest is in test_base."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import pytest

from aiocomm.errors import (
    AuthenticationError,
    HandshakeError,
    NetworkError,
    PeerClosedError,
    PeerLostError,
    Refusal,
    RefusedError,
)
from aiocomm.options import Options
from aiocomm.transport import link as link_module
from aiocomm.transport.base import FrameKind, Link
from aiocomm.transport.link import Heart, Listener, dial
from aiocomm.transport.memory import HIGH_WATER, pair

from .links import HELLO, Recorder, linked, listening


class Elsewhere:
    """A loop in a thread of its own, running one coroutine until it ends."""

    def __init__(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(body(), debug=True))
        self._thread.start()

    async def join(self) -> None:
        await asyncio.to_thread(self._thread.join)


@pytest.mark.asyncio
async def test_a_body_arrives_as_the_object_it_is() -> None:
    class Thing:
        pass

    async with linked("memory") as two:
        handler = Recorder()
        two.theirs.attach(handler)
        thing = Thing()
        two.ours.send(FrameKind.ENVELOPE, 1, memoryview(b"head"), thing)
        frame = await handler.frame()
        assert frame.body is thing
        assert frame.head == b"head"
        assert type(frame.head) is bytes
        gone = weakref.ref(thing)
        handler.frames.clear()
        del thing, frame
        gc.collect()
        assert gone() is None  # F20: nothing here holds on to what was delivered


@pytest.mark.asyncio
async def test_a_busy_end_does_not_hold_the_loop() -> None:
    loop = asyncio.get_running_loop()
    one, two = pair(loop, loop, first_hello=HELLO, second_hello=HELLO)
    handler = Recorder(lambda frame: one.send(FrameKind.CHUNK, frame.sequence + 1))
    two.attach(handler)
    one.send(FrameKind.CHUNK, 0)
    for _ in range(10):
        await asyncio.sleep(0)  # would never come back
    assert 5 <= len(handler.frames) <= 12
    two.abort()
    one.abort()


@pytest.mark.asyncio
async def test_two_threads_exchange_in_order() -> None:
    count = 5000
    opened: asyncio.Future[Listener] = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()
    heart = Heart(Options())
    theirs = Recorder()

    async def elsewhere() -> None:
        def connected(link: Link) -> None:
            link.attach(theirs)
            for n in range(count):
                link.send(FrameKind.CHUNK, n, b"", threading.get_ident())

        async with listening(connected=connected) as listener:
            here.call_soon_threadsafe(opened.set_result, listener)
            await theirs.loss()

    other = Elsewhere(elsewhere)
    listener = await opened
    link = await dial(listener.endpoint, HELLO, heart=heart)
    ours = Recorder()
    link.attach(ours)
    for n in range(count):
        link.send(FrameKind.CHUNK, n)
        await link.drain()
    while len(ours.frames) < count:
        await ours.frame()
    await link.aclose()
    await other.join()
    assert [frame.sequence for frame in ours.frames] == list(range(count))
    assert [frame.sequence for frame in theirs.frames] == list(range(count))
    assert isinstance(theirs.losses[0], PeerClosedError)
    assert ours.frames[0].body != threading.get_ident()
    assert ours.losses == []


@pytest.mark.asyncio
async def test_a_loop_closed_under_the_other_end() -> None:
    loop = asyncio.get_running_loop()
    other = asyncio.new_event_loop()
    one, _ = pair(loop, other, first_hello=HELLO, second_hello=HELLO)
    other.close()
    handler = Recorder()
    one.attach(handler)
    one.send(FrameKind.CHUNK, 0)  # F38: no RuntimeError out of another layer's send
    assert handler.losses == []
    assert type(await handler.loss()) is PeerLostError
    with pytest.raises(PeerLostError):
        one.send(FrameKind.CHUNK, 1)


@pytest.mark.asyncio
async def test_the_heart_notices_a_loop_closed_under_the_other_end() -> None:
    loop = asyncio.get_running_loop()
    other = asyncio.new_event_loop()
    one, _ = pair(loop, other, first_hello=HELLO, second_hello=HELLO)
    heart = Heart(Options(heartbeat_interval=0.01))
    one.start(heart)
    handler = Recorder()
    one.attach(handler)
    other.close()
    assert type(await handler.loss()) is PeerLostError
    assert heart._timer is None


@pytest.mark.asyncio
async def test_a_loss_before_the_handler_is_told_by_attach() -> None:
    loop = asyncio.get_running_loop()
    other = asyncio.new_event_loop()
    one, _ = pair(loop, other, first_hello=HELLO, second_hello=HELLO)
    other.close()
    one.beat(1.0, 1.0)
    handler = Recorder()
    one.attach(handler)
    assert len(handler.losses) == 1


@pytest.mark.asyncio
async def test_a_full_inbox_of_frames_nobody_takes() -> None:
    async with linked("memory") as two:
        for n in range(HIGH_WATER):
            assert two.ours.writable
            two.ours.send(FrameKind.CHUNK, n)
        assert not two.ours.writable


@pytest.mark.asyncio
async def test_a_wrong_secret_in_one_process_is_refused_too() -> None:
    async with listening() as listener:
        with pytest.raises(AuthenticationError):
            await dial(listener.endpoint, HELLO, heart=listener.heart, secret=b"guess")


@pytest.mark.asyncio
async def test_a_refusal_in_one_process() -> None:
    async with listening(accept=lambda hello: Refusal.LINKED) as listener:
        with pytest.raises(RefusedError) as caught:
            await dial(listener.endpoint, HELLO, heart=listener.heart)
        assert caught.value.code is Refusal.LINKED


@pytest.mark.asyncio
async def test_a_dial_to_a_closed_loop_of_this_process() -> None:
    listeners: list[Any] = []

    async def elsewhere() -> None:
        async with listening() as listener:
            listeners.append(listener)
            listeners.append(listener.loop)

    await Elsewhere(elsewhere).join()
    listener = listeners[0]
    with (
        mock.patch.object(link_module, "find", return_value=listener),
        pytest.raises(NetworkError, match="closed"),
    ):
        await dial(listener.endpoint, HELLO, heart=listener.heart)


@pytest.mark.asyncio
async def test_a_dial_given_up_leaves_no_link_behind() -> None:
    """The other thread accepts after the dialler has gone: its end hears of it."""
    here = asyncio.get_running_loop()
    opened: asyncio.Future[Listener] = here.create_future()
    stalled: asyncio.Future[None] = here.create_future()
    go = threading.Event()
    theirs = Recorder()

    def accept(hello: object) -> None:
        here.call_soon_threadsafe(stalled.set_result, None)
        go.wait()

    async def elsewhere() -> None:
        async with listening(accept=accept, connected=lambda link: link.attach(theirs)) as listener:
            here.call_soon_threadsafe(opened.set_result, listener)
            await theirs.loss()

    other = Elsewhere(elsewhere)
    listener = await opened
    dialling = asyncio.create_task(dial(listener.endpoint, HELLO, heart=listener.heart))
    await stalled
    dialling.cancel()
    await asyncio.wait([dialling])
    assert dialling.cancelled()
    go.set()
    await other.join()
    assert len(theirs.losses) == 1


@pytest.mark.asyncio
async def test_a_dial_to_a_loop_that_does_not_answer_times_out() -> None:
    here = asyncio.get_running_loop()
    opened: asyncio.Future[Listener] = here.create_future()
    go = threading.Event()
    end: list[Any] = []

    async def elsewhere() -> None:
        async with listening() as listener:
            over = asyncio.Event()
            end.extend((asyncio.get_running_loop(), over))
            here.call_soon_threadsafe(opened.set_result, listener)
            go.wait()  # a loop that somebody blocks
            await over.wait()

    other = Elsewhere(elsewhere)
    listener = await opened
    with pytest.raises(HandshakeError, match=r"within 0.05 s"):
        await dial(listener.endpoint, HELLO, heart=listener.heart, timeout=0.05)
    go.set()
    end[0].call_soon_threadsafe(end[1].set)
    await other.join()
