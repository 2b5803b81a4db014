"""What the calls of a group promise, on every route, with both ends in one process.

Order, buffers, refusals, bounds. Pairing, cancellation, failure, closing and what needs two
processes are in tests/system.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch

from aiocomm import CollectiveGroup, RouteCount
from aiocomm.errors import (
    PairingError,
    PayloadError,
    UsageError,
    WouldBlockError,
    WrongLoopError,
)
from aiocomm.options import LEAST_SHM

from .pairs import LARGE, SMALL, each_route, each_size, each_wire, pair, ramp, ready, until

pytestmark = pytest.mark.asyncio

# --- order and completion ---


@each_route
async def test_the_order_is_that_of_the_calls_not_of_the_awaits(route: str) -> None:
    async with pair(route) as (a, b):
        sends = [a.send((number, ramp(size))) for number, size in enumerate([SMALL, LARGE] * 5)]
        recvs = [b.recv() for _ in sends]
        for number in reversed(range(len(recvs))):
            got, tensor = await recvs[number]
            assert got == number
            assert torch.equal(tensor, ramp(LARGE if number % 2 else SMALL))
        for send in reversed(sends):
            await send


@each_route
async def test_the_directions_do_not_wait_for_each_other(route: str) -> None:
    async with pair(route) as (a, b):
        never = a.recv()
        async with asyncio.timeout(20):
            for number in range(5):
                send = a.send(ramp(LARGE, number))
                assert torch.equal(await b.recv(), ramp(LARGE, number))
                await send
        assert not never.done()
        await b.send("at last")
        assert await never == "at last"


@each_route
@each_size
async def test_recv_tensor_fills_and_returns_the_very_buffer(route: str, size: int) -> None:
    async with pair(route) as (a, b):
        for early in (True, False):
            buffer = torch.zeros(size, dtype=torch.uint8)
            if early:
                recv = b.recv_tensor(buffer)
                send = a.send_tensor(ramp(size))
            else:
                send = a.send_tensor(ramp(size))
                await until(lambda: b.statistics().unreceived)
                recv = b.recv_tensor(buffer)
            assert await recv is buffer
            assert torch.equal(buffer, ramp(size))
            await send


@each_route
@each_size
async def test_a_sent_tensor_is_the_callers_again_without_any_recv(route: str, size: int) -> None:
    async with pair(route) as (a, b):
        tensor = ramp(size)
        await a.send_tensor(tensor)
        tensor.zero_()
        buffer = torch.empty(size, dtype=torch.uint8)
        assert torch.equal(await b.recv_tensor(buffer), ramp(size))


@each_wire
async def test_views_cost_their_own_bytes_and_aliases_travel_once(route: str) -> None:
    async with pair(route) as (a, b):
        whole = torch.arange(1_000_000)
        await asyncio.gather(a.send(whole[:1]), b.recv())
        assert a.statistics().sent["link"].nbytes < 200  # F9
        shared = torch.zeros(LARGE)
        send, (one, two) = a.send([shared, shared[1:]]), await b.recv()
        await send
        assert a.statistics().sent[route].nbytes < 6 * LARGE
        one[1] = 7
        assert two[0] == 7


@each_wire
@each_size
async def test_a_structure_goes_over_the_wire_once(route: str, size: int) -> None:
    async with pair(route, heartbeat_interval=60.0) as (a, b):
        await ready(a, b)
        took = []
        for number in range(4):
            layers = {f"layer.{name}.weight": ramp(size, number + name) for name in range(50)}
            message = {"step": number, "weights": layers}
            before = link_bytes(a)
            send, got = a.send(message), await b.recv()
            await send
            took.append(link_bytes(a) - before)
            assert got["step"] == number
            assert list(got["weights"]) == list(layers)
            assert all(map(torch.equal, got["weights"].values(), layers.values()))
        # 50 slots of 18 bytes each. The first bulk message agrees on the route too.
        assert took[0] - took[1] > 50 * 18 - 20
        assert abs(took[1] - took[3]) < 50  # credit may be on its way


def link_bytes(group: CollectiveGroup) -> int:
    """What went out over the link of a group."""
    link = group._session._link
    assert link is not None
    return link.statistics.bytes_out


@each_route
async def test_progress_needs_nobody_who_awaits(route: str) -> None:  # F13
    async with pair(route) as (a, b):
        recv, send = b.recv(), a.send(ramp(LARGE))
        await until(lambda: recv.done() and send.done())
        assert torch.equal(recv.result(), ramp(LARGE))


# --- references ---


@each_route
@each_size
async def test_works_hold_what_they_need_and_let_go_of_it(route: str, size: int) -> None:
    async with pair(route) as (a, b):
        tensor = ramp(size)
        alive = weakref.ref(tensor)
        a.send_tensor(tensor)  # F15, F41: nobody keeps the work or the tensor
        del tensor
        gc.collect()
        received = await b.recv_tensor(torch.empty(size, dtype=torch.uint8))
        assert torch.equal(received, ramp(size))
        gone = weakref.ref(received)
        del received
        await until(lambda: a.statistics().pending_sends == 0)
        await asyncio.sleep(0)
        gc.collect()
        assert alive() is None  # F20: nothing holds on to the last message while idle
        assert gone() is None


@each_route
async def test_a_dropped_recv_still_takes_its_place(route: str) -> None:  # F41
    async with pair(route) as (a, b):
        seen: list[Any] = []
        b.recv().then(seen.append)
        gc.collect()
        await a.send("first")
        await a.send("second")
        assert await b.recv() == "second"
        assert seen == ["first"]


async def test_a_failed_send_that_nobody_awaits_is_reported_once(complaints: list[Any]) -> None:
    async with pair("link", prefetch_bytes=0) as (a, b):
        a.send_tensor(ramp(LARGE))
        with pytest.raises(PairingError):
            await b.recv()
        await until(lambda: a.statistics().pending_sends == 0)
        gc.collect()
        (complaint,) = complaints
        assert isinstance(complaint["exception"], PairingError)
        complaints.clear()


# --- refused at the call ---

REFUSED = {
    "transposed": lambda: torch.zeros(3, 4).T,
    "strided": lambda: torch.zeros(3, 4)[:, ::2],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_tensors_that_cannot_travel_are_refused_at_the_call(kind: str) -> None:  # F1
    async with pair("link") as (a, b):
        for call in (a.send, a.send_tensor, b.recv_tensor, lambda x: a.send({"deep": [x]})):
            with pytest.raises(PayloadError, match=r"\w+ "):
                call(REFUSED[kind]())
        assert a.statistics().pending_sends == b.statistics().pending_recvs == 0
        await a.send("next")
        assert await b.recv() == "next"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
async def test_objects_that_cannot_be_pickled_are_refused_at_the_call() -> None:  # F12
    async with pair("link") as (a, b):
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        for unfit in (lambda: None, {"f": (lambda: None)}, [(x for x in "x")], quantized):
            with pytest.raises(PayloadError):
                a.send(unfit)
        await a.send("next")
        assert await b.recv() == "next"


@pytest.mark.parametrize("unfit", [[1, 2], None, "text", 3.0])
async def test_what_is_no_tensor_is_refused_by_the_tensor_calls(unfit: Any) -> None:
    async with pair("memory") as (a, b):
        for call in (a.send_tensor, b.recv_tensor):
            with pytest.raises(UsageError):
                call(unfit)


async def test_calls_that_would_stop_the_loop_say_so() -> None:
    async with pair("memory") as (a, b):
        tensor = torch.zeros(1)
        for call in (
            lambda: a.send(1, async_op=False),
            lambda: a.recv(async_op=False),
            lambda: a.send_tensor(tensor, async_op=False),
            lambda: a.recv_tensor(tensor, async_op=False),
        ):
            with pytest.raises(UsageError, match=r"aiocomm\.blocking"):
                call()
        recv = b.recv(async_op=True)
        with pytest.raises(WouldBlockError):
            recv.wait()
        await a.send(5)
        assert await recv == 5
        assert recv.wait() == 5  # done: nothing to block for


async def test_a_group_belongs_to_its_loop() -> None:
    async with pair("memory") as (a, b):
        recv = b.recv()

        async def elsewhere() -> None:
            for call in (lambda: a.send(1), b.recv):
                with pytest.raises(WrongLoopError, match="another event loop"):
                    call()
            for end in (a.aclose, a.abort):
                with pytest.raises(WrongLoopError, match="in which a:0 was opened"):
                    await end()
            with pytest.raises(WrongLoopError):
                await recv
            with pytest.raises(WouldBlockError):
                recv.wait()

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        await a.send("fine here")
        assert await recv == "fine here"


async def test_threads_without_a_loop_may_call_and_wait() -> None:
    async with pair("link") as (a, b):

        def work() -> Any:
            a.send(ramp(LARGE)).wait(20)
            return a.recv().wait(20)

        thread = asyncio.create_task(asyncio.to_thread(work))
        assert torch.equal(await b.recv(), ramp(LARGE))
        await b.send("seen")
        assert await thread == "seen"


# --- bounds ---


@each_route
async def test_a_peer_that_never_receives_bounds_the_sender(route: str) -> None:
    async with pair(route, window_messages=8) as (a, b):
        await ready(a, b)
        sends = [a.send(number) for number in range(50)]
        await until(lambda: b.statistics().unreceived == 8)
        await asyncio.sleep(0.02)  # nothing announces that no more is coming
        assert b.statistics().unreceived == 8
        assert a.statistics().pending_sends == 42
        assert [send.done() for send in sends] == [True] * 8 + [False] * 42
        assert [await b.recv() for _ in sends] == list(range(50))
        await asyncio.gather(*sends)


@each_route
async def test_the_window_counts_bytes_and_lets_a_message_larger_than_itself_pass(
    route: str,
) -> None:
    async with pair(route, window_bytes=1000, eager_limit=4000) as (a, b):
        await ready(a, b)
        sends = [a.send(ramp(400, number)) for number in range(10)] + [a.send(ramp(3000))]
        await until(lambda: b.statistics().unreceived)
        await asyncio.sleep(0.02)
        assert b.statistics().unreceived in (1, 2)
        for number in range(10):
            assert torch.equal(await b.recv(), ramp(400, number))
        assert torch.equal(await b.recv(), ramp(3000))
        await asyncio.gather(*sends)


@each_wire
async def test_bulk_is_taken_in_ahead_as_far_as_the_budget_goes(route: str) -> None:
    async with pair(route, prefetch_bytes=2 * LARGE, shm_bytes=LEAST_SHM) as (a, b):
        await ready(a, b)
        # On its way to a receiver that has not asked for it, shared memory holds some more.
        ahead = 2 + (LEAST_SHM // 2 // LARGE if route == "shm" else 0)
        sends = [a.send_tensor(ramp(LARGE, number)) for number in range(ahead + 2)]
        await asyncio.wait(sends[:ahead])
        await until(lambda: b.statistics().unreceived == (ahead if route == "shm" else ahead + 2))
        await asyncio.sleep(0.02)
        assert [send.done() for send in sends] == [True] * ahead + [False] * 2
        for number in range(ahead + 2):
            buffer = torch.empty(LARGE, dtype=torch.uint8)
            assert torch.equal(await b.recv_tensor(buffer), ramp(LARGE, number))
        await asyncio.gather(*sends)


# --- what it shows of itself ---


@each_route
async def test_statistics_say_the_same_on_both_sides(route: str) -> None:
    async with pair(route) as (a, b):
        for message in ({"x": ramp(LARGE)}, "small", ramp(SMALL)):
            await asyncio.gather(a.send(message), b.recv())
        await asyncio.gather(
            b.send_tensor(ramp(LARGE)), a.recv_tensor(torch.empty(LARGE, dtype=torch.uint8))
        )
        ours, theirs = a.statistics(), b.statistics()
        assert ours.sent == theirs.received
        assert ours.received == theirs.sent
        assert sum(count.messages for count in ours.sent.values()) == 3
        assert sum(count.nbytes for count in ours.sent.values()) >= LARGE + SMALL
        assert ours.received[route].messages == 1
        assert LARGE <= ours.received[route].nbytes <= LARGE + 100
        assert (ours.state, ours.peer, ours.group) == ("up", "b:0", "a:0|b:0")
        assert ours.bulk_route == (None if route == "memory" else route)
        if route == "gloo":
            assert ours.sent["link"].messages == 2


async def test_a_snapshot_does_not_change() -> None:
    async with pair("memory") as (a, b):
        await asyncio.gather(a.send(1), b.recv())
        before = a.statistics()
        assert before.sent == {"memory": RouteCount(1, before.sent["memory"].nbytes)}
        await asyncio.gather(a.send(1), b.recv())
        assert before.sent["memory"].messages == 1


async def test_its_repr_shows_where_it_stands() -> None:
    async with pair("memory") as (a, b):
        assert repr(a) == (
            "<CollectiveGroup 'a:0|b:0' rank 0 of a:0, b:0: new, 0 sends and 0 recvs pending>"
        )
        recv = b.recv()
        assert "rank 1" in repr(b)
        assert "connecting, 0 sends and 1 recvs pending" in repr(b)
        await a.send(1)
        await recv
        assert ": up, 0 sends and 0 recvs pending" in repr(a)
    assert ": closed, " in repr(b)
