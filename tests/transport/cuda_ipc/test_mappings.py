"""Which of the peer's allocations stay mapped, how long, and that none is unmapped under a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiocomm.copier import Copier
from aiocomm.errors import ClosedError, RouteError
from aiocomm.transport.cuda_ipc import mappings as module
from aiocomm.transport.cuda_ipc.mappings import LINGER, Mappings

from ...pairs import until
from ...simulated import Simulated, simulated

pytestmark = pytest.mark.asyncio


@pytest.fixture
def sim() -> Iterator[Simulated]:
    with simulated(auto=True) as device:
        yield device


class Clock:
    """The loop as far as mappings use it, in a time that the test makes pass."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        entry = (self._now + delay, call)
        self._timers.append(entry)
        return SimpleNamespace(cancel=lambda: self._timers.remove(entry))

    def pass_by(self, seconds: float) -> None:
        self._now += seconds
        for entry in [each for each in self._timers if each[0] <= self._now]:
            self._timers.remove(entry)
            entry[1]()


class Kept(Mappings):
    """Mappings with a copier of their own."""

    def __init__(self, sim: Simulated, clock: Any = None) -> None:
        loop = asyncio.get_running_loop()
        self.copier = Copier(loop, 2)
        super().__init__(sim, 1, clock or loop, self.copier.run)

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


async def test_what_is_used_stays_and_the_rest_goes_after_a_while(sim: Simulated) -> None:
    clock = Clock()
    kept = Kept(sim, clock)
    _memory, (first, second) = exported(sim, 2)
    assert kept.lacks([first, second, first]) == [first, second]
    await kept.map_all([first, second])
    assert kept.lacks([first, second]) == []
    assert (len(kept), sim.openings) == (2, 2)
    kept.use(first)
    again = kept.use(first)
    assert again.nbytes >= 32
    clock.pass_by(LINGER)
    await until(lambda: second not in sim.opened)
    assert first in sim.opened
    kept.let_go(first)
    clock.pass_by(LINGER)
    assert kept.lacks([first]) == [], "somebody still uses it"
    kept.let_go(first)
    clock.pass_by(LINGER)
    await until(lambda: not sim.opened)
    assert len(kept) == 0
    await kept.end()


async def test_what_is_used_again_in_time_is_not_mapped_again(sim: Simulated) -> None:
    clock = Clock()
    kept = Kept(sim, clock)
    _memory, (first, second) = exported(sim, 2)
    await kept.map_all([first])
    clock.pass_by(LINGER / 2)
    await kept.map_all([second])
    clock.pass_by(LINGER / 4)
    kept.use(second)
    kept.let_go(second)
    kept.use(first)
    kept.let_go(first)
    clock.pass_by(LINGER / 2)
    assert (kept.lacks([first, second]), sim.openings) == ([], 2)
    clock.pass_by(LINGER / 2)
    assert len(kept) == 0
    await kept.end()


async def test_no_more_are_kept_than_the_bound(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_IDLE", 3)
    kept = Kept(sim, Clock())
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
