"""The weights that travel: a transformer decoder of about as many parameters as asked for.

A real ``torch.nn`` module with its real state dict, embedding and output head tied, so one message
has some 150 tensors of very different sizes, two of them the same memory. Or a file of one's own.
Knows nothing of how they travel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LAYERS = 12
CONTEXT = 512
HEAD_WIDTH = 64
VOCABULARY_PER_WIDTH = 50
CHANGE = 0.01
"""How far one step moves each weight, at most."""

ARITHMETIC = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Decoder(nn.Module):
    """A decoder of 12 layers; its width decides the rest.

    Args:
        width: a multiple of 64.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        vocabulary = VOCABULARY_PER_WIDTH * width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // HEAD_WIDTH,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits float32 [batch, length, vocabulary] for tokens int64 [batch, length <= 512]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def width_for(parameters: float) -> int:
    """The width, a multiple of 64, whose decoder comes nearest to that many parameters."""
    per_square = 12 * LAYERS + VOCABULARY_PER_WIDTH
    return max(1, round(math.sqrt(parameters / per_square) / HEAD_WIDTH)) * HEAD_WIDTH


def model_weights(parameters: float, seed: int) -> dict[str, torch.Tensor]:
    """State dict of a fresh decoder of about that many parameters, float32.

    ``head.weight`` and ``tokens.weight`` are one tensor.
    """
    torch.manual_seed(seed)
    return dict(Decoder(width_for(parameters)).state_dict())


def file_weights(path: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, by name, on the CPU.

    Raises:
        OSError: it cannot be read.
        safetensors.SafetensorError: it is no safetensors file.
    """
    from safetensors.torch import load_file

    return load_file(path)


@torch.no_grad()
def advance(weights: Mapping[str, torch.Tensor], step: int) -> None:
    """Change every tensor in place, as an optimizer's step would; never twice the same way.

    The moves are CHANGE * cos(step): their sum stays small however many steps there are, and no
    two steps give the same weights. Types without arithmetic (float8, integers) get bits flipped.
    """
    seen = set()
    for tensor in weights.values():
        if tensor.data_ptr() in seen or not tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        if tensor.dtype in ARITHMETIC:
            tensor.add_(CHANGE * math.cos(step))
        else:
            tensor.view(-1).view(torch.uint8).bitwise_xor_(1)
