"""The public names for Ray, and what happens without ray."""

from __future__ import annotations

from aiocomm.rendezvous import ray as public

from ..absent import import_without
from ..processes import run_workers


def test_without_ray_the_import_says_what_to_install() -> None:
    (((name, text),),) = run_workers(import_without, 1, "ray", "aiocomm.rendezvous.ray")
    assert name == "MissingPackageError"
    assert "pip install 'aiocomm[ray]'" in text


def test_what_is_exported_is_there() -> None:
    assert [name for name in public.__all__ if not hasattr(public, name)] == []
