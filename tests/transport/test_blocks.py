"""Messages become the same blocks at both ends of a route that moves blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from aiocomm.errors import ProtocolError
from aiocomm.packing import LARGE, plan
from aiocomm.transport.blocks import BlockRoute


class Route(BlockRoute):
    """Moves blocks when the test puts them there."""

    def __init__(self) -> None:
        self.blocks: list[Sequence[torch.Tensor]] = []
        self.drained: list[list[int]] = []

    def receive(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        self.blocks.append(blocks)
        return asyncio.get_running_loop().create_future()

    def send_blocks(self, blocks: Sequence[torch.Tensor]) -> asyncio.Future[None]:
        self.blocks.append(blocks)
        return asyncio.get_running_loop().create_future()

    def discard_blocks(self, sizes: Sequence[int]) -> asyncio.Future[None]:
        self.drained.append(list(sizes))
        return asyncio.get_running_loop().create_future()


SIZES = [100, LARGE, 0, 7, 2 * LARGE]


def message() -> list[torch.Tensor]:
    return [
        torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(SIZES, start=1)
    ]


@pytest.mark.asyncio
async def test_what_one_end_stages_the_other_end_fetches() -> None:
    route = Route()
    staged = route.stage(message())
    assert len(staged) == 3
    assert route.staged_bytes(message()) == 128 + 7
    buffers, done = route.fetch(SIZES)
    (blocks,) = route.blocks
    for block, sent in zip(blocks, staged, strict=True):
        block.copy_(sent)
    assert not done.done()
    for buffer, sent in zip(buffers, message(), strict=True):
        assert buffer.equal(sent)


@pytest.mark.asyncio
async def test_discarding_drains_the_same_blocks() -> None:
    route = Route()
    route.discard(SIZES)
    assert route.drained == [[block.nbytes for block in plan(SIZES)]]


def test_a_single_buffer_is_not_copied() -> None:
    route, tensor = Route(), torch.zeros(5, dtype=torch.uint8)
    assert route.staged_bytes([tensor]) == 0
    assert route.stage([tensor])[0].data_ptr() == tensor.data_ptr()


@pytest.mark.asyncio
async def test_the_envelope_goes_first_and_holds_nothing() -> None:
    route, told = Route(), []
    route.send(message(), envelope=lambda body: told.append((body, len(route.blocks))), lend=True)
    assert told == [(b"", 0)]
    with pytest.raises(ProtocolError, match="no use for"):
        route.hold(b"x", SIZES)
    assert route.place(message()) is None
