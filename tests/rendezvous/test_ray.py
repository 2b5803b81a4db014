"""The public names for Ray, and what happens without ray."""

from __future__ import annotations

from aiocomm.rendezvous import ray as public

from .boards import run_python

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # as if it were not installed
import aiocomm
try:
    import aiocomm.rendezvous.ray
except ImportError as error:
    assert isinstance(error, aiocomm.errors.MissingPackageError), error
    print(error)
"""


def test_without_ray_the_import_says_what_to_install() -> None:
    assert "pip install 'aiocomm[ray]'" in run_python(WITHOUT_RAY)


def test_what_is_exported_is_there() -> None:
    assert [name for name in public.__all__ if not hasattr(public, name)] == []
