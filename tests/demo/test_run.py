"""Both processes for real: what arrives is what was sent, one bit is noticed, a death is told."""

from __future__ import annotations

import os
import signal

import pytest

from aiocomm.demo.records import Direction, Role, Settings
from aiocomm.demo.report import make_report
from aiocomm.demo.run import run
from aiocomm.errors import PeerLostError

TIMEOUT = 60.0  # seconds; guards against hanging, nothing else


class Seen:
    """A display that remembers."""

    def __init__(self) -> None:
        self.last: dict[Direction, tuple[int, int]] = {}

    def update(self, direction: Direction, messages: int, nbytes: int) -> None:
        self.last[direction] = (messages, nbytes)


def test_everything_arrives_as_it_was_sent() -> None:
    settings = Settings(steps=3, trajectories=6, parameters=1e6)
    seen = Seen()
    books = run(settings, seen, timeout=TIMEOUT)
    report = make_report(settings, books, 1.0)
    assert report.differences == ()
    assert report.compared == 21
    weights, trajectories = report.directions
    assert (weights.messages, trajectories.messages) == (3, 18)
    assert seen.last == {
        Direction.WEIGHTS: (3, weights.nbytes),
        Direction.TRAJECTORIES: (18, trajectories.nbytes),
    }
    assert weights.nbytes > 3 * 0.8e6 * 4
    assert "link" in trajectories.routes  # the small ones
    assert len(trajectories.routes) == 2  # and the large ones
    assert len({sent.checksum for sent in books[Role.TRAINER].sent}) == 3
    assert books[0].pid != books[1].pid


def test_one_flipped_bit_is_found_and_weights_may_go_alone() -> None:
    settings = Settings(steps=3, trajectories=0, parameters=1e6, corrupt=1)
    report = make_report(settings, run(settings, Seen(), timeout=TIMEOUT), 1.0)
    assert [(each.direction, each.number) for each in report.differences] == [
        (Direction.WEIGHTS, 1)
    ]
    assert report.directions[1].messages == 0


def test_an_error_of_a_worker_is_raised_itself() -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        run(Settings(weights="/missing.safetensors"), Seen(), timeout=TIMEOUT)


def test_the_death_of_a_process_is_told() -> None:
    class Killer(Seen):
        def update(self, direction: Direction, messages: int, nbytes: int) -> None:
            if direction is Direction.TRAJECTORIES and messages > 2 and not self.last:
                self.last[direction] = (messages, nbytes)
                os.kill(_newest_child(), signal.SIGKILL)

    with pytest.raises(PeerLostError, match=r"worker:\d died without a word"):
        run(Settings(steps=10_000, parameters=1e6), Killer(), timeout=TIMEOUT)


def _newest_child() -> int:
    import multiprocessing

    workers = [each for each in multiprocessing.active_children() if each.name == "worker:1"]
    assert workers[0].pid is not None
    return workers[0].pid
