"""How the two ends of a cuda_ipc route meet, what keeps them apart, and how they close."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from aiocomm.errors import DeviceError, ProtocolError, RouteError

from .ends import ends

pytestmark = pytest.mark.asyncio


async def test_two_processes_on_one_chip_meet() -> None:
    async with ends() as both:
        assert repr(both.sender) == "<CudaIpcSender 'g' open pending=0>"
        assert repr(both.receiver) == "<CudaIpcReceiver 'g' open pending=0>"
        assert (both.sender.name, both.sender.survives) == ("cuda_ipc", False)


async def outcome(both: Any) -> list[BaseException]:
    """The errors of both openings; the side that fails tells the other, as the link does."""

    async def one(end: Any, other: Any) -> None:
        try:
            await end.open()
        except Exception:
            other.sever()
            raise

    found = await asyncio.gather(
        one(both.sender, both.receiver), one(both.receiver, both.sender), return_exceptions=True
    )
    return [error for error in found if error is not None]


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("uuids", ["GPU-0", "GPU-1"], r"on different GPUs \(GPU-[01] and GPU-[01]\)"),
        ("foreign", "invalid device context", r"cannot be (opened|mapped)\b.*invalid device"),
        ("unreachable", {"all"}, "cannot be shared between processes: expandable"),
    ],
)
async def test_what_keeps_them_apart_is_told(attribute: str, value: Any, reason: str) -> None:
    async with ends(opened=False) as both:
        setattr(both.sim, attribute, value)
        errors = await outcome(both)
        assert all(isinstance(error, RouteError) for error in errors)
        found = [str(error) for error in errors if "was severed" not in str(error)]
        assert found
        assert all(re.search(reason, text) for text in found)
        assert not both.sim.opened


@pytest.mark.parametrize("severed", [False, True])
async def test_memory_that_cannot_be_mapped_though_events_can(severed: bool) -> None:
    async with ends(opened=False) as both:
        loop = asyncio.get_running_loop()

        def open_memory(*_: object) -> Any:
            if severed:
                loop.call_soon_threadsafe(both.receiver.sever)
            raise RouteError("cuIpcOpenMemHandle says no")

        both.sim.open_memory = open_memory  # type: ignore[assignment,method-assign]
        errors = await outcome(both)
        assert ("severed" if severed else "says no") in str(errors)


async def test_an_error_that_is_not_ours_is_chained() -> None:
    async with ends(opened=False) as both:

        def allocate(*_: object) -> Any:
            raise RuntimeError("CUDA out of memory\nand more")

        both.sim.allocate = allocate  # type: ignore[assignment,method-assign]
        error = (await outcome(both))[0]
        assert "could not be set up: CUDA out of memory" in str(error)
        assert "and more" not in str(error)
        assert "and more" in str(error.__cause__)


async def test_a_device_that_fails_meanwhile_says_so() -> None:
    async with ends(opened=False) as both:

        def shared_event(_: int) -> Any:
            raise DeviceError("device cuda:0 failed")

        both.sim.shared_event = shared_event  # type: ignore[assignment,method-assign]
        assert isinstance((await outcome(both))[0], DeviceError)


async def test_an_offer_that_cannot_be_read() -> None:
    async with ends(opened=False) as both:
        both.deaf = {"offer"}
        opening = asyncio.gather(both.sender.open(), both.receiver.open(), return_exceptions=True)
        both.receiver.deliver("g/offer", b"rubbish")
        _, error = await opening
        assert isinstance(error, ProtocolError)


@pytest.mark.parametrize("alone", ["sender", "receiver"])
async def test_a_peer_that_does_not_open_its_side(alone: str) -> None:
    async with ends(opened=False, timeout=0.05) as both:
        with pytest.raises(RouteError, match=r"was not set up in 0.05 s: the peer does not open"):
            await getattr(both, alone).open()
        with pytest.raises(RouteError, match="not set up"):
            await getattr(both, alone).open()


async def test_severed_while_it_opens() -> None:
    async with ends(opened=False) as both:
        opening = asyncio.ensure_future(both.receiver.open())
        await asyncio.sleep(0)
        both.receiver.sever()
        with pytest.raises(RouteError, match="severed on this side"):
            await opening


async def test_closed_before_it_was_opened_and_twice() -> None:
    async with ends(opened=False) as both:
        for _ in range(2):
            await both.sender.aclose()
            await both.receiver.aclose()
        for end in (both.sender, both.receiver):
            with pytest.raises(RouteError, match="severed on this side"):
                await end.open()


@pytest.mark.parametrize("key", ["g/offer", "g/nonsense"])
async def test_a_key_that_no_end_expects(key: str) -> None:
    async with ends() as both:
        with pytest.raises(ProtocolError, match=f"says '{key}'"):
            both.sender.deliver(key, b"")
        with pytest.raises(ProtocolError, match=f"says '{key}'"):
            both.receiver.deliver(key, b"")  # a second offer too
