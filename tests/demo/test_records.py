"""Who sends what, and how many messages a run has."""

from __future__ import annotations

import pickle

from aiocomm.demo.records import Direction, Role, Settings


def test_each_receives_what_the_other_sends() -> None:
    assert Role.TRAINER.sends is Role.ROLLOUT.receives is Direction.WEIGHTS
    assert Role.ROLLOUT.sends is Role.TRAINER.receives is Direction.TRAJECTORIES


def test_totals() -> None:
    settings = Settings(steps=3, trajectories=4)
    assert settings.total(Direction.WEIGHTS) == 3
    assert settings.total(Direction.TRAJECTORIES) == 12
    assert pickle.loads(pickle.dumps(settings)) == settings
