"""The path to what was refused, as the error names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from aiocomm.payload_find import where_is


@dataclass(frozen=True, slots=True)
class Slotted:
    inner: Any


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


TARGET = object()


@pytest.mark.parametrize(
    ("root", "path"),
    [
        (TARGET, ""),
        ({"a": 1, "b": TARGET}, "['b']"),
        ({"a": [1, (2, TARGET)]}, "['a'][1][1]"),
        (Slotted([TARGET]), ".inner[0]"),
        ([Plain({3: TARGET})], "[0].inner[3]"),
        ({"x" * 99: TARGET}, "['" + "x" * 36 + "...]"),
        ([1, 2], ""),
    ],
)
def test_the_path_leads_to_it(root: Any, path: str) -> None:
    assert where_is(TARGET, root) == path


def test_the_nearest_place_is_named() -> None:
    assert where_is(TARGET, [[[TARGET]], TARGET]) == "[1]"


def test_a_ring_ends() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert where_is(TARGET, ring) == ""
    ring.append(TARGET)
    assert where_is(TARGET, ring) == "[1]"
