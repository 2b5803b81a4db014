"""Memory that two processes have mapped, seen here twice by one."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path

import pytest

from aiocomm.errors import ProtocolError, RouteError
from aiocomm.transport.shm.segment import Segment

SIZE = 3 * 4096 + 5


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_both_mappings_show_the_same_bytes() -> None:
    ours = Segment.create(SIZE)
    theirs = Segment.adopt(os.dup(ours.descriptor), SIZE)
    assert bytes(theirs.view) == bytes(SIZE)
    ctypes.memset(ours.address + SIZE - 1, 9, 1)
    theirs.view[0] = 8
    assert (ours.view[0], theirs.view[SIZE - 1]) == (8, 9)
    assert len(ours.view) == ours.nbytes == SIZE


def test_emptied_memory_is_zeros_at_both_ends() -> None:
    ours = Segment.create(SIZE)
    theirs = Segment.adopt(os.dup(ours.descriptor), SIZE)
    ctypes.memset(ours.address, 9, SIZE)
    before = os.fstat(ours.descriptor).st_blocks
    ours.empty()
    assert os.fstat(ours.descriptor).st_blocks < before
    assert bytes(theirs.view) == bytes(SIZE)
    theirs.view[0] = 1
    assert ours.view[0] == 1


def test_it_has_no_name_anywhere_and_leaves_no_descriptor() -> None:
    before = descriptors()
    ours = Segment.create(SIZE)
    theirs = Segment.adopt(os.dup(ours.descriptor), SIZE)
    assert os.readlink(f"/proc/self/fd/{ours.descriptor}").startswith("/memfd:")  # no directory
    ours.forget_descriptor()
    ours.forget_descriptor()
    view = theirs.view[5:]
    del ours, theirs
    gc.collect()
    view[0] = 1  # a slice keeps the mapping
    del view
    assert descriptors() == before


@pytest.mark.parametrize(
    ("make", "claims"),
    [
        pytest.param(lambda fd: os.ftruncate(fd, 4096), 4096, id="not sealed"),
        pytest.param(lambda fd: None, 4096, id="empty"),
        pytest.param(lambda fd: None, 0, id="nothing"),
    ],
)
def test_memory_that_the_peer_could_take_away_is_refused(make, claims: int) -> None:
    before = descriptors()
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    make(fd)
    with pytest.raises(ProtocolError, match="is not what it says"):
        Segment.adopt(fd, claims)
    assert descriptors() == before


def test_less_than_the_peer_claims_is_refused() -> None:
    segment = Segment.create(4096)
    with pytest.raises(ProtocolError):
        Segment.adopt(os.dup(segment.descriptor), 2**63)


def test_what_is_no_memory_is_refused() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ProtocolError):
        Segment.adopt(reading, 1)


def test_a_limit_of_the_system_is_named() -> None:
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RouteError, match="8192 bytes of shared memory cannot be had: File too"):
            Segment.create(8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert descriptors() == before


def test_a_system_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(RouteError, match=r"makes no anonymous shared memory: .*not permitted"):
        Segment.create(1)


def test_more_than_an_address_space_holds_cannot_be_mapped() -> None:
    before = descriptors()
    with pytest.raises(RouteError, match=r"cannot be (had|mapped)"):
        Segment.create(2**60)
    gc.collect()
    assert descriptors() == before
