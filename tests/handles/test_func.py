"""Functions chained to works: what they may return, how they fail, and how they are cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import operator
import threading
import weakref
from collections.abc import Generator
from typing import Any

import pytest

from aiocomm.errors import UsageError, WrongLoopError
from aiocomm.handles import AsyncWork

from .. import loops
from .works import boom, done_soon, new_work


class Awaitable:
    def __await__(self) -> Generator[Any, None, str]:
        yield from asyncio.sleep(0).__await__()
        return "awaited"


class Caller:
    """An object that can be called, with and without a coroutine."""

    def __call__(self, value: int) -> int:
        return value + 1

    async def method(self, value: int) -> int:
        return value + 2


# --- what a function may be, and may return ---


@pytest.mark.asyncio
async def test_every_kind_of_function() -> None:
    async def later(value: int, add: int = 10) -> int:
        await asyncio.sleep(0)
        return value + add

    cases: list[tuple[Any, Any]] = [
        (lambda value: value * 3, 3),
        (later, 11),
        (functools.partial(later, add=20), 21),
        (lambda value: later(value, 30), 31),
        (Caller(), 2),
        (Caller().method, 3),
        (lambda value: asyncio.create_task(later(value)), 11),
        (lambda value: asyncio.sleep(0, value), 1),
        (lambda value: Awaitable(), "awaited"),
        (lambda value: done_soon(value + 4), 5),
        (lambda value: None, None),
        (int, 1),
    ]
    for func, expected in cases:
        assert await done_soon(1).then(func) == expected, func


@pytest.mark.asyncio
async def test_arguments_are_passed_on() -> None:
    def collect(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert await done_soon(1).then(collect) == ((1,), {})
    assert await done_soon(1).then(collect, 2, args=3, func=4) == (
        (1, 2),
        {"args": 3, "func": 4},
    )


@pytest.mark.asyncio
async def test_the_examples_of_the_seed_document() -> None:
    buffer = object()
    seen: list[object] = []

    def postprocess(buf: object) -> None:
        seen.append(buf)

    work = done_soon(buffer)
    following = work.then(postprocess)
    waited: list[object] = [await asyncio.to_thread(following.wait)]
    assert waited == [None]
    assert seen == [buffer]
    assert await done_soon().async_wait() is None


@pytest.mark.asyncio
async def test_then_on_a_work_that_is_done_and_from_a_thread() -> None:
    work = new_work()
    early = await asyncio.to_thread(work.then, threading.current_thread().__class__)
    early.cancel()
    here = await asyncio.to_thread(work.then, lambda _: threading.current_thread())
    assert work.get_next_work() is here
    work._finish(1)
    assert await here is threading.current_thread()
    assert await work.then(str) == "1"
    late = await asyncio.to_thread(work.then, lambda _: threading.current_thread())
    assert await late is threading.current_thread()


@pytest.mark.asyncio
async def test_a_plain_function_makes_no_task_and_sees_its_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("then")
    work = new_work()
    tasks = len(asyncio.all_tasks())
    branch = work.then(lambda _: (variable.get(), len(asyncio.all_tasks())))

    async def in_task(_: object) -> str:
        return variable.get()

    second = work.then(in_task)
    variable.set("afterwards")
    asyncio.get_running_loop().call_soon(work._finish, None)
    assert await branch == ("then", tasks)
    assert await second == "then"


# --- works that return works ---


@pytest.mark.asyncio
async def test_a_returned_work_is_followed_to_the_end_of_its_chain() -> None:
    ends: list[str] = []

    def end(value: str) -> str:
        ends.append(value)
        return value + "c"

    def returned(_: object) -> AsyncWork[Any]:
        inner = done_soon("a")
        inner.then(lambda value: value + "b").then(end)
        return inner

    async def in_coroutine(_: object) -> AsyncWork[Any]:
        return returned(None)

    assert await done_soon().then(returned) == "abc"
    assert await done_soon().then(in_coroutine) == "abc"
    assert ends == ["ab", "ab"]


@pytest.mark.asyncio
async def test_a_followed_chain_may_grow() -> None:
    inner = new_work()
    branch = done_soon().then(lambda _: inner)
    second: list[AsyncWork[Any]] = []

    def grow(value: str) -> str:
        second.append(inner.get_last_work().then(lambda value: value + "!"))
        return value + "b"

    await asyncio.sleep(0)
    inner.then(grow)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    inner._finish("a")
    assert await branch == "ab!"
    assert second[0].done()


@pytest.mark.asyncio
async def test_a_recursive_chain_ends_with_its_last_work() -> None:
    def count(value: int) -> Any:
        return value if value == 500 else done_soon(value + 1).then(count)

    assert await done_soon(0).then(count) == 500


@pytest.mark.asyncio
async def test_long_chains() -> None:
    first = new_work()
    last: AsyncWork[int] = first
    for _ in range(5_000):
        last = last.then(functools.partial(operator.add, 1))
    assert first.get_last_work() is last
    asyncio.get_running_loop().call_soon(first._finish, 0)
    assert await last == 5_000
    del last
    gone = weakref.ref(first)
    del first  # and with it the whole chain, without a stack overflow
    gc.collect()
    assert gone() is None


@pytest.mark.asyncio
async def test_waiting_for_itself_is_an_error_and_not_a_hang() -> None:
    work = done_soon()
    cases: list[AsyncWork[Any]] = []
    itself = work.then(lambda _: itself)
    cases.append(itself)

    first = done_soon()
    cases.append(first.then(lambda _: first))  # its last work is the function's own

    middle = done_soon()
    inner = middle.then(lambda _: middle)
    inner.then(lambda _: None).cancel()
    cases.append(inner)

    above = done_soon()
    parent = above.then(lambda _: descendant)
    descendant = parent.then(str).then(str)
    parent.then(repr)
    cases.append(parent)

    async def own(_: object) -> Any:
        return await awaiting

    awaiting = done_soon().then(own)
    cases.append(awaiting)
    for case in cases:
        with pytest.raises(UsageError, match=r"for ever|never end"):
            await case
    with pytest.raises(UsageError):
        await descendant


@pytest.mark.asyncio
async def test_two_works_that_come_to_follow_each_other() -> None:
    inner = new_work()
    follower = done_soon().then(lambda _: inner)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    grown = inner.then(lambda _: follower)
    inner._finish(None)
    outcomes = await asyncio.gather(follower, grown, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UsageError, UsageError]


@pytest.mark.asyncio
async def test_a_work_of_another_loop_is_not_followed() -> None:
    other = loops.FACTORIES["asyncio"]()
    foreign = AsyncWork[int](loop=other)
    with pytest.raises(WrongLoopError):
        await done_soon().then(lambda _: foreign)
    other.close()


# --- memory and text ---


@pytest.mark.asyncio
async def test_a_finished_chain_holds_neither_functions_nor_what_came_before() -> None:
    class Value:
        pass

    value, argument = Value(), Value()
    gone = [weakref.ref(value), weakref.ref(argument)]
    branch = done_soon(value).then(lambda value, argument: 1, argument)
    del value, argument
    assert await branch == 1
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    cancelled = new_work().then(lambda _, value: None, value := Value())
    gone = [weakref.ref(value)]
    del value
    cancelled.cancel()
    gc.collect()
    assert gone[0]() is None


@pytest.mark.asyncio
async def test_repr_names_the_function_and_the_state() -> None:
    work = new_work()
    branch = work.then(boom)
    assert repr(branch) == "<AsyncFuncWork boom pending>"
    work._finish(None)
    await asyncio.wait([branch])
    assert repr(branch) == "<AsyncFuncWork boom failed: ValueError('boom')>"
    assert isinstance(branch.exception(), ValueError)
    assert repr(work.then(functools.partial(int))) == "<AsyncFuncWork partial pending>"
    await asyncio.wait([work.get_last_work()])
    assert isinstance(work.get_last_work().exception(), TypeError)
