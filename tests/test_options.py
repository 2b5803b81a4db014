"""Options: their defaults hold together, and what cannot work is refused by name."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

from aiocomm.errors import UsageError
from aiocomm.options import (
    KIB,
    LONGEST_INTERVAL,
    LONGEST_STALL,
    MIB,
    MOST_BYTES,
    MOST_MESSAGES,
    Options,
)

FIELDS = [field.name for field in dataclasses.fields(Options)]
DEVICE = {"device", "nccl_min_ctas", "nccl_max_ctas"}
CHOICES = {"route", "device_route", "high_priority", *DEVICE}


def test_defaults_hold_together() -> None:
    options = Options()
    assert options.eager_limit < options.window_bytes
    assert options.heartbeat_interval * 2 < options.peer_timeout < options.connect_timeout
    assert options.route is None


def test_units() -> None:
    assert (KIB, MIB) == (2**10, 2**20)


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_is_documented(name: str) -> None:
    assert re.search(rf"^ +{name}: ", Options.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("name", ["eager_limit", "prefetch_bytes"])
def test_sizes_may_be_zero_but_not_less(name: str) -> None:
    assert getattr(Options(**{name: 0}), name) == 0  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"option {name} is -1"):
        Options(**{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    sorted(set(FIELDS) - {"eager_limit", "prefetch_bytes"} - CHOICES),
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_the_others_must_be_more_than_zero(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"option {name} is {value!r}"):
        Options(**{name: value})  # type: ignore[arg-type]


def test_an_eager_message_must_fit_a_frame() -> None:
    assert Options(eager_limit=8 * MIB).eager_limit == 8 * MIB
    with pytest.raises(UsageError, match="at most 8 MiB"):
        Options(eager_limit=8 * MIB + 1)


@pytest.mark.parametrize("value", [LONGEST_STALL + 1, float("inf")])
def test_a_stall_must_end_some_time(value: float) -> None:
    assert Options(stall_timeout=LONGEST_STALL).stall_timeout == LONGEST_STALL
    with pytest.raises(UsageError, match=f"option stall_timeout is {value!r}"):
        Options(stall_timeout=value)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - CHOICES))
@pytest.mark.parametrize("value", ["5", None, True])
def test_what_is_no_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"option {name} is {value!r}: give a"):
        Options(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eager_limit", "window_bytes", "window_messages"])
def test_sizes_are_whole(name: str) -> None:
    with pytest.raises(UsageError, match=f"option {name} is 1.5: give an integer"):
        Options(**{name: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("window_messages", MOST_MESSAGES),
        ("window_bytes", MOST_BYTES),
        ("heartbeat_interval", LONGEST_INTERVAL),
    ],
)
def test_what_the_peer_cannot_be_told_is_refused(name: str, most: float) -> None:
    assert getattr(Options(**{name: most}), name) == most  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"option {name} is .*: at most {most}"):
        Options(**{name: most + 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("route", [None, "shm", "gloo", "link"])
def test_routes_that_can_be_pinned(route: str | None) -> None:
    assert Options(route=route).route == route


@pytest.mark.parametrize("route", ["", "nccl", "GLOO", 1])
def test_other_routes_are_refused(route: object) -> None:
    with pytest.raises(UsageError, match=f"option route is {re.escape(repr(route))}"):
        Options(route=route)  # type: ignore[arg-type]


@pytest.mark.parametrize("route", [None, "nccl", "staged"])
def test_routes_of_a_device_that_can_be_pinned(route: str | None) -> None:
    assert Options(device_route=route).device_route == route


@pytest.mark.parametrize("route", ["", "gloo", 1])
def test_other_routes_of_a_device_are_refused(route: object) -> None:
    text = f"option device_route is {re.escape(repr(route))}: give 'nccl', "
    with pytest.raises(UsageError, match=text):
        Options(device_route=route)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(DEVICE))
def test_numbers_of_a_device(name: str) -> None:
    least = 0 if name == "device" else 1
    assert getattr(Options(**{name: least}), name) == least  # type: ignore[arg-type]
    for value in (least - 1, 1.5, True, "5"):
        with pytest.raises(UsageError, match=f"option {name} is {value!r}: give {least} or more"):
            Options(**{name: value})  # type: ignore[arg-type]


def test_blocks_at_least_are_no_more_than_at_most() -> None:
    assert Options(nccl_min_ctas=2, nccl_max_ctas=2).nccl_max_ctas == 2
    with pytest.raises(UsageError, match="nccl_min_ctas is 3, more than nccl_max_ctas, 2"):
        Options(nccl_min_ctas=3, nccl_max_ctas=2)


def test_the_priority_is_yes_or_no() -> None:
    assert Options(high_priority=True).high_priority
    with pytest.raises(UsageError, match="option high_priority is 1: give True or False"):
        Options(high_priority=1)  # type: ignore[arg-type]


def test_frozen_keyword_only_and_picklable() -> None:
    options = Options(window_messages=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.window_messages = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options(1)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, window_messages=5).window_messages == 5
