"""What a client refuses, and what failures say; at the calls themselves: test_client.py."""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from aiocomm.channel.checks import (
    check_bound,
    check_key,
    check_name,
    check_target,
    check_weight,
    closed,
    refusal,
)
from aiocomm.channel.entries import Reason
from aiocomm.errors import ChannelClosed, ChannelEmpty, ChannelError, ChannelFull, UsageError


@pytest.mark.parametrize("weight", [0, 3, 2.5, 10**30, np.int64(3), np.float64(2.5)])
def test_numbers_are_weights(weight: Any) -> None:
    checked = check_weight("weight", weight)
    assert checked == weight
    assert type(checked) in (int, float)


@pytest.mark.parametrize("weight", [None, "1", True, Fraction(1, 2), -0.1, float("inf")])
def test_other_weights_are_refused(weight: Any) -> None:
    with pytest.raises(UsageError, match=r"^batch_weight .*: give "):
        check_weight("batch_weight", weight)


def test_numbers_of_other_kinds_become_plain() -> None:
    class Float(float):
        """As numpy's are."""

    assert type(check_weight("weight", Float(1.5))) is float
    assert type(check_weight("weight", enum.IntEnum("Level", "LOW HIGH")(2))) is int


@pytest.mark.parametrize("bits", [1001, 100_000])  # more than a float holds, more than is written
def test_numbers_have_an_end(bits: int) -> None:
    with pytest.raises(UsageError, match=f"weight is a number of {bits} bits: give a smaller one"):
        check_weight("weight", 1 << (bits - 1))


def test_a_batch_has_a_weight() -> None:
    assert check_target(0.5) == 0.5
    with pytest.raises(UsageError, match="batch_weight is 0: give"):
        check_target(0)
    with pytest.raises(UsageError, match="batch_weight -4 is not usable: give more than 0"):
        check_target(-4)
    with pytest.raises(UsageError, match="batch_weight None is NoneType: give a number"):
        check_target(None)


def test_names_are_text_and_bounds_are_whole() -> None:
    assert check_name("jobs") == "jobs"
    for name in ("", " ", 3, None, "\ud800"):
        with pytest.raises(UsageError, match=r"channel name .* is not usable: give non-empty text"):
            check_name(name)
    check_bound("maxsize", 0)
    for bound in (-1, 1.5, True, None):
        with pytest.raises(UsageError, match=r"maxsize is .*: give a whole number"):
            check_bound("maxsize", bound)


def test_keys_are_strings() -> None:
    assert check_key("") == ""
    key = check_key(enum.StrEnum("Color", "RED BLUE")("blue"))
    assert (type(key), key) == (str, "blue"), "nothing that the server would have to import"
    with pytest.raises(UsageError, match="key 3 is int: give a string"):
        check_key(3)


@pytest.mark.parametrize(
    ("reason", "error", "mend"),
    [
        (Reason.FULL, ChannelFull, r"put\(\) waits"),
        (Reason.EMPTY, ChannelEmpty, r"get\(\) waits"),
        (Reason.STUCK, ChannelFull, "ask for less"),
        (Reason.CLOSED, ChannelClosed, "create a new one"),
    ],
)
def test_each_refusal_names_the_channel_and_how_to_mend_it(
    reason: Reason, error: type[ChannelError], mend: str
) -> None:
    with pytest.raises(error, match=f"^channel 'jobs' .*{mend}"):
        raise refusal("jobs", int(reason))


def test_each_failure_is_an_error_of_its_own() -> None:
    error = closed("jobs")
    error.__cause__ = KeyError("why")
    copy = error.again()
    assert copy is not error
    assert (type(copy), str(copy), copy.__cause__) == (type(error), str(error), error.__cause__)
