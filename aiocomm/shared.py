"""Tensors whose memory other workers of the host can map: they are sent without a copy made here.

A message of ordinary tensors is copied twice on its way between two processes, into shared memory
and out of it. What lies in shared memory from the start is copied once, by the receiver, straight
out of the sender's tensor; and not at all where the user says that both may have the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TypeVar

import torch
from torch.nn.parameter import is_lazy

from .errors import UsageError
from .packing import lay_out
from .payload_bytes import CODES
from .transport.shm.shared import REGISTRY

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def empty_shared(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, *, aliased: bool = False
) -> torch.Tensor:
    """A CPU tensor in shared memory, all zeros; to be used, sliced and sent like any other.

    Tensors and slices of 256 KiB or more that lie in it are sent without being copied on this side,
    by the worker that made them to workers on the same host; to others, and smaller, they go like
    any tensor.

    What a later write of the sender means is the same as for any tensor by default: the receiver
    gets memory of its own, and a completed send means that this tensor may be written again. Such a
    send completes when the receiver has made its copy, not before.

    Args:
        shape: of the tensor.
        dtype: of its elements; torch's default where it is None.
        aliased: a message that ``recv`` takes brings this very memory, with no copy at all: every
            later write on either side is seen on the other, and when it is safe to write is for the
            two to agree on; the send completes at once. What is smaller than 256 KiB, goes to
            another host, or is taken by ``recv_tensor`` is copied all the same.

    Raises:
        RouteError: there is no shared memory; the text has the reason.
        UsageError: there is no such shape, or no such tensor of that dtype.
    """
    sizes = _checked(shape)
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype) or kind not in CODES:
        raise UsageError(
            f"the dtype is {kind!r}: give one of torch's that can be sent, the shape as one tuple"
        )
    count = math.prod(sizes)
    if not count:
        return torch.empty(sizes, dtype=kind, device="cpu")
    view = REGISTRY.make(count * kind.itemsize, aliased=aliased)
    return torch.frombuffer(view, dtype=kind, count=count).view(sizes)


def share_(module: ModuleT, *, aliased: bool = False) -> ModuleT:
    """Move the parameters and buffers of a module into shared memory, in place.

    One segment takes them all; those of 256 KiB or more travel as ``empty_shared`` says, the others
    like any tensor. Optimizers made before keep working, as the parameters are the same
    objects; what is tied stays tied. To be called before the first send and not during one.

    Args:
        module: on the CPU.
        aliased: as in ``empty_shared``.

    Returns:
        The module.

    Raises:
        RouteError: there is no shared memory.
        UsageError: it is no module, or has a parameter that is not on the CPU, not dense or not
            there yet; nothing was moved.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"share_ takes a module, not {type(module).__name__}: for a tensor make another one "
            "with empty_shared, and copy_ into that"
        )
    tensors = [*module.parameters(), *module.buffers()]
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if is_lazy(tensor):
            raise UsageError("share_ met a lazy parameter without a shape: run the module first")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise UsageError(
                f"share_ takes dense modules on the CPU; it has a tensor on {tensor.device}: move "
                "it there first"
            )
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    moved = _copies(list(storages.values()), aliased=aliased)
    for tensor in tensors:
        copy = moved.get(tensor.untyped_storage().data_ptr())
        if copy is not None:
            view = torch.empty(0, dtype=tensor.dtype, device="cpu")
            view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = view
    return module


def _checked(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = (index(shape),) if not isinstance(shape, Sequence) else tuple(map(index, shape))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise UsageError(f"a tensor cannot have the shape {shape!r}: give sizes, as one tuple")
    return sizes


def _copies(
    storages: list[torch.UntypedStorage], *, aliased: bool
) -> dict[int, torch.UntypedStorage]:
    """A copy of each storage in one segment, by the address of the original."""
    starts, end = lay_out([storage.nbytes() for storage in storages])
    if not end:
        return {}
    view = REGISTRY.make(end, aliased=aliased)
    copies = {}
    for storage, start in zip(storages, starts, strict=True):
        count = storage.nbytes()
        whole = torch.frombuffer(view, dtype=torch.uint8, count=count, offset=start)
        original = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (count,), (1,))
        whole.copy_(original)
        copies[storage.data_ptr()] = whole.untyped_storage()
    return copies
