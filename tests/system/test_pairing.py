"""Calls that do not pair and objects that do not load fail alone; the next message is right."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from aiocomm.errors import DecodeError, PairingError
from aiocomm.options import LEAST_SHM

from ..pairs import LARGE, SMALL, each_route, each_size, each_wire, pair, ramp, until

pytestmark = pytest.mark.asyncio


class FailsToLoad:
    """Pickles well; loading it raises."""

    def __init__(self, ballast: object = None) -> None:
        self.ballast = ballast

    def __reduce__(self) -> tuple[object, ...]:
        return (_explode, (self.ballast,))


def _explode(ballast: object) -> object:
    raise ArithmeticError("this class cannot be loaded")


# What the sender sends, and the buffer that does not fit it (None: recv).
UNFIT: dict[str, tuple[Any, torch.Tensor | None]] = {
    "kind: recv": (ramp(LARGE), None),
    "kind: send": ([ramp(LARGE)], ramp(LARGE, 1)),
    "dtype, same numel": (torch.ones(LARGE), torch.ones(LARGE).double()),  # F2
    "dtype, same bytes": (torch.ones(LARGE), torch.ones(LARGE // 2).double()),
    "shape": (torch.ones(LARGE, 2), torch.ones(2, LARGE)),
    "size": (ramp(LARGE), ramp(LARGE - 1)),
    "small size": (ramp(SMALL), ramp(SMALL + 1)),
    "0-dim": (torch.tensor(1.0), torch.zeros(1)),
}


def _send(group: Any, message: Any) -> Any:
    if isinstance(message, torch.Tensor):
        return group.send_tensor(message)
    return group.send(message)


@each_route
@pytest.mark.parametrize("late", [False, True], ids=["recv first", "send first"])
async def test_calls_that_do_not_pair(
    route: str, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver is told, its buffer is untouched, and the next message is right."""
    async with pair(route) as (a, b):
        for case, (message, wanted) in UNFIT.items():
            buffer = None if wanted is None else wanted.clone()
            if late:
                send = _send(a, message)
                await until(lambda: b.statistics().unreceived)
            recv = b.recv() if buffer is None else b.recv_tensor(buffer)
            if not late:
                send = _send(a, message)
            with pytest.raises(PairingError) as raised:
                await recv
            text = str(raised.value)
            assert "send" in text, case
            assert "recv" in text, case
            assert raised.value.direction == "recv"
            assert (raised.value.group, raised.value.peer) == (b.name, "a:0")
            if buffer is not None and wanted is not None:
                assert torch.equal(buffer, wanted), case
            with caplog.at_level(logging.WARNING, "aiocomm"):
                told = await asyncio.wait_for(_outcome(send), 20)
                await a.send(f"after {case}")
                assert await b.recv() == f"after {case}"
                await until(lambda: told or caplog.records)  # noqa: B023
            if told is None:
                assert "not taken" in caplog.text
            else:
                assert isinstance(told, PairingError), case
                assert told.direction == "send"
            caplog.clear()


async def _outcome(work: Any) -> BaseException | None:
    await asyncio.wait([work])
    error: BaseException | None = work.exception()
    return error


@each_wire
async def test_a_pending_send_that_does_not_pair_fails_too(route: str) -> None:
    async with pair(route, prefetch_bytes=0, shm_bytes=LEAST_SHM) as (a, b):
        send = a.send_tensor(torch.ones(LARGE))
        await until(lambda: b.statistics().unreceived)
        assert not send.done()
        buffer = torch.zeros(LARGE, dtype=torch.float64)
        with pytest.raises(PairingError, match=rf"float32\[{LARGE}\].*float64\[{LARGE}\]"):
            await b.recv_tensor(buffer)
        with pytest.raises(PairingError, match=r"float32.*message 0"):
            await send
        assert not buffer.any()
        again = a.send_tensor(torch.full((LARGE,), 2.0))
        assert (await b.recv_tensor(torch.empty(LARGE)) == 2).all()
        await again


@each_route
@each_size
async def test_an_object_that_fails_to_load_fails_one_recv(route: str, size: int) -> None:  # F12
    async with pair(route) as (a, b):
        send = a.send(FailsToLoad(ramp(size)))
        with pytest.raises(DecodeError) as raised:
            await b.recv()
        assert isinstance(raised.value.__cause__, ArithmeticError)
        assert (raised.value.direction, raised.value.sequence) == ("recv", 0)
        await send
        await a.send("next")
        assert await b.recv() == "next"
