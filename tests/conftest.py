"""Every async test on asyncio and on uvloop, in debug mode, and nothing left behind afterwards.

pytest-asyncio (strict mode) asks the hook below for loop factories and runs each test once per
factory. The check for leftovers is a plain autouse fixture rather than one of the loop, so that it
sees the world after the loop is closed; the tasks are looked at before that, in a wrapper around
the test's own call. Runtimes are opened inside tests, never in fixtures.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed

import aiocomm  # noqa: F401  (so that no test pays for it, nor is blamed for what it opens)

from . import leaks, loops, nursery
from .leaks import Snapshot

_TEMPORARY = tempfile.gettempdir()

# torch asks the name server for the name of ::ffff:127.0.0.1 once it connects to a board, and waits
# five seconds where the network loses the question. No test is about that.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

hypothesis.settings.register_profile("local", deadline=None, database=None)
hypothesis.settings.register_profile("ci", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

_failed = pytest.StashKey[bool]()
_complaints: list[loops.Context] = []
_current: list[Any] = []  # the loop of the running test


def _make_loop(name: str) -> Any:
    loop = loops.make(name, _complaints)
    _current[:] = [loop]
    return loop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Any]:
    return {name: partial(_make_loop, name) for name in _worth(item)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "loop_name" in metafunc.fixturenames:
        metafunc.parametrize("loop_name", sorted(_worth(metafunc.definition)), indirect=True)


def _worth(item: pytest.Item) -> Collection[str]:
    """The loops for which a test is run: a class or module whose tests are dear says in LOOPS."""
    for kind in (pytest.Class, pytest.Module):
        parent = item.getparent(kind)
        if parent is not None and hasattr(parent.obj, "LOOPS"):
            return parent.obj.LOOPS
    return loops.FACTORIES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Ray last: its processes would take time from the others.
    items.sort(key=_on_ray)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    # What importing torch made is never garbage: without it, a collection takes a few ms.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder of the session's own (workers inherit it), and the end of the nursery."""
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tempdir"))
    yield
    nursery.close()
    tempfile.tempdir = before[0]
    if before[1] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[1]


@pytest.fixture(scope="session")
def cluster(_session: None) -> Iterator[None]:
    """A local Ray, to which this process is connected; the same for all tests (``cluster.py``)."""
    from . import cluster

    place = cluster.start(_TEMPORARY)
    leaks.OTHERS.append(cluster.sockets)
    yield
    leaks.OTHERS.remove(cluster.sockets)
    cluster.stop(place)


@pytest.fixture
def loop_name(request: pytest.FixtureRequest) -> str:
    """For plain tests that start workers: once with asyncio in them, once with uvloop, or LOOPS."""
    return str(request.param)


@pytest.fixture
def complaints() -> list[loops.Context]:
    """What the test's loop would have logged; a test that provokes one must clear the list."""
    return _complaints


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    _complaints.clear()
    _current.clear()
    # What lives on from earlier tests is not this one's: a collection need not walk through it,
    # which would make the check of every test slower than that of the one before.
    gc.freeze()
    if _on_ray(request.node):
        request.getfixturevalue("cluster")
    for marker in request.node.iter_markers("ray"):
        for name in marker.args:  # fixtures that outlive the test
            request.getfixturevalue(name)
    before = Snapshot.take()
    actors = _actors()
    yield
    if request.node.stash.get(_failed, False):
        return  # its traceback holds on to everything, and one failure is enough
    left = before.left(tight=request.node.get_closest_marker("tight") is not None)
    left += leaks.until_empty(lambda: [f"actor {actor}" for actor in _actors() - actors])
    left += [f"the loop complained: {loops.describe(context)}" for context in _complaints]
    _complaints.clear()
    if left:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


def _actors() -> frozenset[str]:
    """The actors that live, if Ray was started."""
    if "tests.cluster" not in sys.modules:
        return frozenset()
    from . import cluster

    return cluster.actors()


def _on_ray(item: Any) -> bool:
    return item.get_closest_marker("ray") is not None or "cluster" in item.fixturenames


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    result = yield
    for loop in _current:
        if loop.is_closed():
            continue
        left = loop.run_until_complete(loops.stragglers())
        if left:
            pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report
