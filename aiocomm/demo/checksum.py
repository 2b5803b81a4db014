"""One checksum for a whole message: names, types, shapes and every byte of every tensor.

Each tensor gets the CRC-32 of its bytes (finds any flipped byte for certain; twice the speed of
SHA-256 here, and it lets the interpreter lock go), and the layout with all of them is hashed by
BLAKE2, so that swapped, renamed or reshaped tensors differ too. It is a check against faults of the
transport and not against an adversary. Works on what arrived, with no help of the code that
packed it: it may not use anything of the package. Rejected: ``torch.hash_tensor`` (exclusive-or,
blind to order) and pickling the message (hides aliasing and costs a copy).
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN = (type(None), bool, int, float, str, bytes)


def checksum(message: object) -> str:
    """Checksum of a message of tensors, plain values, lists, tuples, dicts and dataclasses.

    Takes about half a second per GB; call it in a thread.

    Returns:
        32 hexadecimal digits.

    Raises:
        TypeError: something else is in the message; the text says what, and where.
    """
    total = hashlib.blake2b(digest_size=16)
    for line in _lines(message, "message"):
        total.update(line.encode() + b"\n")
    return total.hexdigest()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place; valid while the tensor is."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _lines(value: object, path: str) -> Iterator[str]:
    """The layout in order, one line for each part; a tensor's line has the CRC of its bytes."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous()  # a name, for the memory lives as long as it does
        crc = zlib.crc32(memory_of(tensor))
        yield f"{path} {kind} {value.dtype} {list(value.shape)} {crc:08x}"
    elif isinstance(value, PLAIN):
        yield f"{path} {kind} {value!r}"
    elif isinstance(value, dict):
        yield f"{path} {kind} {len(value)}"
        for key, part in value.items():
            yield from _lines(part, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"{path} {kind} {len(value)}"
        for number, part in enumerate(value):
            yield from _lines(part, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{path} {kind}"
        for field in dataclasses.fields(value):
            yield from _lines(getattr(value, field.name), f"{path}.{field.name}")
    else:
        raise TypeError(f"{path} is a {kind}: no checksum for that")
