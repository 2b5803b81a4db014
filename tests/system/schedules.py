"""Random schedules of one group's calls, and the model that what they came to is held to.

The model is two lists for each direction: the first live call of recv gets the first message. Each
end carries its own steps out, then both send an end mark and receive up to the other's. A message
whose send was cancelled may have left before or not; nothing else is left open. A message that a
cancelled task had been given but not taken goes to the next call, so it may come after later ones:
then only that each message arrives exactly once is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from aiocomm import CollectiveGroup
from aiocomm.errors import PairingError

from ..pairs import EAGER, ramp

END = "end"
SIZES = (0, 10, EAGER + 1, 5 * EAGER)


@dataclass(frozen=True)
class Send:
    size: int
    tensor: bool


@dataclass(frozen=True)
class Recv:
    """Of an object; with a size, into a tensor of that size."""

    size: int | None


@dataclass(frozen=True)
class CancelRecv:
    which: int


@dataclass(frozen=True)
class CancelSend:
    which: int


@dataclass(frozen=True)
class Turns:
    count: int


@dataclass(frozen=True)
class Expire:
    """Await a recv, and cancel the task that does after some turns."""

    which: int
    turns: int


Step = Send | Recv | CancelRecv | CancelSend | Turns | Expire

_SIZE = st.sampled_from(SIZES)
_PLACE = st.integers(0, 3)
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.builds(Send, _SIZE, st.booleans()),
        st.builds(Send, _SIZE, st.just(False)),
        st.builds(Recv, st.none()),
        st.builds(Recv, st.one_of(st.none(), _SIZE)),
        st.builds(CancelRecv, _PLACE),
        st.builds(CancelSend, _PLACE),
        st.builds(Turns, st.integers(0, 5)),
        st.builds(Expire, _PLACE, st.integers(0, 5)),
    ),
    max_size=25,
)


@dataclass(frozen=True)
class Sent:
    """One call of send, as the other end's model sees it."""

    size: int
    tensor: bool
    cancelled: bool


@dataclass(frozen=True)
class Got:
    """What a live call of recv came to: the number of a message, or None where it did not pair."""

    asked: int | None
    number: int | None


@dataclass
class Player:
    """One end of a group that carries out steps."""

    group: CollectiveGroup
    sends: list[tuple[Send, Any]] = field(default_factory=list)
    recvs: list[tuple[Recv, Any]] = field(default_factory=list)

    async def run(self, steps: list[Step], meet: Callable[[str], Awaitable[None]]) -> None:
        """Carry the steps out, and bring everything that is under way to an end."""
        for step in steps:
            await self._step(step)
        await meet("played")
        for recv, work in self.recvs:
            if recv.size is not None and not work.done():
                work.cancel()  # or it would meet the end mark
        await meet("cancelled")
        mark = self.group.send(END)
        while not any(_value(work) == END for _, work in self.recvs):
            waiting = [work for _, work in self.recvs if not work.done()]
            if not waiting:
                await self._step(Recv(None))
                continue
            await asyncio.wait(waiting[:1])
        await asyncio.wait([mark, *(work for _, work in self.sends)])
        for _, work in self.recvs:
            if not work.done():
                work.cancel()
        await meet("ended")

    def sent(self) -> list[Sent]:
        for _, work in self.sends:
            if not work.cancelled() and (error := work.exception()) is not None:
                assert isinstance(error, PairingError), error
        return [Sent(send.size, send.tensor, work.cancelled()) for send, work in self.sends]

    async def _step(self, step: Step) -> None:
        group = self.group
        pending = [work for _, work in self.recvs if not work.done()]
        match step:
            case Send(size, tensor):
                number = len(self.sends)
                body = ramp(size, number)
                work = group.send_tensor(body) if tensor else group.send((number, body))
                self.sends.append((step, work))
            case Recv(None):
                self.recvs.append((step, group.recv()))
            case Recv(int(size)):
                buffer = torch.full((size,), 255, dtype=torch.uint8)
                self.recvs.append((step, group.recv_tensor(buffer)))
            case CancelRecv(which) if pending:
                pending[which % len(pending)].cancel()
            case CancelSend(which):
                leaving = [work for _, work in self.sends if not work.done()]
                if leaving:
                    leaving[which % len(leaving)].cancel()
            case Turns(count):
                await _turns(count)
            case Expire(which, count) if pending:
                task = asyncio.ensure_future(_await(pending[which % len(pending)]))
                await _turns(count)
                task.cancel()
                await asyncio.wait([task])

    def check(self, sent: list[Sent]) -> None:
        """Hold what the calls of recv came to to what the other end has sent."""
        given_back = False
        got: list[Got] = []
        for recv, work in self.recvs:
            if work.cancelled():
                continue
            if isinstance(_value(work), asyncio.CancelledError):
                given_back = True
            elif _value(work) != END:
                got.append(_got(recv, _value(work), sent))
        numbers = [each.number for each in got if each.number is not None]
        assert len(set(numbers)) == len(numbers), "a message arrived twice"
        live = sum(not each.cancelled for each in sent)
        assert live <= len(got) <= len(sent), "a message was lost, or one too many came"
        if not given_back:
            _check_order(got, sent)


def _got(recv: Recv, value: Any, sent: list[Sent]) -> Got:
    if isinstance(value, PairingError):
        return Got(recv.size, None)
    if isinstance(value, Exception):
        raise value
    if recv.size is None:
        number, body = value
    else:
        # A tensor does not say its number; its first byte does, for as few as there are here.
        body = value
        number = int(body[0]) if recv.size else None
    if number is None:
        return Got(recv.size, None)
    assert sent[number].size == body.numel()
    assert sent[number].tensor == (recv.size is not None)
    assert torch.equal(body, ramp(body.numel(), number))
    return Got(recv.size, number)


def _check_order(got: list[Got], sent: list[Sent]) -> None:
    """Whether the live calls can have got the messages in order, whatever cancelled ones did."""
    last = {-1}  # which message may have been the latest so far
    for each in got:
        last = {
            number
            for before in last
            for number in range(before + 1, len(sent))
            if all(skipped.cancelled for skipped in sent[before + 1 : number])
            and _can_be(each, number, sent[number])
        }
        assert last, f"out of order at {each}: {got}, {sent}"
    assert any(all(skipped.cancelled for skipped in sent[number + 1 :]) for number in last)


def _can_be(got: Got, number: int, sent: Sent) -> bool:
    if got.number is not None:
        return got.number == number
    fits = sent.size == got.asked if sent.tensor else got.asked is None
    return not fits or sent.size == 0  # an empty tensor has no byte to tell its number


def _value(work: Any) -> Any:
    if not work.done():
        return None
    try:
        return work.result()
    except (Exception, asyncio.CancelledError) as error:
        return error


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _await(work: Any) -> Any:
    return await work
