"""The stores of NCCL ids by themselves: made, found by name, counted, ended."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray

from aiocomm.errors import RendezvousError, RendezvousTimeout, UsageError
from aiocomm.rendezvous import ray_nccl_store
from aiocomm.rendezvous.ray import NCCLIDStore, get_nccl_id_store_by_name

from .boards import WAIT, eventually

pytestmark = pytest.mark.ray


def test_a_store_is_found_by_name_wherever_it_is() -> None:
    assert get_nccl_id_store_by_name("found") is None
    store: Any = NCCLIDStore.options(name="found", namespace="far").remote((1, 2, 3))
    found = get_nccl_id_store_by_name("found")
    assert ray.get(found.get.remote()) == (1, 2, 3)
    assert get_nccl_id_store_by_name("other") is None
    second: Any = NCCLIDStore.options(name="found").remote(b"")
    with pytest.raises(RendezvousError, match=r"'far' and 'tests'"):
        get_nccl_id_store_by_name("found")
    ray.kill(store)
    assert ray.get(get_nccl_id_store_by_name("found").get.remote()) == b""
    ray.kill(second)
    assert get_nccl_id_store_by_name("found") is None


def test_making_replaces_and_the_last_made_ends_the_handle() -> None:
    deadline = time.monotonic() + WAIT
    first = ray_nccl_store.make("made", "tests", b"1", 2, deadline)
    second = ray_nccl_store.make("made", "tests", b"2", 2, deadline)
    with pytest.raises(ray.exceptions.RayActorError):  # it ends some time after it is replaced
        ray.get(first.store.wait_complete.remote())
    assert ray.get(second.store.get.remote()) == b"2"
    assert ray.get(second.store.made.remote(0)) is False
    assert ray.get(second.store.made.remote(0)) is False
    assert ray.get(second.store.made.remote(1)) is True
    ray_nccl_store.end(second)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # one that is being killed may answer for a moment
            ray.get(second.store.get.remote())
    forgotten = eventually(lambda: ("tests", "made") not in ray_nccl_store._stores)
    asyncio.run(forgotten)  # a thread of Ray's does it


def test_no_ray_is_started_where_it_was_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for call in (
        lambda: ray_nccl_store.stores_called("gone"),
        lambda: ray_nccl_store.make("gone", "tests", b"", 1, time.monotonic() + WAIT),
    ):
        with pytest.raises(UsageError, match=r"ray\.init"):
            call()


def test_a_name_that_does_not_come_free_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken:
        def options(self, **_: object) -> Taken:
            return self

        def remote(self, *_: object) -> None:
            raise ValueError("the name is taken")  # as Ray does (F31)

    monkeypatch.setattr(ray_nccl_store, "NCCLIDStore", Taken())
    with pytest.raises(RendezvousTimeout, match="'taken' is not free"):
        ray_nccl_store.make("taken", "tests", b"", 2, time.monotonic() + 0.05)
