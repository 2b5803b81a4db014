"""The exception tree: as documented, with its context kept, across processes too."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from aiocomm import errors
from aiocomm.errors import AiocommError, PeerLostError, Refusal, RefusedError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, AiocommError)
]
ENDINGS = ("Error", "Timeout", "Full", "Empty", "Closed")
CONTEXT = {"group": "g", "direction": "send", "peer": "rollout:0", "sequence": 7}


def documented() -> dict[str, tuple[str, ...]]:
    """Class names and the names of their bases, as the tree in the docstring draws them."""
    bases: dict[str, tuple[str, ...]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ((?:\|   |    )*)(\+-- )?([A-Z]\w+)\s*(?:\((\w+)\))?", line)
        if not found or not found[3].endswith(ENDINGS):
            continue
        depth = len(found[1]) // 4 + bool(found[2])
        del path[depth:]
        bases[found[3]] = (*path[-1:], *([found[4]] if found[4] else []))
        path.append(found[3])
    return bases


def test_the_documented_tree_is_the_real_one() -> None:
    real = {cls.__name__: tuple(base.__name__ for base in cls.__bases__) for cls in CLASSES}
    real["AiocommError"] = ()  # its base is Exception, which the tree does not draw
    assert documented() == real
    assert len(real) > 10


def make(cls: type[AiocommError]) -> AiocommError:
    if issubclass(cls, RefusedError):
        return cls(Refusal.STALE, "it broke", **CONTEXT)  # type: ignore[arg-type]
    return cls("it broke", **CONTEXT)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", CLASSES)
def test_text_names_what_happened_and_where(cls: type[AiocommError]) -> None:
    error = make(cls)
    assert str(error) == ("it broke [group g, direction send, peer rollout:0, message 7]")
    assert error.args == ("it broke",)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_class_text_and_context(cls: type[AiocommError], protocol: int) -> None:
    error = make(cls)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert again.__notes__ == ["a note"]


@pytest.mark.parametrize("cls", CLASSES)
def test_copy_keeps_them_too(cls: type[AiocommError]) -> None:
    assert vars(copy.copy(make(cls))) == vars(make(cls))


@pytest.mark.parametrize("cls", CLASSES)
def test_who_waits_gets_one_of_his_own(cls: type[AiocommError]) -> None:
    with pytest.raises(cls) as raised:
        raise make(cls) from OSError("why")
    error, again = raised.value, raised.value.again()
    assert again is not error
    assert vars(again) == vars(error)
    assert again.__cause__ is error.__cause__
    assert again.__traceback__ is error.__traceback__


def test_text_without_context_has_no_brackets() -> None:
    assert str(AiocommError("it broke")) == "it broke"
    assert str(AiocommError()) == ""


def test_zero_is_a_message_number() -> None:
    assert str(AiocommError("x", sequence=0)) == "x [message 0]"


def test_context_may_be_added_later() -> None:
    error = PeerLostError("it broke")
    error.peer = "rollout:0"
    assert str(error) == "it broke [peer rollout:0]"


def test_a_refusal_has_its_code_and_a_text() -> None:
    error = RefusedError(Refusal.NOT_A_MEMBER, group="g")
    assert error.code is Refusal.NOT_A_MEMBER
    assert str(error) == "not a member [group g]"


@pytest.mark.parametrize("cls", CLASSES)
def test_each_says_what_it_is_called_for(cls: type[AiocommError]) -> None:
    assert cls.__doc__
    assert cls.__doc__ != cls.__bases__[0].__doc__


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.AddressError, ValueError),
        (errors.PayloadError, ValueError),
        (errors.WrongLoopError, RuntimeError),
        (errors.WouldBlockError, RuntimeError),
        (errors.MissingPackageError, ImportError),
        (errors.PeerClosedError, ConnectionError),
        (errors.AuthenticationError, ConnectionError),
        (errors.RouteError, ConnectionError),
        (errors.RendezvousTimeout, TimeoutError),
    ],
)
def test_each_is_caught_by_the_builtin_that_fits(cls: type, builtin: type) -> None:
    assert issubclass(cls, builtin)
