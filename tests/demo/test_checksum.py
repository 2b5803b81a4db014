"""The checksum finds every kind of difference there is, and nothing where there is none."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from aiocomm.demo.checksum import checksum, memory_of


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    note: str


def message() -> dict[str, Any]:
    return {
        "step": 3,
        "weights": {"a": torch.arange(1000.0), "b": torch.zeros(2, 3, dtype=torch.bfloat16)},
        "samples": [Sample(torch.arange(4), "x"), (torch.tensor(True), None, 0.5)],
        "empty": torch.empty(0, 3),
    }


def changed(path: str, value: object) -> dict[str, Any]:
    found = message()
    *parents, last = path.split("/")
    part = found
    for key in parents:
        part = part[key]
    part[last] = value
    return found


def test_equal_messages_have_equal_checksums() -> None:
    assert (
        checksum(message())
        == checksum(message())
        == checksum(pickle.loads(pickle.dumps(message())))
    )
    assert len(checksum(None)) == 32


@pytest.mark.parametrize("index", [0, 1, 1999, 3999])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_is_enough(index: int, bit: int) -> None:
    found = message()
    memory_of(found["weights"]["a"])[index] ^= 1 << bit
    assert checksum(found) != checksum(message())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", 4),
        ("step", 3.0),
        ("step", True),
        ("more", None),
        ("weights/b", torch.zeros(3, 2, dtype=torch.bfloat16)),
        ("weights/b", torch.zeros(2, 3, dtype=torch.float16)),
        ("weights/b", torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))),
        ("empty", torch.empty(3, 0)),
        ("samples", tuple(message()["samples"])),
        ("samples", [replace(message()["samples"][0], note="y"), message()["samples"][1]]),
        ("samples", message()["samples"][:1]),
    ],
)
def test_every_difference_shows(path: str, value: object) -> None:
    assert checksum(changed(path, value)) != checksum(message())


def test_order_and_names_count() -> None:
    one, two = torch.zeros(3), torch.ones(3)
    assert checksum([one, two]) != checksum([two, one])
    assert checksum({"a": one, "b": two}) != checksum({"b": two, "a": one})
    assert checksum({"a": one}) != checksum({"b": one})


def test_strides_do_not_count() -> None:
    square = torch.arange(9.0).reshape(3, 3)
    assert checksum(square.T) == checksum(square.T.contiguous())


def test_what_it_cannot_check_it_refuses() -> None:
    with pytest.raises(TypeError, match=r"message\['odd'\]\[1\] is a object"):
        checksum({"odd": [1, object()]})
    with pytest.raises(TypeError, match="is a type"):
        checksum(Sample)
