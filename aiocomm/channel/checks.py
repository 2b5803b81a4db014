"""What a channel's client refuses at the call, and what its failures say.

Pure: knows neither works nor messages.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING

from ..errors import ChannelClosed, ChannelEmpty, ChannelFull, ClosedError, UsageError
from .entries import Reason

if TYPE_CHECKING:
    from ..errors import AiocommError

MOST_BITS = 1000
"""Of a weight that is a whole number: as much as a float can hold, about."""


def closed(name: str) -> ChannelClosed:
    """The error of a channel that is closed and empty."""
    return ChannelClosed(f"channel {name!r} is closed: create a new one")


def left(name: str) -> ClosedError:
    """The error of a handle that was let go of."""
    return ClosedError(f"the handle of channel {name!r} was closed on this side")


def refusal(name: str, reason: int) -> AiocommError:
    """The error for what the server refused, for a ``Reason``."""
    if reason == Reason.FULL:
        return ChannelFull(f"channel {name!r} is full: put() waits for room")
    if reason == Reason.EMPTY:
        return ChannelEmpty(f"channel {name!r} has no such item: get() waits for one")
    if reason == Reason.STUCK:
        return ChannelFull(
            f"channel {name!r} is full, and what it holds does not weigh enough for the batch: "
            "ask for less, or create it with more room"
        )
    return closed(name)


def check_name(name: object, what: str = "channel name") -> str:
    """A name as a plain string, whatever class it is of.

    Raises:
        UsageError: it is none, or empty.
    """
    if not isinstance(name, str) or not name.strip() or not _is_text(name):
        raise UsageError(f"{what} {name!r} is not usable: give non-empty text")
    return str.__str__(name)


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # half a character, which Ray cannot write
        return False


def check_bound(what: str, bound: object) -> None:
    """Refuse what is no bound of a channel.

    Raises:
        UsageError: it is no whole number, or less than 0.
    """
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        raise UsageError(f"{what} is {bound!r}: give a whole number, 0 for no bound")


def check_key(key: object) -> str:
    """A key as a plain string: of a class of its own (an enum's, say) the server has none.

    Raises:
        UsageError: it is no string.
    """
    if not isinstance(key, str):
        raise UsageError(f"key {key!r} is {type(key).__name__}: give a string")
    return str.__str__(key)


def check_weight(what: str, weight: object, *, least: str = "0 or more") -> float:
    """A weight as a plain number.

    Raises:
        UsageError: it is none, or less than 0, or not finite.
    """
    # Those of numpy are integers, but no ``int``.
    if isinstance(weight, bool) or not isinstance(weight, Integral | float):
        raise UsageError(f"{what} {weight!r} is {type(weight).__name__}: give a number")
    if not isinstance(weight, float):
        weight = int(weight)
        if weight.bit_length() > MOST_BITS:  # its text may be more than Python will write
            raise UsageError(
                f"{what} is a number of {weight.bit_length()} bits: give a smaller one"
            )
    if weight < 0 or not math.isfinite(weight):
        raise UsageError(f"{what} {weight!r} is not usable: give {least}")
    return weight if type(weight) is int else float(weight)


def check_target(target: object) -> float:
    """The weight that a batch is to reach.

    Raises:
        UsageError: it is no weight, or 0.
    """
    weight = check_weight("batch_weight", target, least="more than 0")
    if not weight:
        raise UsageError("batch_weight is 0: give the weight that a batch is to reach")
    return weight
