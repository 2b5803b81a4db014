"""What stands in the queues: told apart by identity, without room for more than is declared."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from aiocomm import entries
from aiocomm.entries import Incoming, Outgoing, Post, RecvAction, State
from aiocomm.scheduler.recv import RecvLane

RECORDS = [each for each in vars(entries).values() if dataclasses.is_dataclass(each)]


def test_two_entries_alike_are_two_and_can_be_keys() -> None:
    for make in (
        lambda: Outgoing(None),
        lambda: Post(None),
        lambda: Incoming(None, 0, 0, 0, False),
    ):
        one, other = make(), make()
        assert one != other
        assert len({one, other}) == 2
        assert one.state is State.NEW


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_slotted(record: type) -> None:
    assert "__dict__" not in dir(record)
    assert len(RECORDS) > 10


def test_the_shell_carries_out_every_action() -> None:
    assert set(get_args(RecvAction)) == set(RecvLane._HANDLERS)
