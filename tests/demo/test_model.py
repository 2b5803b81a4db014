"""The model is a decoder of the size asked for, and every step gives new bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiocomm.demo.checksum import checksum
from aiocomm.demo.model import (
    Decoder,
    advance,
    file_weights,
    model_weights,
    width_for,
)


def parameters(width: int) -> int:
    return sum(each.numel() for each in Decoder(width).parameters())


@pytest.mark.parametrize("wanted", [20e6, 7e6])
def test_about_as_many_parameters_as_asked_for(wanted: float) -> None:
    assert parameters(width_for(wanted)) == pytest.approx(wanted, rel=0.2)


def test_default_and_smallest() -> None:
    assert width_for(50e6) == 512
    assert parameters(512) == pytest.approx(50e6, rel=0.05)
    assert width_for(1) == 64


def test_it_is_a_decoder() -> None:
    torch.manual_seed(0)
    model = Decoder(64).eval()
    tokens = torch.randint(1000, (2, 8))
    logits = model(tokens)
    assert logits.shape == (2, 8, 3200)
    assert torch.isfinite(logits).all()
    later = tokens.clone()
    later[:, -1] = 0
    assert torch.allclose(model(later)[:, :-1], logits[:, :-1], atol=1e-5)  # looks at no future


def test_weights_follow_from_the_seed_and_are_tied() -> None:
    weights = model_weights(0.8e6, 3)
    assert checksum(weights) == checksum(model_weights(0.8e6, 3))
    assert checksum(weights) != checksum(model_weights(0.8e6, 4))
    assert weights["head.weight"].data_ptr() == weights["tokens.weight"].data_ptr()
    assert len(weights) > 100


def test_no_two_steps_give_the_same_bytes() -> None:
    weights = model_weights(0.8e6, 0)
    seen = {checksum(weights)}
    for step in range(20):
        advance(weights, step)
        seen.add(checksum(weights))
    assert len(seen) == 21
    assert max(float(each.abs().max()) for each in weights.values()) < 10


def test_every_tensor_moves_whatever_its_type() -> None:
    weights = {
        "float8": torch.zeros(4).to(torch.float8_e4m3fn),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(1.0),
        "half": torch.ones(3, dtype=torch.bfloat16) / 16,
        "complex": torch.zeros(2, dtype=torch.complex64),
        "empty": torch.empty(0),
    }
    before = {name: checksum(tensor) for name, tensor in weights.items()}
    advance(weights, 0)
    same = [name for name, tensor in weights.items() if checksum(tensor) == before[name]]
    assert same == ["empty"]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    tensors = {"a": torch.arange(5), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, path)
    assert checksum(dict(sorted(file_weights(path).items()))) == checksum(tensors)
