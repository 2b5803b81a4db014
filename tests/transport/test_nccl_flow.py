"""The counts of the two ends of an NCCL route, and when they stand still."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocomm.errors import ProtocolError
from aiocomm.transport.nccl_flow import WINDOW, Flow
from aiocomm.transport.transfer import pack_count

pytestmark = pytest.mark.asyncio


class End:
    """One end, and what it told."""

    def __init__(self, sending: bool, stall_timeout: float = 60.0) -> None:
        self.told: list[tuple[str, bytes]] = []
        self.stalled = asyncio.Event()
        self.flow = Flow(
            "g",
            sending=sending,
            loop=asyncio.get_running_loop(),
            publish=lambda key, value: self.told.append((key, value)),
            stall_timeout=stall_timeout,
            stalled=self.stalled.set,
        )


async def test_a_sender_issues_what_the_receiver_has_issued() -> None:
    end = End(sending=True)
    assert not end.flow.may_issue
    assert end.flow.hears("g/ready")
    assert end.flow.hears("g/done")
    assert not end.flow.hears("g/identity")
    end.flow.heard("g/ready", pack_count(2))
    assert [end.flow.issue(), end.flow.may_issue, end.flow.issue()] == [1, True, 2]
    assert not end.flow.may_issue
    end.flow.heard("g/done", pack_count(1))
    assert end.flow.taken == 1
    await asyncio.sleep(0)
    assert end.told == [], "a sender says nothing"
    end.flow.stop()


async def test_a_receiver_issues_ahead_and_tells_once_a_turn() -> None:
    end = End(sending=False)
    issued = 0
    while end.flow.may_issue:
        issued += 1
        assert end.flow.issue() == issued
    assert issued == WINDOW
    await asyncio.sleep(0)
    assert end.told == [("g/ready", pack_count(WINDOW))]
    end.flow.finish()
    end.flow.finish()
    assert end.flow.may_issue
    end.flow.issue()
    await asyncio.sleep(0)
    assert end.told[1:] == [("g/ready", pack_count(WINDOW + 1)), ("g/done", pack_count(2))]
    end.flow.stop()


@pytest.mark.parametrize("sending", [True, False])
async def test_counts_that_cannot_be_are_the_peers_fault(sending: bool) -> None:
    end = End(sending)
    if sending:
        end.flow.heard("g/ready", pack_count(3))
    with pytest.raises(ProtocolError, match="takes back chunks" if sending else "only a receiver"):
        end.flow.heard("g/ready", pack_count(2))


class Loop:
    """The loop's clock, in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Any] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Any) -> None: ...

    def call_later(self, delay: float, call: Any) -> Any:
        loop = self

        class Timer:
            when = loop.now + delay

            def cancel(self) -> None:
                loop.timers.remove(self)

            def fire(self) -> None:
                loop.timers.remove(self)
                loop.now = self.when
                call()

        self.timers.append(Timer())
        return self.timers[-1]


@pytest.mark.parametrize("sending", [True, False])
async def test_it_stands_still_when_nothing_was_done_for_the_time(sending: bool) -> None:
    loop, stalls = Loop(), []
    flow = Flow(
        "g",
        sending=sending,
        loop=loop,  # type: ignore[arg-type]
        publish=lambda key, value: None,
        stall_timeout=10.0,
        stalled=lambda: stalls.append(loop.now),
    )
    loop.now = 100.0
    if sending:
        flow.heard("g/ready", pack_count(9))
    flow.issue()
    flow.issue()
    (timer,) = loop.timers
    assert timer.when == 110.0
    loop.now = 107.0
    flow.finish()
    if sending:
        flow.heard("g/done", pack_count(1))
    timer.fire()
    assert stalls == []
    (timer,) = loop.timers
    assert timer.when == 117.0, "from the last sign of life"
    timer.fire()
    assert stalls == [117.0]
    assert loop.timers == []


@pytest.mark.parametrize("sending", [True, False])
async def test_where_nothing_is_under_way_nothing_can_stand_still(sending: bool) -> None:
    loop, stalls = Loop(), []
    flow = Flow(
        "g",
        sending=sending,
        loop=loop,  # type: ignore[arg-type]
        publish=lambda key, value: None,
        stall_timeout=10.0,
        stalled=lambda: stalls.append(loop.now),
    )
    flow.issue()
    flow.finish()
    if sending:
        assert loop.timers[0].when == 10.0, "the receiver has not said that it has it"
        flow.heard("g/done", pack_count(1))
    loop.timers[0].fire()
    assert loop.timers == stalls == []
    loop.now = 50.0
    flow.issue()
    assert loop.timers[0].when == 60.0
    flow.stop()
    flow.stop()
    assert loop.timers == []
