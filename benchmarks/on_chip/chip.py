"""The chip as the checks see it: the real one, or the processor in its place for a rehearsal.

A rehearsal runs the same code with tensors of the host. It shows that the script itself works, and
nothing of a GPU.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

cuda: Any = torch.cuda  # half of it is not typed

CUDA, REHEARSAL = "cuda", "cpu"
CYCLES = 1.5e6
"""Of the clock, in a millisecond: of most chips within a factor of two."""
DTYPES = [
    getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
    if hasattr(torch, name)
]


class CheckFailed(AssertionError):
    """Something is not as promised."""


def hold(fact: object, text: str) -> None:
    """Fail the check where the fact is none."""
    if not fact:
        raise CheckFailed(text)


@dataclass(frozen=True)
class Chip:
    """One of them.

    Args:
        kind: ``CUDA`` or ``REHEARSAL``.
    """

    kind: str

    @property
    def real(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == CUDA

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return torch.device("cuda", 0) if self.real else torch.device("cpu")

    def begin(self) -> None:
        """Use it for the first time, before anything is timed."""
        if self.real:
            torch.cuda.set_device(0)
            torch.zeros(1, device=self.device)
            torch.cuda.synchronize()

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        if self.real:
            torch.cuda.synchronize()

    def spin(self, milliseconds: float) -> None:
        """Queue something that takes about so long."""
        if self.real:
            cuda._sleep(int(milliseconds * CYCLES))

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Within this block a new stream is the current one."""
        if not self.real:
            yield
            return
        with cuda.stream(cuda.Stream()):
            yield

    def allocated(self) -> int:
        """Bytes that this process's tensors have."""
        return torch.cuda.memory_allocated() if self.real else 0

    def free(self) -> int:
        """Bytes that nobody on the chip has; what this process only keeps in hand is given back."""
        if not self.real:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def values(self, count: int, seed: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A tensor of so many elements, the same for the same seed in every process."""
        source = torch.Generator().manual_seed(seed)
        if dtype is torch.bool:
            return (torch.randint(0, 2, (count,), generator=source) > 0).to(self.device)
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (count * width,), generator=source, dtype=torch.uint8)
        return raw.view(dtype).to(self.device)

    def describe(self) -> dict[str, Any]:
        """What it is, for the report."""
        if not self.real:
            return {"device": "none: a rehearsal on the CPU"}
        major, minor = torch.cuda.get_device_capability(0)
        return {
            "device": torch.cuda.get_device_name(0),
            "capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
            "devices": torch.cuda.device_count(),
        }


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the host: NaN equals itself there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(ours: Any, theirs: Any) -> bool:
    """Equal by type and value, tensors by dtype, shape, device and bytes."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return (
            (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            and ours.device.type == theirs.device.type
            and torch.equal(raw(ours), raw(theirs))
        )
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if hasattr(ours, "__dataclass_fields__"):
        return all(
            same(getattr(ours, name), getattr(theirs, name)) for name in ours.__dataclass_fields__
        )
    return bool(ours == theirs)
