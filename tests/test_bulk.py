"""How two members agree on a bulk route, and what ends one; see the steps in bulk.py."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest
import torch

from aiocomm.bulk import End, Step
from aiocomm.errors import ProtocolError, RouteError
from aiocomm.transport.base import Frame, FrameKind
from aiocomm.transport.stream import StreamRoute

from .bulk_ends import Side, Wire, route_frame

pytestmark = pytest.mark.asyncio


async def test_both_ends_are_set_up_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    ours, theirs = wire.first.routes[0], wire.second.routes[0]
    assert (ours.sending, theirs.sending) == (True, False)
    theirs.opening.set_result(None)
    await wire.carry()
    assert wire.second.opened == [theirs]
    assert wire.second.said == ["READY gloo"]
    assert not opening.done()
    assert wire.first.bulk.sending is None
    ours.opening.set_result(None)
    assert await opening is ours
    assert await wire.first.bulk.open() is ours  # once and for all
    assert wire.first.bulk.sending is ours
    assert wire.first.said == ["OPEN gloo"]
    await wire.aclose()
    assert ours.closed
    assert theirs.closed


async def test_directions_are_opened_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    openings = [asyncio.create_task(side.bulk.open()) for side in (wire.first, wire.second)]
    await wire.carry()
    for side in (wire.first, wire.second):
        for route in side.routes:
            route.opening.set_result(None)
    await wire.carry()
    assert [(await opening).sending for opening in openings] == [True, True]
    assert [route.sending for side in (wire.first, wire.second) for route in side.opened] == [
        False,
        False,
    ]
    await wire.aclose()


@pytest.mark.parametrize("fails", ["here", "there"])
async def test_the_next_route_is_taken_with_a_warning_that_names_the_reason(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(monkeypatch)
    with caplog.at_level(logging.WARNING):
        opening = asyncio.create_task(wire.first.bulk.open())
        await wire.carry()
        ours, theirs = wire.first.routes[0], wire.second.routes[0]
        (ours if fails == "here" else theirs).opening.set_exception(RouteError("no such luck"))
        await wire.carry()
        route = await opening
    assert isinstance(route, StreamRoute)
    assert wire.second.opened[-1] is wire.second.routes[1]
    (record,) = caplog.records
    assert "route gloo cannot be set up, falling back to the next one" in record.getMessage()
    assert "no such luck" in record.getMessage()
    assert ours.severed
    assert theirs.severed
    if fails == "here":
        assert wire.first.said == ["OPEN gloo", "DROP gloo no such luck", "OPEN link"]
        assert sorted(wire.second.said) == ["FAILED gloo severed", "READY link"]
    else:
        assert ours.cancelled
        assert wire.second.said == ["FAILED gloo no such luck", "READY link"]
    await wire.aclose()
    assert ours.closed
    assert theirs.closed


async def test_a_late_answer_is_not_taken_for_one_to_the_next_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    wire.first.routes[0].opening.set_exception(RouteError("no such luck"))
    while "OPEN link" not in wire.first.said:  # noqa: ASYNC110
        await asyncio.sleep(0)
    wire.first.bulk.frame_received(route_frame(Step.FAILED, "gloo", "severed"))
    await wire.carry()
    assert (await opening).name == "link"
    await wire.aclose()


@pytest.mark.parametrize("text", ["broken", ""])
async def test_a_pinned_route_falls_back_to_none(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(monkeypatch, route="gloo")
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    wire.second.routes[0].opening.set_exception(RouteError(text) if text else OSError())
    await wire.carry()
    for _ in range(2):
        with pytest.raises(RouteError, match="no bulk route can be set up") as caught:
            await (opening if not opening.done() else wire.first.bulk.open())
    assert ("broken" if text else "OSError()") in str(caught.value)
    assert caught.value.group == "g"
    assert wire.first.bulk.sending is None
    assert caplog.records == []
    assert opening.exception() is not None
    await wire.aclose()


async def test_a_refusal_without_a_reason_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, route="gloo")
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    wire.first.bulk.frame_received(route_frame(Step.FAILED, "gloo"))
    with pytest.raises(RouteError, match="no reason given"):
        await opening
    await wire.aclose()


async def test_answers_that_nobody_asked_for_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch, route="gloo")
    for step in (Step.READY, Step.FAILED, Step.DROP):
        wire.first.bulk.frame_received(route_frame(step, "gloo"))
    opening = asyncio.create_task(wire.first.bulk.open())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    wire.first.routes[0].opening.set_result(None)
    wire.first.bulk.frame_received(route_frame(Step.READY, "link"))
    await asyncio.sleep(0)
    assert not opening.done()
    await wire.carry()
    wire.second.bulk.frame_received(route_frame(Step.DROP, "link"))
    assert not wire.second.routes[0].severed
    wire.second.routes[0].opening.set_result(None)
    await wire.carry()
    assert (await opening).name == "gloo"
    wire.first.bulk.frame_received(route_frame(Step.FAILED, "gloo", "too late"))
    assert wire.first.bulk.sending is await opening
    await wire.aclose()


async def test_a_proposal_of_another_version_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Wire(monkeypatch).second
    side.bulk.frame_received(route_frame(Step.OPEN, "pigeon"))
    assert side.said == ["FAILED pigeon route 'pigeon' is not known here"]
    await side.bulk.aclose()


async def test_a_receiving_end_that_a_later_proposal_has_replaced_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Wire(monkeypatch).second
    side.bulk.frame_received(route_frame(Step.OPEN, "gloo"))
    await asyncio.sleep(0)
    side.routes[0].opening.set_result(None)
    side.bulk.frame_received(route_frame(Step.OPEN, "link"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert side.opened == [side.routes[1]]
    assert side.said == ["READY link"]
    await side.bulk.aclose()


@pytest.mark.parametrize("end", list(End))
async def test_an_end_that_breaks_takes_its_opposite_along(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    tasks = [asyncio.create_task(side.bulk.open()) for side in (wire.first, wire.second)]
    await wire.carry()
    for side in (wire.first, wire.second):
        for route in side.routes:
            route.opening.set_result(None)
    await wire.carry()
    await asyncio.gather(*tasks)
    wire.first.bulk.break_end(end, "bad luck")
    await wire.carry()
    assert [route.severed for route in wire.first.routes if route.sending] == [end is End.SENDING]
    assert [route.severed for route in wire.second.routes if route.sending] == [
        end is End.RECEIVING
    ]
    ((broken, error),) = wire.second.broken
    assert broken is end.opposite
    assert f"the peer says: {end.name} bad luck" in str(error)
    assert wire.first.broken == []
    wire.second.bulk.sever()
    assert all(route.severed for route in wire.second.routes)
    await wire.aclose()


async def test_cancelling_an_opening_leaves_it_to_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for side in (wire.first, wire.second):
        side.routes[0].opening.set_result(None)
    await wire.carry()
    assert await wire.first.bulk.open() is wire.first.routes[0]
    assert wire.first.said == ["OPEN gloo"]
    await wire.aclose()


async def _refused(wire: Wire) -> None:
    wire.first.bulk.frame_received(route_frame(Step.FAILED, "gloo", "no"))


async def _failed(wire: Wire) -> None:
    wire.first.routes[0].opening.set_exception(RouteError("no"))


async def _failing(wire: Wire) -> None:
    wire.first.routes[0].stubborn = True


async def _nothing(wire: Wire) -> None: ...


@pytest.mark.parametrize("meanwhile", [_nothing, _refused, _failed, _failing])
async def test_closing_during_an_opening_ends_it_and_proposes_nothing_more(
    meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    await meanwhile(wire)  # in the very turn of the closing
    await asyncio.wait_for(wire.aclose(), 20)
    with pytest.raises((asyncio.CancelledError, RouteError)):
        await opening
    assert "OPEN link" not in wire.first.said
    assert wire.second.said == []
    assert wire.second.opened == []
    for side in (wire.first, wire.second):
        assert [route.closed for route in side.routes] == [True]
    await wire.aclose()


@pytest.mark.parametrize("said", ["nothing", "no"])
@pytest.mark.parametrize("how", ["both", "sending", "broken", "lost"])
async def test_what_is_severed_while_it_is_set_up_is_not_followed_by_the_next_route(
    how: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(monkeypatch)
    bulk = wire.first.bulk
    opening = asyncio.create_task(bulk.open())
    await wire.carry()
    if said == "no":  # in the very turn
        await _refused(wire)
    if how == "broken":
        bulk.frame_received(route_frame(Step.BROKEN, "", "RECEIVING bad luck"))
    elif how == "lost":
        bulk.peer_gone(goodbye=False)
    else:
        bulk.sever(End.SENDING if how == "sending" else None)
    await wire.carry()
    for each in (opening, bulk.open()):
        with pytest.raises(RouteError, match="severed"):
            await each
    assert "OPEN link" not in wire.first.said
    assert caplog.messages == []
    await wire.aclose()


async def test_what_is_severed_when_the_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for goodbye, survives, trails in itertools.product((True, False), repeat=3):
        side = Wire(monkeypatch).first
        for end in End:
            vars(side.bulk._make("gloo", end)).update(survives=survives, trails=trails)
        side.bulk.peer_gone(goodbye=goodbye)
        severed = [not (survives or goodbye), not (survives or (goodbye and trails))]
        assert [route.severed for route in side.routes] == severed
        await side.bulk.aclose()


async def test_a_receiving_end_that_is_severed_leaves_the_other_direction_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    wire.first.bulk.sever(End.RECEIVING)
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    for side in (wire.first, wire.second):
        side.routes[0].opening.set_result(None)
    await wire.carry()
    assert await opening is wire.first.routes[0]
    await wire.aclose()


async def test_a_link_that_is_down_stops_no_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.first.lose()
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    wire.first.bulk.break_end(End.SENDING, "bad luck")
    await wire.first.bulk.aclose()
    with pytest.raises((asyncio.CancelledError, RouteError)):
        await opening


# --- frames for the routes themselves ---


async def test_keys_reach_the_opposite_end_even_right_behind_the_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    opening = asyncio.create_task(wire.first.bulk.open())
    while not wire.first.routes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    wire.first.routes[0].publish("key", b"of the sender")
    assert [frame.kind for frame in wire.first.frames] == [FrameKind.ROUTE, FrameKind.STORE]
    for frame in wire.first.frames:
        wire.second.bulk.frame_received(frame)  # with no turn of the loop between
    wire.first.frames.clear()
    assert wire.second.routes[0].keys == [("key", b"of the sender")]
    wire.second.routes[0].publish("answer", b"of the receiver")
    await wire.carry()
    assert wire.first.routes[0].keys == [("answer", b"of the receiver")]
    await wire.aclose()
    with pytest.raises((asyncio.CancelledError, RouteError)):
        await opening


async def test_keys_for_a_route_that_has_none_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Wire(monkeypatch).second
    late = Frame(FrameKind.STORE, End.SENDING, b"gloo\0key", b"value")
    side.bulk.frame_received(late)
    side.bulk.frame_received(route_frame(Step.OPEN, "link"))
    side.bulk.frame_received(late)
    await side.bulk.aclose()


async def test_keys_of_a_route_that_was_dropped_are_not_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Wire(monkeypatch).second
    side.bulk.frame_received(route_frame(Step.OPEN, "shm"))
    side.bulk.frame_received(route_frame(Step.OPEN, "gloo"))
    for name in (b"shm", b"gloo"):
        side.bulk.frame_received(Frame(FrameKind.STORE, End.SENDING, name + b"\0key", name))
    assert [route.keys for route in side.routes] == [[], [("key", b"gloo")]]
    await side.bulk.aclose()


async def test_chunks_and_grants_reach_the_link_route(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, route="link")
    opening = asyncio.create_task(wire.first.bulk.open())
    await wire.carry()
    sender, receiver = await opening, wire.second.opened[0]
    block, into = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    moves = [sender.send_blocks([block]), receiver.receive([into])]
    await wire.carry()
    await asyncio.gather(*moves)
    assert torch.equal(block, into)
    await wire.aclose()


HOSTILE = [
    Frame(FrameKind.ROUTE, 0, b"", b""),
    Frame(FrameKind.ROUTE, 0, b"\0gloo\0", b""),
    Frame(FrameKind.ROUTE, 0, b"\x63gloo\0", b""),
    Frame(FrameKind.ROUTE, 0, bytes((Step.OPEN,)) + b"\xff\xff", b""),
    Frame(FrameKind.STORE, End.SENDING, b"\xff\xff", b""),
    Frame(FrameKind.CHUNK, 0, b"", b"bytes"),
    Frame(FrameKind.GRANT, 0, b"", b""),
]


@pytest.mark.parametrize("frame", HOSTILE, ids=lambda frame: frame.kind.name)
@pytest.mark.parametrize("route", ["shm", "gloo", "link"])
async def test_hostile_frames_are_the_peers_fault(
    frame: Frame, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side: Side = Wire(monkeypatch).second
    side.bulk.frame_received(route_frame(Step.OPEN, route))
    with pytest.raises(ProtocolError):
        side.bulk.frame_received(frame)
    await side.bulk.aclose()
