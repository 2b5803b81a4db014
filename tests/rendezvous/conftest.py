"""A Ray board that stays open: its actor, which takes a third of a second to start, serves all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocomm.rendezvous.ray import RayBoard

from .boards import WAIT


@pytest.fixture(scope="module")
def kept_board(cluster: None) -> Iterator[RayBoard]:
    with RayBoard(timeout=WAIT) as board:
        yield board
