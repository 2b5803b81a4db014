"""The walk through an object: one pickle, and aside of it the tensors it met.

Knows how a tensor stands in the stream and what it needs to come back as what it was; nothing of
buffers, tables or messages. What leaves the stream is queued in the order in which loading takes
it: a tensor's place there is an empty out-of-band buffer, since pickle's own queue hands over
whatever it is given when loading.
"""

from __future__ import annotations

import io
import operator
import pickle
from typing import TYPE_CHECKING, Any

import torch

from .device import here
from .errors import AiocommError, PayloadError
from .payload_bytes import CODES, MAX_DIMS, RAW, SENDABLE, address_of, is_wrapper, plain, refuse
from .payload_find import where_is

if TYPE_CHECKING:
    from collections.abc import Sequence

_TENSOR = torch.Tensor
_PARAMETER = torch.nn.Parameter
_REDUCE: Any = torch.Tensor.__reduce_ex__
_REDUCE_PARAMETER: Any = torch.nn.Parameter.__reduce_ex__
_STATE = object.__getstate__  # None without attributes; asking for __dict__ would make one
_STRIDED = torch.strided
_CPU = torch.device("cpu")
_DTYPE, _NBYTES = map(operator.attrgetter, ("dtype", "nbytes"))
_NAMED = getattr(_TENSOR, "has_names", None)  # only in a torch that has named tensors

FEW = 1
"""Up to so many tensors are looked at one by one: columns cost more than that."""


class Slots:
    """What leaves the stream, as columns, in the order in which loading takes it."""

    __slots__ = ("codes", "device", "nbytes", "owners", "pointers", "shapes")

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.pointers: list[int] = []
        self.nbytes: list[int] = []
        self.owners: list[Any] = []  # a tensor, or the memoryview of raw bytes
        self.device: torch.device | None = None

    def add(self, items: Sequence[Any]) -> None:
        """Take in tensors of class ``torch.Tensor``, and memoryviews of other bytes.

        Raises:
            Refused: a tensor cannot be sent.
            PayloadError: they are not on one device.
        """
        if not self.codes and len(items) > FEW and self._add_at_once(items):
            return
        codes, shapes, pointers, sizes = self.codes, self.shapes, self.pointers, self.nbytes
        tensor, device = None, self.device
        try:
            for tensor in items:  # per tensor, each line here counts
                if type(tensor) is memoryview:
                    self._add_raw(tensor)
                    continue
                if (
                    tensor.layout is not _STRIDED
                    or not tensor.is_contiguous()
                    or tensor.is_conj()
                    or tensor.is_neg()
                    or (_NAMED is not None and _NAMED(tensor))
                ):
                    raise Refused(tensor)
                if not here.on_cpu(tensor) or device is not _CPU:
                    device = self._device_with(tensor)
                codes.append(CODES[tensor.dtype])
                shapes.append(tensor.shape)
                size, pointer = tensor.nbytes, tensor.data_ptr()
                if (size and not pointer) or tensor.dim() > MAX_DIMS:
                    raise Refused(tensor)
                sizes.append(size)
                pointers.append(pointer)
        except (Refused, PayloadError):
            raise
        except Exception as error:  # no code, or torch cannot say (a functorch wrapper)
            raise Refused(tensor, error) from error
        self.owners.extend(items)

    def _add_at_once(self, items: Sequence[Any]) -> bool:
        """The same by columns, which takes half the time; False where anything is unusual."""
        try:
            if not (
                all(map(here.on_cpu, items))
                and all(map(_TENSOR.is_contiguous, items))
                and not any(map(_TENSOR.is_conj, items))
                and not any(map(_TENSOR.is_neg, items))
                and not (_NAMED is not None and any(map(_NAMED, items)))
            ):
                return False
            codes = list(map(CODES.__getitem__, map(_DTYPE, items)))
            shapes: list[tuple[int, ...]] = list(map(_TENSOR.size, items))
            sizes = list(map(_NBYTES, items))
            pointers = list(map(_TENSOR.data_ptr, items))  # raises where the layout has none
        except Exception:  # the way by rows finds out which and why
            return False
        if 0 in pointers or max(map(len, shapes)) > MAX_DIMS:
            return False
        self.codes, self.shapes, self.nbytes, self.pointers = codes, shapes, sizes, pointers
        self.device = _CPU
        self.owners.extend(items)
        return True

    def _device_with(self, tensor: torch.Tensor) -> torch.device:
        device = _CPU if here.on_cpu(tensor) else here.device_of(tensor)
        if device.type not in SENDABLE:
            raise Refused(tensor)
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise PayloadError(
                f"the object has tensors on {self.device} and on {device}: move them to one "
                "device, or send them in two messages"
            )
        return device

    def _add_raw(self, view: memoryview) -> None:
        self.codes.append(RAW)
        self.shapes.append((view.nbytes,))
        self.pointers.append(address_of(view))
        self.nbytes.append(view.nbytes)


class Refused(Exception):
    """Internal: a tensor that cannot be sent, before its place in the object is known."""

    def __init__(self, tensor: Any, cause: Exception | None = None) -> None:
        super().__init__()
        self.tensor: torch.Tensor = tensor
        self.cause = cause


# Stands in the stream for a tensor. Writable, else the stream would make a memoryview of what the
# queue gives.
_MARK = pickle.PickleBuffer(bytearray())


def as_sent(arrived: torch.Tensor) -> torch.Tensor:
    """In the stream: the tensor that the queue of buffers gave."""
    return arrived


def as_parameter(arrived: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """In the stream: a parameter."""
    return torch.nn.Parameter(arrived, requires_grad)


def as_subclass_of(arrived: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """In the stream: a tensor of another class."""
    return arrived.as_subclass(cls)


def as_parameter_of(
    arrived: torch.Tensor, requires_grad: bool, cls: type[torch.nn.Parameter]
) -> torch.Tensor:
    """In the stream: a parameter of another class, whose constructor may want more."""
    return torch.Tensor._make_subclass(cls, arrived, requires_grad)


def restore(tensor: torch.Tensor, state: Any) -> None:
    """In the stream: attributes of a tensor; ``Tensor.__setstate__`` means something else."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    tensor.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(tensor, name, value)


class _Pickler(pickle.Pickler):
    _taken: list[Any]
    _origins: dict[int, torch.Tensor]  # of what was taken in place of a tensor of another class

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _TENSOR:
            self._taken.append(obj)
            if not _STATE(obj):
                return as_sent, (_MARK,)
            reduced: tuple[Any, ...] | None = (as_sent, (_MARK,))
        elif isinstance(obj, _TENSOR):
            reduced = self._reduce_subclass(obj)
        else:
            return NotImplemented
        if reduced is None:
            return NotImplemented
        state = _STATE(obj)
        return (*reduced, state, None, None, restore) if state else reduced

    def _reduce_subclass(self, obj: torch.Tensor) -> tuple[Any, ...] | None:
        cls: Any = type(obj)
        is_parameter = cls.__reduce_ex__ is _REDUCE_PARAMETER
        if not is_parameter and (cls.__reduce_ex__ is not _REDUCE or is_wrapper(obj)):
            return None  # it knows best, and what it consists of comes here again
        taken = plain(obj)
        self._taken.append(taken)
        self._origins[id(taken)] = obj
        if cls is _PARAMETER:
            return as_parameter, (_MARK, obj.requires_grad)
        if is_parameter:
            return as_parameter_of, (_MARK, obj.requires_grad, cls)
        return as_subclass_of, (_MARK, cls)


def walk(obj: object, *, raw_in_band: bool = False) -> tuple[io.BytesIO, Slots | None]:
    """Pickle an object.

    Args:
        obj: anything.
        raw_in_band: leave in the stream what is not a tensor.

    Returns:
        The stream, at its end, and what was taken out of it, if anything was.

    Raises:
        PayloadError: a tensor in it cannot be sent, or pickle cannot take it.
    """
    taken: list[Any] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        if buffer is not _MARK:
            if raw_in_band:
                return True
            taken.append(buffer.raw())
        return False

    stream = io.BytesIO()
    pickler = _Pickler(stream, 5, buffer_callback=take)
    pickler._taken = taken
    pickler._origins = {}
    try:
        pickler.dump(obj)
    except AiocommError:
        raise
    except Exception as error:
        raise PayloadError(
            f"the object cannot be pickled ({type(error).__name__}: {error}): send data that "
            "pickle can take, and classes and functions that the peer can import"
        ) from error
    if not taken:
        return stream, None
    slots = Slots()
    try:
        slots.add(taken)
    except Refused as refused:
        tensor = refused.tensor
        where = where_is(pickler._origins.get(id(tensor), tensor), obj)
        raise refuse(tensor, where, refused.cause) from refused.cause
    return stream, slots
