"""Which of the peer's allocations stay mapped, how long, and that none is unmapped under a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from aiocomm.copier import Copier
from aiocomm.errors import ClosedError, RouteError
from aiocomm.transport.cuda_ipc import mappings as module
from aiocomm.transport.cuda_ipc.mappings import Mappings

from ...pairs import until
from ...simulated import Simulated, simulated

pytestmark = pytest.mark.asyncio


@pytest.fixture
def sim() -> Iterator[Simulated]:
    with simulated(auto=True) as device:
        yield device


class Kept(Mappings):
    """Mappings with a copier of their own."""

    def __init__(self, sim: Simulated) -> None:
        self.copier = Copier(asyncio.get_running_loop(), 2)
        super().__init__(sim, 1, asyncio.get_running_loop(), self.copier.run)

    async def map_all(self, handles: list[bytes]) -> None:
        done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.map(handles, done.set_result)
        error = await done
        if error is not None:
            raise error

    async def end(self) -> None:
        self.close()
        while self.jobs:
            await asyncio.wait(self.jobs)
        self.copier.close()


def exported(sim: Simulated, count: int) -> tuple[list[torch.Tensor], list[bytes]]:
    tensors = [sim.tensor(torch.zeros(8)) for _ in range(count)]
    return tensors, [sim.export(tensor)[0] for tensor in tensors]


async def test_what_is_used_stays_and_the_rest_goes_after_a_while(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.02)
    kept = Kept(sim)
    _memory, (first, second) = exported(sim, 2)
    assert kept.lacks([first, second, first]) == [first, second]
    await kept.map_all([first, second])
    assert kept.lacks([first, second]) == []
    assert (len(kept), sim.openings) == (2, 2)
    kept.use(first)
    again = kept.use(first)
    assert again.nbytes >= 32
    await until(lambda: second not in sim.opened)
    assert first in sim.opened
    kept.let_go(first)
    await asyncio.sleep(0.03)
    assert first in sim.opened, "somebody still uses it"
    kept.let_go(first)
    await until(lambda: not sim.opened)
    assert len(kept) == 0
    await kept.end()


async def test_what_is_used_again_in_time_is_not_mapped_again(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.05)
    kept = Kept(sim)
    _memory, (first, second) = exported(sim, 2)
    await kept.map_all([first])
    await asyncio.sleep(0.02)
    await kept.map_all([second])
    kept.use(second)
    kept.let_go(second)
    kept.use(first)
    kept.let_go(first)
    assert sim.openings == 2
    await until(lambda: len(kept) == 0)
    await kept.end()


async def test_no_more_are_kept_than_the_bound(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_IDLE", 3)
    kept = Kept(sim)
    _memory, handles = exported(sim, 5)
    for handle in handles:
        await kept.map_all([handle])
    await until(lambda: len(sim.opened) == 3)
    assert kept.lacks(handles) == handles[:2]
    await kept.end()
    assert not sim.opened


async def test_what_cannot_be_mapped_is_told_and_the_others_are_mapped(sim: Simulated) -> None:
    kept = Kept(sim)
    memory, (first, second) = exported(sim, 2)
    del memory[1]
    with pytest.raises(RouteError, match="cannot be mapped here: stale"):
        await kept.map_all([first, second])
    assert kept.lacks([first, second]) == [second]
    await kept.end()


async def test_who_asked_uses_them_before_they_can_go(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.0)
    monkeypatch.setattr(module, "MOST_IDLE", 1)
    kept = Kept(sim)
    _memory, handles = exported(sim, 4)
    used: list[object] = []
    kept.map(handles, lambda _: used.extend(map(kept.use, handles[:3])))
    await until(lambda: used and len(sim.opened) == 3)
    assert kept.lacks(handles) == handles[3:]
    for handle in handles[:3]:
        kept.let_go(handle)
    await kept.end()
    assert not sim.opened


async def test_closing_waits_for_who_uses_it(sim: Simulated) -> None:
    kept = Kept(sim)
    _memory, handles = exported(sim, 2)
    await kept.map_all(handles)
    kept.use(handles[0])
    kept.close()
    await until(lambda: len(sim.opened) == 1)
    kept.close()
    kept.let_go(handles[0])
    await kept.end()
    assert not sim.opened


async def test_what_ends_after_the_runtime_is_unmapped_at_once(sim: Simulated) -> None:
    kept = Kept(sim)
    _memory, (first,) = exported(sim, 1)
    await kept.map_all([first])
    kept.use(first)
    await kept.end()

    def closed(*_: object) -> None:
        raise ClosedError("the runtime is closed")

    kept._off_loop = closed  # type: ignore[assignment]
    kept.let_go(first)
    assert not sim.opened
