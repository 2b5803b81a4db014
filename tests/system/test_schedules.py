"""Random schedules of calls, cancellations and late awaits in both directions, against a model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings

from ..pairs import EAGER, pair
from ..processes import Stage, Workers
from .members import group_with, member
from .schedules import STEPS, Player, Sent, Step

LOOPS = ["asyncio"]  # the order is made without a loop

SMALL_WINDOW: dict[str, Any] = {"window_messages": 3, "prefetch_bytes": 8 * EAGER}


async def play(route: str, ours: list[Step], theirs: list[Step], **options: Any) -> None:
    async with pair(route, **options) as groups, asyncio.timeout(30):
        first, second = map(Player, groups)
        barrier = asyncio.Barrier(2)

        async def meet(name: str) -> None:
            await barrier.wait()

        await asyncio.gather(first.run(ours, meet), second.run(theirs, meet))
        first.check(second.sent())
        second.check(first.sent())


@pytest.mark.asyncio
@settings(max_examples=60)
@given(STEPS, STEPS)
async def test_schedules_over_memory(ours: list[Step], theirs: list[Step]) -> None:
    await play("memory", ours, theirs)


@pytest.mark.asyncio
@settings(max_examples=40)
@given(STEPS, STEPS)
async def test_schedules_over_memory_with_a_small_window(
    ours: list[Step], theirs: list[Step]
) -> None:
    await play("memory", ours, theirs, **SMALL_WINDOW)


@pytest.mark.asyncio
@settings(max_examples=40)
@given(STEPS, STEPS)
async def test_schedules_over_a_link_with_a_small_window(
    ours: list[Step], theirs: list[Step]
) -> None:
    await play("link", ours, theirs, **SMALL_WINDOW)


@pytest.mark.asyncio
@settings(max_examples=25)
@given(STEPS, STEPS)
async def test_schedules_over_gloo(ours: list[Step], theirs: list[Step]) -> None:
    await play("gloo", ours, theirs)


async def player(stage: Stage, **options: Any) -> None:
    """Plays what the test posts under ``steps/0``, ``steps/1``... until None comes."""
    async with member(stage, eager_limit=EAGER, **options) as collective:
        number = 0
        while (both := await stage.wait(f"steps/{number}")) is not None:
            group = group_with(collective, 1 - stage.rank, f"schedule {number}")

            async def meet(name: str, number: int = number) -> None:
                await stage.barrier(f"{number}/{name}")

            this = Player(group)
            await this.run(both[stage.rank], meet)
            stage.set(f"sent/{number}/{stage.rank}", this.sent())
            sent: list[Sent] = await stage.wait(f"sent/{number}/{1 - stage.rank}")
            try:
                this.check(sent)
            except AssertionError as error:
                stage.set(f"verdict/{number}/{stage.rank}", str(error) or repr(error))
            else:
                stage.set(f"verdict/{number}/{stage.rank}", "")
            await group.aclose()
            number += 1


@pytest.mark.parametrize("route", ["shm", "gloo", "link"])
def test_schedules_between_two_processes(loop_name: str, route: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(player, route=route)
        played = 0

        @settings(max_examples=25)
        @given(STEPS, STEPS)
        def play_one(ours: list[Step], theirs: list[Step]) -> None:
            nonlocal played
            number, played = played, played + 1
            workers.set(f"steps/{number}", (ours, theirs))
            for rank in range(2):
                assert workers.wait(f"verdict/{number}/{rank}") == ""

        play_one()
        workers.set(f"steps/{played}", None)
        workers.join()
