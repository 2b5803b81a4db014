"""Where the buffers of a message lie, before they travel and after; a tensor of one on demand.

A message of thousands of small tensors is copied by address on its way out and cut out of its
blocks on its way in. To make a tensor of bytes for each in between would cost more than all the
rest, so both ends are sequences that make one only when somebody asks. Knows bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .payload_bytes import flat, tensor_at

_UINT8 = torch.uint8
_TENSOR = torch.Tensor


class Held(Sequence[torch.Tensor]):
    """The buffers of a message that is sent, by address; none of them is empty.

    Holds the storages, so what was there at the call is what travels, even if a tensor is given
    other memory meanwhile. (A storage that is resized in place before its send is complete is
    written to, which its owner must not do.)

    Args:
        owners: plain tensors that were checked already, or memoryviews.
        pointers: where the memory of each starts.
        sizes: bytes of each.
        on_cpu: whether the addresses are of memory that this process may read.
    """

    __slots__ = ("_owners", "_storages", "on_cpu", "pointers", "sizes")

    def __init__(
        self, owners: list[Any], pointers: list[int], sizes: list[int], *, on_cpu: bool
    ) -> None:
        self._owners = owners
        self._storages = [
            owner.untyped_storage() if type(owner) is _TENSOR else None for owner in owners
        ]
        self.pointers = pointers
        self.sizes = sizes
        self.on_cpu = on_cpu

    def append(self, owner: torch.Tensor) -> None:
        """One more buffer: a 1-D uint8 tensor on the same device."""
        self._owners.append(owner)
        self._storages.append(owner.untyped_storage())
        self.pointers.append(owner.data_ptr())
        self.sizes.append(owner.nbytes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        owner, pointer, size = self._owners[number], self.pointers[number], self.sizes[number]
        if type(owner) is not _TENSOR:
            return tensor_at(pointer, size, owner)
        if owner.data_ptr() == pointer and owner.nbytes == size:
            return flat(owner)
        storage = self._storages[number]
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=_UINT8, device=storage.device)
            return empty.set_(storage, pointer - storage.data_ptr(), (size,), (1,))


class Laid(Sequence[torch.Tensor]):
    """The buffers of a message that arrived, by where they lie.

    Args:
        memory: of each buffer the 1-D uint8 tensor that it is, or writable bytes that it lies in.
            Not slices of one tensor: those share autograd's version counter, and a change of one
            would count as a change of all.
        offsets: of each buffer in its memory; 0 where it is a tensor.
        sizes: bytes of each.
    """

    __slots__ = ("memory", "offsets", "sizes")

    def __init__(self, memory: list[Any], offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self.memory = memory
        self.offsets = offsets
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return Laid(self.memory[number], self.offsets[number], self.sizes[number])
        memory = self.memory[number]
        if isinstance(memory, _TENSOR):
            return memory
        size = self.sizes[number]
        return torch.frombuffer(memory, dtype=_UINT8, count=size, offset=self.offsets[number])
