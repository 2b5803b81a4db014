"""Every kind of object and every dtype, by value and by type, from one process to another.

One pair of workers exchanges the whole list twice: below the eager limit, and with every byte of
tensors in bulk. How each is packed has its own tests beside ``payload``.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import enum
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from ..processes import Stage, Workers
from .members import group_with, member


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: torch.Tensor
    y: int


@dataclass
class Plain:
    tensors: list[torch.Tensor]
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    tensor: torch.Tensor
    child: Plain | None = None


class Custom:
    """Neither a dataclass nor a container, with a tensor deep inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = {"deep": [(tensor,)]}


def dtypes() -> list[torch.dtype]:
    """All dtypes of which a tensor can be made and that are not quantized."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    usable = []
    for dtype in sorted(found, key=str):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not torch.empty(1, dtype=dtype).is_quantized:
                    usable.append(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
    return usable


def filled(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Every byte is set, but to valid booleans; no NaN is lost on the way to a comparison."""
    tensor = torch.empty(size, dtype=dtype)
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.arange(raw.numel()) % (2 if dtype is torch.bool else 251))
    return tensor


def tensors(size: int) -> dict[str, torch.Tensor]:
    named = {f"dtype {dtype}": filled(dtype, size) for dtype in dtypes()}
    return named | {
        "0-dim": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty of 3 dimensions": torch.empty(2, 0, 3, dtype=torch.int16),
        "of 4 dimensions": filled(torch.float32, 24 * size).reshape(2, 3, 4, size),
        "slice": torch.arange(10 * size)[size : 2 * size],
    }


def objects(size: int) -> dict[str, Any]:
    one, two = filled(torch.float32, size), filled(torch.int64, size)
    shared = filled(torch.uint8, 4 * size)
    return {
        "none": None,
        "numbers": [0, -1, 1 << 100, 1.5, 2j, math.inf, True],
        "text": ("", "äöü \U0001f600", "x" * size),
        "bytes": [b"", bytes(size), bytearray(b"abc") * size],
        "list": [one, two],
        "tuple": (one, two),
        "dict": {"second": two, "first": one},
        "dict with other keys": {1: one, (2, 3): two, None: []},
        "empty containers": [[], (), {}, set(), frozenset()],
        "nested": {"a": [{"b": (one, [two, {"c": None}])}], "d": {1, 2}},
        "named tuple": Point(one, 3),
        "ordered": collections.OrderedDict(b=one, a=two),
        "default": collections.defaultdict(list, {"a": [one]}),
        "deque": collections.deque([one, 1], maxlen=5),
        "dataclass": Plain([one, two], "note", {"x": two}),
        "frozen": Frozen(one),
        "slotted": Slotted(one, Plain([two])),
        "custom": Custom(one),
        "enum and time": (
            Colour.RED,
            datetime.timedelta(seconds=3),
            torch.float16,
            torch.Size([2]),
        ),
        "parameter": torch.nn.Parameter(one.clone()),
        "module": torch.nn.Linear(3, 2).state_dict(),
        "shared storage": [shared, shared[size : 2 * size], shared],
        "many": {f"layer {number}": one[: number % 7] for number in range(200)},
    }


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, tensors bit by bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.requires_grad == right.requires_grad
            and raw(left) == raw(right)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple | collections.deque):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, each.name), getattr(right, each.name))
            for each in dataclasses.fields(left)
        )
    if isinstance(left, Custom):
        return same(left.inner, right.inner)
    return bool(left == right)


def raw(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).tolist() if flat.numel() else []


async def exchange(stage: Stage, size: int, **options: Any) -> list[str]:
    """Rank 0 sends everything, rank 1 compares; what was wrong, by name."""
    torch.manual_seed(0)
    cases = tensors(size) | objects(size)
    async with member(stage, **options) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank == 0:
            works = [group.send(value) for value in cases.values()]
            works += [group.send_tensor(tensor) for tensor in tensors(size).values()]
            for name, work in zip([*cases, *tensors(size)], works, strict=True):
                try:
                    await work
                except Exception as error:
                    error.add_note(name)
                    raise
            return []
        wrong = []
        for name, wanted in cases.items():
            try:
                got = await group.recv()
            except Exception as error:
                error.add_note(name)
                raise
            if not same(got, wanted):
                wrong.append(f"{name}: {got!r:.200}")
            elif name == "shared storage":
                got[0].fill_(7)
                if raw(got[1]) != [7] * size or got[2] is not got[0]:
                    wrong.append("what shared storage shares it no longer")
        for name, wanted in tensors(size).items():
            buffer = torch.empty_like(wanted)
            got = await group.recv_tensor(buffer)
            if got is not buffer or not same(got, wanted):
                wrong.append(f"recv_tensor of {name}")
        return wrong


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("envelope", {}),
        ("gloo", {"route": "gloo", "eager_limit": 0}),
        ("link", {"route": "link", "eager_limit": 0}),
    ],
)
def test_all_kinds_arrive_as_they_went(loop_name: str, route: str, options: dict[str, Any]) -> None:
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(exchange, 64 if route == "envelope" else 300, **options)
        assert workers.join()[1] == []


def test_the_list_of_dtypes_is_worth_its_name() -> None:
    found = set(dtypes())
    assert {torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn} <= found
    assert {torch.uint16, torch.uint64, torch.int8, torch.float64, torch.complex32} <= found


async def gradient(stage: Stage) -> Any:
    """A tensor that requires a gradient arrives detached (documented); a parameter stays one."""
    async with member(stage) as collective:
        group = group_with(collective, 1 - stage.rank)
        if stage.rank == 0:
            leaf = torch.ones(3, requires_grad=True)
            await asyncio.gather(group.send(leaf), group.send([leaf * 2]), group.send_tensor(leaf))
            return None
        plain, (computed,) = await group.recv(), await group.recv()
        buffer = await group.recv_tensor(torch.empty(3))
        flags = [each.requires_grad for each in (plain, computed, buffer)]
        assert computed.tolist() == [2.0, 2.0, 2.0]
        return flags


def test_gradients_stay_at_home(loop_name: str) -> None:
    with Workers(2, loop=loop_name) as workers:
        for _ in range(2):
            workers.start(gradient)
        assert workers.join()[1] == [False, False, False]
