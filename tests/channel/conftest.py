"""Actors that use channels, started once for all tests of this folder: each takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from .peers import Peer


@pytest.fixture(scope="session")
def peers(cluster: None) -> Iterator[list[Any]]:
    """Two of them."""
    actors = [ray.remote(num_cpus=0)(Peer).remote() for _ in range(2)]
    ray.get([actor.pid.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)
