"""The blocking half of an NCCL route, with a process group that is simulated."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial
from typing import Any

import pytest
import torch

from aiocomm.errors import ClosedError, RouteError
from aiocomm.options import Options
from aiocomm.transport.nccl_pair import ENVIRONMENT, FOR_EVER, NcclPair

from ..simulated import Simulated
from ..simulated_nccl import nccl_of


class Pairs:
    """Two pairs whose stores are wired to each other, and how their construction ended."""

    def __init__(self, *, timeout: float = 10.0, **settings: Any) -> None:
        self.sim = Simulated()
        self.sim.process_group = nccl_of(self.sim)
        self.ends: list[Any] = [None, None]
        self.over = [threading.Event(), threading.Event()]
        self.streams = [self.sim.stream(0), self.sim.stream(1)]
        options = Options(**settings)
        self.pairs = [
            NcclPair(
                self.sim,
                "g",
                rank,
                self.streams[rank],
                partial(self._deliver, 1 - rank),
                timeout,
                options,
            )
            for rank in range(2)
        ]

    def start(self, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.pairs[rank].start(partial(self._over, rank))

    def _deliver(self, rank: int, key: str, value: bytes) -> None:
        self.pairs[rank].store.deliver(key, value)

    def _over(self, rank: int, error: BaseException | None) -> None:
        self.ends[rank] = error
        self.over[rank].set()

    def wait(self, *ranks: int) -> list[Any]:
        for rank in ranks or (0, 1):
            assert self.over[rank].wait(20)
        return self.ends

    def cut(self, reason: BaseException | None = None) -> None:
        for pair in self.pairs:
            pair.cut(reason or RouteError("the end"))


def test_a_pair_is_connected_when_it_is_made_and_broadcasts_in_its_stream() -> None:
    pairs = Pairs()
    pairs.start()
    assert pairs.wait() == [None, None]
    sim = pairs.sim
    source, target = sim.tensor(torch.arange(5, dtype=torch.uint8)), sim.allocate(5, sim.default[1])
    source2 = sim.tensor(torch.zeros(5, dtype=torch.uint8), 0)
    with sim.using(pairs.streams[0]):
        sim.write(source2, torch.full((5,), 9, dtype=torch.uint8))
    held = [pairs.pairs[0].broadcast(source2), pairs.pairs[1].broadcast(target)]
    events = [sim.record(stream) for stream in pairs.streams]
    assert not events[1].query()
    sim.run()
    assert [event.query() for event in events] == [True, True]
    assert sim.read(target).tolist() == [9] * 5, "after what was in the stream before"
    assert len(held) == 2
    assert source is not None
    pairs.cut()


def test_options_reach_the_group_and_its_watchdog_never_acts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    pairs = Pairs(nccl_min_ctas=2, nccl_max_ctas=4, high_priority=True)
    seen = []
    native = pairs.sim.process_group

    def make(store: Any, rank: int, size: int, options: Any) -> Any:
        seen.append({name: os.environ.get(name) for name in ENVIRONMENT})
        return native(store, rank, size, options)

    make.Options = native.Options  # type: ignore[attr-defined]
    pairs.sim.process_group = make
    pairs.start()
    assert pairs.wait() == [None, None]
    assert seen == [ENVIRONMENT] * 2
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    for group in native.made:
        config = group.options.config
        assert (config.blocking, config.min_ctas, config.max_ctas) == (1, 2, 4)
        assert group.options.is_high_priority_stream
        assert group.options._timeout == FOR_EVER
    pairs.cut()


def test_what_is_not_asked_for_is_left_to_nccl() -> None:
    pairs = Pairs()
    pairs.start()
    pairs.wait()
    config = pairs.sim.process_group.made[0].options.config
    assert (config.min_ctas, config.max_ctas) == (-1, -1)
    assert not pairs.sim.process_group.made[0].options.is_high_priority_stream
    pairs.cut()


def test_a_peer_that_does_not_come_ends_the_construction_in_time() -> None:
    pairs = Pairs(timeout=0.1)
    pairs.start(1)
    error = pairs.wait(1)[1]
    assert isinstance(error, TimeoutError)
    assert "did not set up its side within 0.1 s" in str(error)
    pairs.cut()


def test_what_nccl_says_is_told() -> None:
    pairs = Pairs()
    pairs.sim.process_group.refuse = "ncclSystemError"
    pairs.start()
    assert "ncclSystemError" in str(pairs.wait()[0])
    pairs.cut()


def test_a_cut_ends_a_construction_that_waits_for_the_peers_key() -> None:
    pairs = Pairs()
    pairs.start(1)
    pairs.cut(RouteError("no more"))
    assert isinstance(pairs.wait(1)[1], ClosedError | RouteError)


def joining(pairs: Pairs) -> None:
    """Let both come to where they are joined, which ``hang`` holds up."""
    pairs.start()
    while not all(group.joining for group in made_by(pairs, 2)):
        pairs.over[0].wait(0.001)


def made_by(pairs: Pairs, number: int) -> list[Any]:
    made: list[Any] = pairs.sim.process_group.made
    while len(made) < number:
        pairs.over[0].wait(0.001)
    return made


def test_what_is_joined_after_a_cut_is_aborted_then() -> None:
    pairs = Pairs()
    release = pairs.sim.process_group.hang = threading.Event()
    joining(pairs)
    pairs.cut(RouteError("no more"))
    made = pairs.sim.process_group.made
    assert [group.aborts for group in made] == [1, 1]
    assert not any(over.is_set() for over in pairs.over), "nothing ends the joining of the two"
    release.set()
    assert None not in pairs.wait()
    assert [group.aborts for group in made] == [2, 2]


def test_a_peer_that_dies_while_the_two_are_joined_ends_that() -> None:
    pairs = Pairs()
    release = pairs.sim.process_group.hang = threading.Event()
    joining(pairs)
    pairs.sim.process_group.refuse = "ncclRemoteError: the peer's process has ended"
    release.set()
    assert "has ended" in str(pairs.wait()[0])
    pairs.cut()


def test_the_two_are_joined_when_both_have_come() -> None:
    pairs = Pairs()
    pairs.start(0)
    assert not pairs.over[0].wait(0.02)
    assert pairs.sim.process_group.made == []
    pairs.pairs[0].cut(RouteError("no more"))
    assert isinstance(pairs.wait(0)[0], RouteError)


def test_the_first_operation_is_over_before_anybody_gets_the_pair() -> None:
    pairs = Pairs()
    pairs.streams[1].held = True
    pairs.start()
    assert not pairs.over[0].wait(0.05)
    assert not pairs.over[1].is_set()
    pairs.streams[1].held = False
    pairs.sim.nudge()
    assert pairs.wait() == [None, None]
    pairs.cut()


def test_a_cut_ends_the_first_operation() -> None:
    pairs = Pairs()
    pairs.streams[0].held = True
    pairs.start()
    while not (pairs.streams[0].operations and pairs.streams[1].operations):
        pairs.over[0].wait(0.001)
    pairs.pairs[1].cut(RouteError("no more"))
    assert isinstance(pairs.wait(1)[1], ClosedError)
    pairs.streams[0].held = False
    pairs.pairs[0].cut(RouteError("no more"))
    assert isinstance(pairs.wait(0)[0], ClosedError)


@pytest.mark.parametrize("old", [False, True])
def test_operations_are_in_the_streams_of_the_pair_where_torch_can(old: bool) -> None:
    pairs = Pairs()
    pairs.sim.process_group.old = old
    pairs.start()
    pairs.wait()
    sim, made = pairs.sim, pairs.sim.process_group.made
    tensors = [sim.tensor(torch.full((5,), n, dtype=torch.uint8), n) for n in range(2)]
    held = [pairs.pairs[n].broadcast(tensors[n]) for n in range(2)]
    assert [work is not None for work in held] == [old, old]
    assert all(bool(group.stream.operations) == old for group in made)
    events = [sim.record(stream) for stream in pairs.streams]
    if old:
        made[0].stream.held = True
        sim.run()
        assert not any(event.query() for event in events), "they are behind the group's own"
        made[0].stream.held = False
    sim.run()
    assert all(event.query() for event in events)
    assert sim.read(tensors[1]).tolist() == [0] * 5
    pairs.cut()


def test_a_torch_whose_groups_have_no_abort_is_ended_by_what_it_has() -> None:
    pairs = Pairs()
    native = pairs.sim.process_group
    native._shutdown = native.abort
    native.abort = None
    pairs.start()
    pairs.wait()
    pairs.cut()
    assert [group.aborts for group in native.made] == [1, 1]


def test_a_cut_before_the_start_lets_nothing_be_made() -> None:
    pairs = Pairs()
    pairs.pairs[0].cut(RouteError("no more"))
    pairs.start(0)
    assert str(pairs.wait(0)[0]) == "no more"
    assert pairs.sim.process_group.made == []


def test_a_cut_while_the_group_is_made_lets_nothing_be_joined() -> None:
    pairs = Pairs()
    native = pairs.sim.process_group

    def make(*args: Any) -> Any:
        for pair in pairs.pairs:
            pair.cut(RouteError("no more"))
        return native(*args)

    make.Options = native.Options  # type: ignore[attr-defined]
    pairs.sim.process_group = make
    pairs.start()
    for error in pairs.wait():
        assert isinstance(error, ClosedError | RouteError)
    assert not any(group.joining for group in native.made)


def test_after_a_cut_nothing_is_broadcast_and_a_second_one_does_nothing() -> None:
    pairs = Pairs()
    pairs.start()
    pairs.wait()
    done = threading.Event()
    pairs.pairs[0].cut_in_thread(RouteError("no more"), done.set).join(20)
    assert done.is_set()
    with pytest.raises(RuntimeError, match="the NCCL pair is closed"):
        pairs.pairs[0].broadcast(pairs.sim.allocate(4, pairs.streams[0]))
    pairs.cut()
    assert [group.aborts for group in pairs.sim.process_group.made] == [1, 1]


def test_a_pair_that_nobody_cut_is_aborted_when_it_is_dropped() -> None:
    pairs = Pairs()
    pairs.start()
    pairs.wait()
    made = pairs.sim.process_group.made
    for thread in threading.enumerate():  # those that made it hold it until they have ended
        if thread.name == "aiocomm-nccl-g":
            thread.join()
    pairs.pairs.clear()
    gc.collect()
    assert [group.aborts for group in made] == [1, 1]


def test_a_group_that_had_failed_by_itself_may_refuse_to_be_aborted() -> None:
    pairs = Pairs()
    pairs.start()
    pairs.wait()

    def refuse() -> None:
        raise RuntimeError("already aborted")

    for group in pairs.sim.process_group.made:
        group.abort = refuse
    pairs.cut()
