"""Copies go in slices, in order, and stop for good when they are told to."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocomm.transport.shm.copies import AHEAD, SLICE, CopyQueue, copy, slices


class Thread:
    """The copying thread, which copies when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., None], tuple[object, ...], asyncio.Future[None]]] = []

    def __call__(self, call: Callable[..., None], *args: object) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append((call, args, future))
        return future

    async def run(self, count: int = 1) -> None:
        for _ in range(count):
            call, args, future = self.calls.pop(0)
            call(*args)
            future.set_result(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


sizes = st.integers(1, 3 * SLICE)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), sizes), max_size=6))
def test_slices_are_the_same_bytes_in_bounded_parts(ranges: list[tuple[int, int, int]]) -> None:
    parts = list(slices(ranges))
    assert all(0 < sum(nbytes for *_, nbytes in part) <= SLICE for part in parts)
    assert all(sum(nbytes for *_, nbytes in part) == SLICE for part in parts[:-1])
    joined: list[list[int]] = []
    for target, source, nbytes in (piece for part in parts for piece in part):
        last = joined[-1] if joined else None
        if last and (last[0] + last[2], last[1] + last[2]) == (target, source):
            last[2] += nbytes
        else:
            joined.append([target, source, nbytes])
    merged: list[list[int]] = []
    for target, source, nbytes in ranges:
        last = merged[-1] if merged else None
        if last and (last[0] + last[2], last[1] + last[2]) == (target, source):
            last[2] += nbytes
        else:
            merged.append([target, source, nbytes])
    assert joined == merged


def test_copying_moves_the_bytes() -> None:
    source, target = ctypes.create_string_buffer(b"abcdef"), ctypes.create_string_buffer(7)
    at = ctypes.addressof
    copy([(at(target), at(source) + 3, 3), (at(target) + 3, at(source), 3)])
    assert target.raw == b"defabc\0"


def buffers(nbytes: int) -> tuple[Any, list[tuple[int, int, int]], Any]:
    source, target = ctypes.create_string_buffer(nbytes), ctypes.create_string_buffer(nbytes)
    ctypes.memset(source, 7, nbytes)
    return target, [(ctypes.addressof(target), ctypes.addressof(source), nbytes)], source


@pytest.mark.asyncio
async def test_large_copies_go_in_turns_and_end_in_order() -> None:
    thread, done = Thread(), []
    queue = CopyQueue(thread)
    first, ranges, keep = buffers(3 * SLICE)
    second, more, keep_too = buffers(10)
    queue.submit(ranges, lambda: done.append("first"))
    queue.submit(more, lambda: done.append("second"))
    assert queue.busy
    assert len(thread.calls) == AHEAD
    await thread.run(2)
    assert done == []
    await thread.run()
    assert done == ["first"]
    assert first.raw == keep.raw
    await thread.run()
    assert done == ["first", "second"]
    assert second.raw == keep_too.raw
    assert not queue.busy
    assert thread.calls == []


@pytest.mark.asyncio
async def test_two_queues_take_turns() -> None:
    thread, done = Thread(), []
    one, other = CopyQueue(thread), CopyQueue(thread)
    kept = [buffers(4 * SLICE), buffers(SLICE)]
    one.submit(kept[0][1], lambda: done.append("large"))
    other.submit(kept[1][1], lambda: done.append("small"))
    await thread.run(AHEAD + 1)
    assert done == ["small"]
    await thread.run(2)
    assert done == ["small", "large"]


@pytest.mark.asyncio
async def test_stopped_copies_are_waited_for_and_their_end_is_not_told() -> None:
    thread, told = Thread(), []
    queue = CopyQueue(thread)
    kept = buffers(4 * SLICE)
    queue.submit(kept[1], lambda: told.append("done"))
    await thread.run()
    queue.stop(lambda: told.append("stopped"))
    assert told == []
    await thread.run(len(thread.calls))
    assert told == ["stopped"]
    assert thread.calls == []
    assert kept[0].raw[: 3 * SLICE] == kept[2].raw[: 3 * SLICE]
    assert kept[0].raw[3 * SLICE :] == bytes(SLICE)  # was never begun


@pytest.mark.asyncio
async def test_without_copies_stopping_is_told_at_once() -> None:
    told: list[str] = []
    CopyQueue(Thread()).stop(lambda: told.append("stopped"))
    assert told == ["stopped"]
