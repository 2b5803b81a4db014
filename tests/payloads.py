"""Objects of every kind that may be sent, the ways they take, and whether they came back equal."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aiocomm.packing import gather, inline, outline, plan, scatter
from aiocomm.payload import STREAM_LIMIT, Packed, buffer_sizes, pack_tensor, unpack


def by_link(packed: Packed) -> Any:
    sizes = buffer_sizes(packed.kind, packed.meta)
    return unpack(packed.meta, outline(inline(packed.buffers), sizes))


def by_bulk(packed: Packed) -> Any:
    sizes = buffer_sizes(packed.kind, packed.meta)
    blocks = plan(sizes)
    moved = [block.clone() for block in gather(blocks, packed.buffers)]
    return unpack(memoryview(packed.meta), scatter(blocks, moved, sizes))


def same(ours: Any, theirs: Any) -> bool:
    """Equal by type and value, tensors by their bytes."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return (
            ours.dtype is theirs.dtype
            and ours.shape == theirs.shape
            and pack_bytes(ours) == pack_bytes(theirs)
        )
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and same(list(ours.values()), list(theirs.values()))
    if isinstance(ours, (list, tuple, deque)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if hasattr(ours, "__dataclass_fields__"):
        return all(
            same(getattr(ours, name), getattr(theirs, name)) for name in ours.__dataclass_fields__
        )
    return bool(ours == theirs)


def pack_bytes(tensor: torch.Tensor) -> bytes:
    return inline(pack_tensor(tensor).buffers)


Point = namedtuple("Point", ["x", "y"])


@dataclass
class Plain:
    x: torch.Tensor
    n: int = 3


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    rest: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Both:
    x: torch.Tensor
    inner: Any = None


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


OBJECTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "ints": lambda: {"step": 1, "n": 2**80},
    "text and bytes": lambda: ["é", b"\0x", bytearray(b"abc"), 1.5, {1, 2}, frozenset({3})],
    "tensor": lambda: t(3, 4),
    "0-dim": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0),
    "empty 3-d": lambda: torch.empty(2, 0, 3, dtype=torch.int64),
    "list": lambda: [t(3), t(2, 2)],
    "tuple": lambda: (t(3), torch.empty(0), t()),
    "empty containers": lambda: [[], (), {}, set()],
    "dict": lambda: {"z": t(3), "a": t(4), "m": t()},
    "dict of other keys": lambda: {3: t(1), ("a", 1): t(2), None: t(3)},
    "ordered dict": lambda: OrderedDict(b=t(1), a=t(2)),
    "named tuple": lambda: Point(t(2), [t(3)]),
    "deque": lambda: deque([t(1), 2], maxlen=5),
    "nested": lambda: {"a": [{"b": (t(2), [t(3), {"c": t(1)}])}], "d": "x"},
    "plain dataclass": lambda: Plain(t(4)),
    "frozen dataclass": lambda: Frozen(t(4), [t(1)]),
    "slotted dataclass": lambda: Slotted(t(4), t(2)),
    "frozen slotted dataclass": lambda: Both(t(4), Both(t(2))),
    "containers of dataclasses": lambda: [Both(t(1)), {"x": Slotted(t(2))}],
    "torch values": lambda: [torch.float32, torch.Size([2]), torch.device("cpu")],
    "large": lambda: {"w": t(300, 300), "b": t(3), "v": t(70_000)},
    "many": lambda: {f"k{number}": t(number % 7) for number in range(300)},
    "long stream": lambda: [list(range(50_000)), t(3), "x" * STREAM_LIMIT],
    "numpy": lambda: [np.arange(6).reshape(2, 3), np.float32(2), np.zeros(0), t(2)],
    "numpy of columns": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "numpy strided": lambda: np.arange(10)[::2],
    "numpy objects": lambda: np.array([1, "a", None], dtype=object),
}
