"""Actors that use channels, started once for all tests of this folder: each takes a second."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import ray

from .peers import Peer

BOTH_LOOPS = {"test_items_go_from_anywhere_to_anywhere", "test_it_is_found_joined_and_ended"}


@pytest.hookimpl(wrapper=True)
def pytest_asyncio_loop_factories(item: pytest.Function) -> Generator[None, Any, Any]:
    """On Ray a test costs seconds; what differs by loop shows in those without it."""
    factories = yield
    if item.get_closest_marker("ray") and item.originalname not in BOTH_LOOPS:
        return {"uvloop": factories["uvloop"]}
    return factories


@pytest.fixture
def name() -> str:
    """A name of the test's own."""
    return f"test {uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def peers(cluster: None) -> Iterator[list[Any]]:
    """Two of them."""
    actors = [ray.remote(num_cpus=0)(Peer).remote() for _ in range(2)]
    ray.get([actor.pid.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="session")
def shared(peers: list[Any]) -> str:
    """The name of a channel without bounds that goes on: each test leaves it empty."""
    name = "shared"
    assert ray.get(peers[0].create.remote(name)) == "created"
    return name
