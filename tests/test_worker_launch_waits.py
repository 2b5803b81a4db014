"""``Workers`` that wait for room, and what they ask their actors for on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.actor import ActorMethod
from ray.exceptions import ActorDiedError

from aiocomm import worker_launch as module
from aiocomm.worker import launch

from .actors import OPTIONS, Talker

on_ray = pytest.mark.ray

Actor: Any = ray.remote(num_cpus=0)(Talker)


@on_ray
@pytest.mark.parametrize("way", ["wait", "ready", "with", "async with"])
def test_waiting_for_room_is_told_of_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = launch(Actor, 2, group="wide", actor_options={"num_cpus": 3}, options=OPTIONS)
    said: list[str] = []

    def warn(text: str, *args: object) -> None:
        said.append(text % args)
        workers.kill()  # ends the waiting

    async def enter() -> None:
        async with workers:
            pass

    monkeypatch.setattr(module, "PATIENCE", 0.1)
    monkeypatch.setattr(module.log, "warning", warn)
    with pytest.raises(ActorDiedError):
        if way == "wait":
            workers.wait()
        elif way == "ready":
            asyncio.run(workers.ready())
        elif way == "async with":
            asyncio.run(enter())
        with workers:
            pass
    (text,) = said
    assert text.startswith("wide:0, wide:1 did not start within 0.1 s: has the cluster room")


@on_ray
def test_what_ray_is_told_to_try_again_does_not_hold_for_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, ask = set(), ActorMethod._remote
    lasting = {"max_restarts": -1, "max_task_retries": -1}

    def spy(method: Any, *args: Any, **kwargs: Any) -> Any:
        asked.add((method._method_name, kwargs.get("max_task_retries")))
        return ask(method, *args, **kwargs)

    monkeypatch.setattr(ActorMethod, "_remote", spy)
    with launch(Actor, 1, group="lasting", actor_options=lasting, options=OPTIONS):
        pass
    ours = {(name, retries) for name, retries in asked if name.startswith("_comm")}
    assert ours == {("_comm_ready", 0), ("_comm_close", 0)}  # the board's client asks beside them
