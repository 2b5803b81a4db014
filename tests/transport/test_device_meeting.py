"""Which chip the other end is on, told both ways."""

from __future__ import annotations

import asyncio

import pytest

from aiocomm.device.base import Identity
from aiocomm.transport.device_meeting import Meeting

pytestmark = pytest.mark.asyncio

OURS, THEIRS = Identity("GPU-1", "One 100"), Identity("GPU-2", "Two 200")


async def test_both_ends_learn_of_each_other() -> None:
    loop = asyncio.get_running_loop()
    first = Meeting(loop, "g/nccl/0", lambda key, value: second.deliver(value))
    second = Meeting(loop, "g/nccl/0", lambda key, value: first.deliver(value))
    assert first.key == second.key == "g/nccl/0/identity"
    met = await asyncio.gather(first.meet(OURS), second.meet(THEIRS))
    assert list(met) == [THEIRS, OURS]


async def test_what_was_told_before_the_meeting_is_kept_and_the_first_word_counts() -> None:
    meeting = Meeting(asyncio.get_running_loop(), "g", lambda key, value: None)
    meeting.deliver(b"GPU-2\0Two 200")
    meeting.deliver(b"GPU-3\0Three")
    assert await meeting.meet(OURS) == THEIRS


@pytest.mark.parametrize("value", [b"", b"\xff", b"no model"])
async def test_nonsense_is_no_chip_of_ours(value: bytes) -> None:
    meeting = Meeting(asyncio.get_running_loop(), "g", lambda key, value: None)
    meeting.deliver(value)
    assert await meeting.meet(OURS) != OURS


async def test_a_cancelled_meeting_can_be_taken_up_again() -> None:
    meeting = Meeting(asyncio.get_running_loop(), "g", lambda key, value: None)
    waiting = asyncio.create_task(meeting.meet(OURS))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    meeting.deliver(b"GPU-2\0Two 200")
    assert await meeting.meet(OURS) == THEIRS
